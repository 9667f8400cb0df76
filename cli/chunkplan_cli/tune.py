"""`chunkplan tune`: chooses ChunkSize and K for a model on GPUs, without any."""

from __future__ import annotations

import shlex
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable

from chunkplan.cost.checkpointing import checkpointing_words, shown_levels
from chunkplan.cost.fused import fused_words
from chunkplan.cost.hardware import ERRORS, source_of
from chunkplan.quantities import ZERO, gibibytes, k_words, percent, seconds, trained_words
from chunkplan.reporting.tables import Table
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.declared import (
    AnalysisArgument,
    CliValues,
    JsonOption,
    WorkspaceOption,
    files_read,
    find_analysis,
    output_option,
    takes,
    tune_options,
)
from chunkplan_cli.plan_report import warn_of_positions
from chunkplan_cli.progress import note_compilation, tuning_progress
from chunkplan_cli.terminal import drawn_table, facts_grid, note, print_json, stdout, warn
from chunkplan_cli.ways_report import print_way, print_way_heads

if TYPE_CHECKING:
    from chunkplan.tuning.grid import Choice
    from chunkplan.tuning.tune import Tuning


@takes(asked=TuneOptions)
def tune(
    analysis: AnalysisArgument = None,
    *,
    asked: CliValues,
    output: Annotated[
        Path | None, output_option("Where to write what was found. Default: WORKSPACE/tuning.json.", metavar="FILE")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose ChunkSize, K, schedule and memory options for a model on GPUs, by simulating steps of the data.

    Shows first baselines in the same memory, then the choices that are worth a look. `build --auto` builds
    a plan with the recommended one; `simulate` shows where the time of one step goes.

    Example: chunkplan tune --model Qwen/Qwen2.5-7B --gpus 16xH200
    """
    from chunkplan.files.writing import refuse_overwriting
    from chunkplan.planfile.load import load_analysis
    from chunkplan.tuning.document import tuning_document, write_tuning
    from chunkplan.tuning.tune import tune as run
    from chunkplan.workspace import Workspace

    options = tune_options(asked)
    place = Workspace.find(workspace)
    source = find_analysis(analysis, place)
    target = output or place.tuning
    refuse_overwriting(target, (source, *files_read(asked)))
    loaded = load_analysis(source)
    warn_of_positions(loaded, options.shape)
    with note_compilation(), tuning_progress() as report_progress:
        tuning = run(loaded, options, progress=report_progress)
    if as_json:
        print_json(tuning_document(tuning))
    else:
        _print(stdout(), tuning)
    if not loaded.is_exact:
        warn("the lengths are estimated from bytes: times and memory are, too")
    if output is None:
        place.root.mkdir(parents=True, exist_ok=True)
    write_tuning(tuning, target)
    note(f"tuning in {target}")
    where = [str(analysis)] if analysis else []
    where += ["--workspace", str(workspace)] if workspace else []
    where += ["--auto", *(["--from", str(output)] if output else [])]
    note("next: " + shlex.join(["chunkplan", "build", *where]))


#: Choices that are shown: the fastest, others that need less memory than all faster ones, and beside what the runtime
#: can run, the fastest that it cannot.
_MOST_FASTEST, _MOST_PARETO, _MOST_PLAN_ONLY = 8, 5, 3

#: On narrower screens the table of choices has fewer columns, and these lie closer together.
_WIDE = 116


def _print(console: Console, tuning: Tuning) -> None:
    """Print what a tuning is for, its baselines, the choices that are worth a look, and in a box the one to take."""
    options = tuning.options
    layout = "" if tuning.layouts else f": {_layout_words(tuning.chosen)}"
    about = f"{tuning.tokens_per_step:,.0f} tokens on average, the longest {tuning.longest_sequence:,}"
    print_tuned_for(console, options, layout, about)
    console.print()
    if tuning.layouts:
        console.print(drawn_table(console, _layouts(tuning)))
        console.print()
    print_way_heads(console, "Baselines", options)
    for row in tuning.baselines:
        print_way(console, row, options, tuning.num_sequences)
    console.print()
    wide = console.width >= _WIDE
    console.print(drawn_table(console, _choices(tuning, wide=wide), gap=2 if wide else 1))
    num_fitting = sum(choice.fits for choice in tuning.choices)
    console.print(
        f"> {_title(tuning)}   * less memory than all above it   layout: dp x tp x pp\n"
        + (
            f"{num_fitting:,} of {len(tuning.choices):,} choices fit"
            if options.thorough
            else "others are left out by their bounds; `--thorough` simulates them too"
        ),
        style="dim",
    )
    console.print()
    print_verdict(console, tuning)


def print_tuned_for(console: Console, options: TuneOptions, layout: str, about: str) -> None:
    """Print which model is trained on which GPUs, in which `layout`, with steps of how many sequences, and `about`
    these."""
    gpus = f"{options.layouts()[0].gpus} x {options.hardware.name} of {gibibytes(options.gpu_memory)}"
    trained = f", {trained_words(options.lora_rank, options.load_in_4bit)}" if options.lora_rank else ""
    trained += f", {options.optimizer}" if options.optimizer != "adamw" else ""
    trained += "".join(f", {words}" for words in fused_words(options.fused_kernels, options.compile))
    console.print(f"{options.shape.name}{trained} on {gpus}{layout}; {options.global_batch} sequences a step, {about}")


def print_verdict(console: Console, tuning: Tuning) -> None:
    """Print the box with the choice to take: what it gains, and what it costs."""
    console.print(Panel(_verdict(tuning), title=_title(tuning), title_align="left", expand=False))


def _title(tuning: Tuning) -> str:
    return "recommended" if tuning.recommended else "fastest, plan only"


def _layout_words(choice: Choice) -> str:
    """Return the layout of a choice, with the layers of stages where they differ."""
    dp, tp, pp = choice.layout
    layers = choice.config.layers(choice.cost.shape.num_layers)
    uneven = f" (layers {','.join(map(str, layers))})" if layers[0] != layers[-1] else ""
    return f"dp {dp}, tp {tp}, pp {pp}{uneven}"


def _layouts(tuning: Tuning) -> Table:
    rows = []
    for layout, step_ns, runnable_ns in tuning.layouts:
        time = "does not fit" if step_ns is None else seconds(step_ns / 1e3)
        rows.append((*map(str, layout), time, "" if runnable_ns is None else seconds(runnable_ns / 1e3)))
    return Table("Layouts, by a first look", ("dp", "tp", "pp", "step", "runnable"), rows)


def _shown(tuning: Tuning, fitting: list[Choice], others: list[int]) -> list[int]:
    """Choose the places among those that are `fitting` which are worth a look; `others` are plan only."""
    of_each: dict[tuple[object, ...], int] = {}  # a K beyond what sequences need changes nothing
    for place, choice in enumerate(fitting):
        of_each.setdefault((choice.config.chunk_size, choice.layout, *_how(choice), choice.step_ns), place)
    shown = set([place for place in of_each.values() if place not in others][:_MOST_FASTEST])
    shown |= set([place for place in tuning.pareto if place not in shown][:_MOST_PARETO])
    shown |= set(others[:_MOST_PLAN_ONLY])
    shown |= {place for place, choice in enumerate(fitting) if choice in (tuning.chosen, tuning.recommended)}
    return sorted(shown, key=lambda place: (fitting[place] is not tuning.best, place))


def _choices(tuning: Tuning, *, wide: bool) -> Table:
    fitting = [choice for choice in tuning.choices if choice.fits]
    others = [place for place, choice in enumerate(fitting) if choice.plan_only and tuning.recommended]
    has_layouts = len({choice.layout for choice in fitting}) > 1
    rows, styles = [], []
    for place in _shown(tuning, fitting, others):
        choice = fitting[place]
        is_the_one = choice is tuning.best
        shares = [percent(choice.bubble), percent(choice.recompute_share)]
        cells = [
            *((">" if is_the_one else " ") + ("*" if place in tuning.pareto else " "), f"{choice.config.chunk_size:,}"),
            k_words(choice.config.k, choice.config.k_by_length),
            *["x".join(map(str, choice.layout))] * has_layouts,
            *(seconds(choice.step_ns / 1e3), f"{choice.tokens_per_second:,.0f}", percent(choice.mfu)),
            *(shares if wide else []),
            gibibytes(choice.memory.total),
            ", ".join([*(["plan only"] if place in others else []), *_how(choice)]),
        ]
        rows.append(cells)
        styles.append("bold" if is_the_one else "")
    more = ("bubble", "recompute") if wide else ()
    head = ("", "chunk", "K", *["layout"] * has_layouts, "step", "tokens/s", "MFU", *more, "memory", "how")
    return Table("In chunks", head, rows, texts=("", "K", "layout", "how"), styles=styles)


def _how(choice: Choice) -> list[str]:
    """Return the settings of a choice beside its ChunkSize, K and layout."""
    words = [str(choice.config.schedule)] if choice.layout.pp > 1 else []
    words += [] if choice.config.cp == "off" else [f"cp {choice.config.cp}"]
    layers = choice.config.stage_layers
    split = [] if choice.config.split == "full" else [f"split {choice.config.split}"]
    words += [] if layers is None else [f"layers {','.join(map(str, layers))}"]
    return [*words, *split, *_saving_words(choice)]


def _verdict(tuning: Tuning) -> RichTable:
    """Build what is in the box: the setting, what it gains, and what it costs."""
    choice, options = tuning.best, tuning.options
    rate = f"{seconds(choice.step_ns / 1e3)}, {choice.tokens_per_second:,.0f} tokens/s, MFU {percent(choice.mfu)}"
    used = tuning.gpu_hours
    hours = f"{seconds(tuning.epoch_hours * 3.6e9)}, {f'{used:,.1f}' if used >= 1 else f'{used:.2g}'} GPU-hours"
    if options.gpu_hour_price is not None:
        hours += f", {options.gpu_hour_price * tuning.gpu_hours:,.2f} at {options.gpu_hour_price:g} a GPU-hour"
    rows = [("setting", _words(choice, tuning)), ("gain", _gain_words(tuning)), *_against(tuning)]
    rows += [("a step", rate), ("an epoch", hours)]
    rows.append(("memory", _memory_words(tuning)))
    if choice.host_bytes:
        rows.append(("host memory", f"{gibibytes(choice.host_bytes)} for each GPU{_on_host(choice)}"))
    if by_layer := _level_words(choice):
        rows.append(("checkpointing", by_layer))
    rows.append(("longest sequence", _longest_words(tuning)))
    rows.append(("fewest GPUs", _fewest_words(tuning)))
    if lost := [f"{row.name}: {percent(row.lost)}" for row in tuning.baselines if row.lost]:
        rows.append(("tokens lost", f"none; {', '.join(lost)}"))
    if not tuning.recommended:
        rows.append(("plan only", f"the runtime cannot run {choice.plan_only} yet; other trainers can follow the plan"))
    elif tuning.chosen.step_ns < choice.step_ns:
        time = seconds(tuning.chosen.step_ns / 1e3)
        words = f"{time} a step with {_words(tuning.chosen, tuning)}"
        rows.append(("faster, plan only", f"{words}; the runtime cannot run {tuning.chosen.plan_only} yet"))
    return facts_grid(rows, bold=("setting", "gain"))


def _on_host(choice: Choice) -> str:
    """Return what a choice keeps in host memory."""
    words = ["keys and values"] if choice.cost.kv_offload else []
    words += ["inputs of layers"] if "offload" in choice.cost.levels else []
    words += ["attention of what is run again"] if choice.config.keep_attention != "off" else []
    return f": {', '.join(words)}" if words else ""


def _gain_words(tuning: Tuning) -> str:
    """Compare with what gains are against, on the layout that is best for it."""
    best = tuning.best_baseline
    if best is None and tuning.options.baseline:
        return f"{tuning.options.baseline} does not fit: there is nothing to compare with"
    if best is None:
        whole = tuning.baselines[0]
        needed = gibibytes(whole.memory.total)
        return f"no baseline fits without cutting sequences; {whole.name} would need {needed} a GPU"
    time, layout = seconds(best.step_ns / 1e3), "x".join(map(str, best.layout))
    if not tuning.has_gain:
        return f"nothing to gain: {best.name} takes {time} on {layout}"
    today = f"{best.name} ({time} on {layout})"
    today += "" if tuning.options.baseline else ", the fastest baseline that fits and loses no token"
    error = ERRORS[source_of(tuning.options.hardware)]
    if tuning.gain is not None and tuning.gain < 1 + error:
        today += f"; that is within the {error:.0%} that times may be off by: measure both"
    return f"{tuning.gain:.2f}x as fast as {today}"


def _against(tuning: Tuning) -> list[tuple[str, str]]:
    """The speed of the best choice over each of the other baselines that fit."""
    from chunkplan.tuning.tune import A_GAIN

    step_ns, fitting = tuning.best.step_ns, [row for row in tuning.baselines if row.fits]
    lines = [
        f"{row.step_ns / step_ns:.2f}x  {row.name}{f', {percent(row.lost)} lost' if row.lost else ''}"
        for row in fitting
        if row is not tuning.best_baseline
    ]
    whole = [row for row in fitting if not row.lost]
    if whole and all(row.step_ns < A_GAIN * step_ns for row in whole):
        lines.append("faster than none of these: keep what you have")
    return [("against others", "\n".join(lines))] if lines else []


def _memory_words(tuning: Tuning) -> str:
    fitting = [choice for choice in tuning.choices if choice.fits]
    rivals = [choice for choice in fitting if not (tuning.recommended and choice.plan_only)]
    used = f"{gibibytes(tuning.best.memory.total)} of {gibibytes(tuning.options.gpu_memory)}, of the fullest GPU"
    return used if tuning.best is rivals[0] else f"{used}; the least of those as fast within 0.5%"


def _level_words(choice: Choice) -> str:
    """Return the levels of activation checkpointing of the layers, stage by stage, where these differ."""
    levels, layers = choice.cost.levels, choice.config.layers(choice.cost.shape.num_layers)
    if len(set(levels)) == 1:
        return ""
    stops = list(accumulate(layers))
    own = [shown_levels(levels[stop - count : stop]) for stop, count in zip(stops, layers, strict=True)]
    shown = [each.replace(",", ", ") for each in own]  # lines end between runs
    if len(shown) == 1:
        return shown[0]
    kind = "model stage" if choice.config.virtual_stages > 1 else "stage"
    place, words = 0, []
    for same, run in groupby(shown):
        last = place + len(list(run)) - 1
        words.append(f"{kind} {place}: {same}" if last == place else f"{kind}s {place} to {last}: {same}")
        place = last + 1
    return "\n".join(words)


def _longest_words(tuning: Tuning) -> str:
    from chunkplan.reporting.plan_words import longest_words
    from chunkplan.tuning.trial import longest_of

    choice = tuning.best
    longest = longest_of(choice.config, choice.cost, choice.memory, tuning.options.gpu_memory)
    in_data = f"{tuning.longest_sequence:,} in the data"
    if not longest:
        return in_data
    can_share = choice.config.cp != "off" or not choice.cost.shares("gradients")
    alone = longest[0].num_tokens
    fits = ", which fits" if alone is not None and alone < tuning.longest_sequence else ""
    return f"{in_data}{fits}; {longest_words(longest if can_share else longest[:1])}"


def _fewest_words(tuning: Tuning) -> str:
    from chunkplan.tuning.tune import GPU_COUNTS

    used = tuning.best.layout.gpus
    if tuning.fewest_gpus == used:
        fewer = [str(count) for count in GPU_COUNTS if count < used]
        return f"these {used}: {', '.join(fewer)} would not be enough" if fewer else "this one"
    return f"{tuning.fewest_gpus} (`--gpus {tuning.fewest_gpus}` says how long a step takes then)"


def _words(choice: Choice, tuning: Tuning) -> str:
    """Return a choice in words, with its layout where several were compared."""
    words = [f"ChunkSize {choice.config.chunk_size:,}", f"K {k_words(choice.config.k, choice.config.k_by_length)}"]
    words += [_layout_words(choice)] if tuning.layouts else []
    return ", ".join([*words, *_how(choice)])


def _saving_words(choice: Choice) -> list[str]:
    """Return how a choice saves memory."""
    words = checkpointing_words(choice.cost.checkpointing)
    words += ["KV offload"] if choice.cost.kv_offload else []
    shares_otherwise = choice.cost.sharding != "optimizer" and choice.layout.dp > 1
    return words + ([ZERO[choice.cost.sharding]] if shares_otherwise else [])
