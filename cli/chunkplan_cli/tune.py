"""`chunkplan tune`: chooses ChunkSize and K for a model on GPUs, without any."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable

from chunkplan.cost.fused import fused_words
from chunkplan.cost.hardware import ERRORS, source_of, typed_gpus
from chunkplan.quantities import gibibytes, k_words, layout_words, percent, seconds, trained_words
from chunkplan.reporting.tables import Table
from chunkplan.reporting.way_row import how_words
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
from chunkplan_cli.plan_report import note_loss, warn_of_positions
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
    note_loss(loaded, asked)
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
    before = target.read_bytes() if target.is_file() else b""
    write_tuning(tuning, target)
    note(f"tuning in {target}" + (", the same as was found before" if target.read_bytes() == before else ""))
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
    mean = tuning.tokens_per_step * -(-tuning.num_sequences // options.global_batch) / tuning.num_sequences
    print_tuned_for(console, options, tuning.num_sequences, mean, tuning.longest_sequence)
    console.print()
    if tuning.layouts:
        console.print(drawn_table(console, _layouts(tuning)))
        console.print()
    print_way_heads(console, "Ways to train today", options)
    for row in tuning.baselines:
        print_way(console, row, options, tuning.num_sequences)
    console.print()
    wide = console.width >= _WIDE
    console.print(drawn_table(console, _choices(tuning, wide=wide), gap=2 if wide else 1))
    num_fitting = sum(choice.fits for choice in tuning.choices)
    console.print(
        f"> {verdict_title(tuning)}: of those as fast within 0.5%, the one with least memory\n"
        "* less memory than all above it\n"
        + (
            f"{num_fitting:,} of {len(tuning.choices):,} choices fit"
            if options.thorough
            else "choices that cannot be faster were not simulated (--thorough does)"
        ),
        style="dim",
    )
    console.print()
    print_verdict(console, tuning, verdict_title(tuning))


def print_tuned_for(console: Console, options: TuneOptions, num_sequences: int, mean: float, longest: int) -> None:
    """Print which model is trained, on which GPUs, and with which data: of so many tokens on average, and at most."""
    layouts = options.layouts()
    gpus = f"{layouts[0].gpus} x {options.hardware.name} of {gibibytes(options.gpu_memory)}"
    gpus += f": {layout_words(*layouts[0])}" if len(layouts) == 1 and layouts[0].gpus > 1 else ""
    trained = f", {trained_words(options.lora_rank, options.load_in_4bit)}" if options.lora_rank else ""
    trained += f", {options.optimizer}" if options.optimizer != "adamw" else ""
    trained += "".join(f", {words}" for words in fused_words(options.fused_kernels, options.compile))
    data = f"{num_sequences:,} sequences, mean {mean:,.0f} tokens, the longest {longest:,}"
    facts = [("model", options.shape.name + trained), ("GPUs", gpus)]
    console.print(facts_grid([*facts, ("data", f"{data}; {options.global_batch:,} a step")]))


def print_verdict(console: Console, tuning: Tuning, title: str) -> None:
    """Print the box with the choice to take: what it gains, and what it costs."""
    console.print(Panel(_verdict(tuning), title=title, title_align="left", expand=False))


def verdict_title(tuning: Tuning) -> str:
    """Name the choice to take."""
    return "recommended" if tuning.recommended else "fastest, plan only"


def _layouts(tuning: Tuning) -> Table:
    rows = []
    for layout, step_ns, runnable_ns in tuning.layouts:
        time = "does not fit" if step_ns is None else seconds(step_ns / 1e3)
        runnable = "none" if runnable_ns is None else seconds(runnable_ns / 1e3)
        rows.append((layout_words(*layout), time, runnable if runnable_ns != step_ns else ""))
    if not any(row[-1] for row in rows):
        return Table("Layouts", ("layout", "step"), [row[:-1] for row in rows], texts=("layout",))
    return Table("Layouts", ("layout", "step", "that the trainer runs"), rows, texts=("layout",))


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
    """The choices worth a look, the recommended one first; the caption has what all of them have in common."""
    fitting = [choice for choice in tuning.choices if choice.fits]
    others = [place for place, choice in enumerate(fitting) if choice.plan_only and tuning.recommended]
    has_layouts = len({choice.layout for choice in fitting}) > 1
    shown = _shown(tuning, fitting, others)
    how = [[layout_words(*fitting[place].layout)] * has_layouts + _how(fitting[place]) for place in shown]
    common = [words for words in how[0] if all(words in each for each in how)] if len(shown) > 1 else []
    rows, styles = [], []
    for place, words in zip(shown, how, strict=True):
        choice = fitting[place]
        is_the_one = choice is tuning.best
        shares = [percent(choice.bubble), percent(choice.recompute_share)]
        cells = [
            *((">" if is_the_one else " ") + ("*" if place in tuning.pareto else " "), f"{choice.config.chunk_size:,}"),
            k_words(choice.config.k, choice.config.k_by_length),
            *(seconds(choice.step_ns / 1e3), f"{choice.tokens_per_second:,.0f}", percent(choice.mfu)),
            *(shares if wide else []),
            gibibytes(choice.memory.total),
            ", ".join(["plan only"] * (place in others) + [each for each in words if each not in common]),
        ]
        rows.append(cells)
        styles.append("bold" if is_the_one else "")
    more = ("bubble", "recompute") if wide else ()
    head = ("", "chunk", "K", "step", "tokens/s", "MFU", *more, "memory", "how")
    caption = f"Plans{', all with ' if common else ''}{', '.join(common)}"
    return Table(caption, head, rows, texts=("", "K", "how"), styles=styles)


def _how(choice: Choice) -> list[str]:
    """Return the settings of a choice beside its ChunkSize, K and layout."""
    from chunkplan.tuning.document import choice_entry

    return how_words(choice_entry(choice))


def _verdict(tuning: Tuning) -> RichTable:
    """Build what is in the box: what is gained, the setting, and what it costs."""
    choice, options = tuning.best, tuning.options
    rate = f"{seconds(choice.step_ns / 1e3)}, {choice.tokens_per_second:,.0f} tokens/s, MFU {percent(choice.mfu)}"
    used = tuning.gpu_hours
    hours = f"{seconds(tuning.epoch_hours * 3.6e9)}, {f'{used:,.1f}' if used >= 1 else f'{used:.2g}'} GPU-hours"
    if options.gpu_hour_price is not None:
        hours += f", {options.gpu_hour_price * tuning.gpu_hours:,.2f} at {options.gpu_hour_price:g} a GPU-hour"
    memory = f"{gibibytes(choice.memory.total)} of {gibibytes(options.gpu_memory)} on the fullest GPU"
    rows = [("gain", _gain_words(tuning)), *_against(tuning), ("setting", _words(choice, tuning))]
    if choice.extra_ns:
        rate += f"; {seconds(choice.extra_ns / 1e3)} of it forwards for the loss {choice.config.loss}"
    rows += [("a step", rate), ("an epoch", hours), ("memory", memory)]
    if choice.host_bytes:
        rows.append(("host memory", f"{gibibytes(choice.host_bytes)} a GPU{_on_host(choice)}"))
    rows += [("longest that fits", longest)] if (longest := _longest_words(tuning)) else []
    rows.append(("fewest GPUs", _fewest_words(tuning)))
    if lost := [f"{row.name}: {percent(row.lost)}" for row in tuning.baselines if row.lost]:
        rows.append(("tokens lost", f"none; {', '.join(lost)}"))
    if not tuning.recommended:
        rows.append(("plan only", f"the runtime cannot run {choice.plan_only} yet; other trainers can follow the plan"))
    elif tuning.chosen.step_ns < choice.step_ns:
        time = seconds(tuning.chosen.step_ns / 1e3)
        words = f"{time} a step with {_words(tuning.chosen, tuning)}"
        rows.append(("faster, plan only", f"{words}; the runtime cannot run {tuning.chosen.plan_only} yet"))
    return facts_grid(rows, bold=("gain", "setting"))


def _on_host(choice: Choice) -> str:
    """Return what a choice keeps in host memory."""
    words = ["keys and values"] if choice.cost.kv_offload else []
    words += ["inputs of layers"] if "offload" in choice.cost.levels else []
    words += ["results of attention for the second forward"] if choice.config.keep_attention != "off" else []
    return f": {', '.join(words)}" if words else ""


def _gain_words(tuning: Tuning) -> str:
    """Compare with what gains are against, on the layout that is best for it."""
    best = tuning.best_baseline
    if best is None and tuning.options.baseline:
        return f"{tuning.options.baseline} does not fit: there is nothing to compare with"
    if best is None:
        whole = tuning.baselines[0]
        needed = gibibytes(whole.memory.total)
        return f"no way of today fits without cutting sequences; {whole.name} would need {needed} a GPU"
    today = f"{best.name} ({seconds(best.step_ns / 1e3)} on {layout_words(*best.layout)})"
    if not tuning.has_gain:
        return f"none: keep {today}; a plan takes {seconds(tuning.best.step_ns / 1e3)}"
    today += "" if tuning.options.baseline else ", the fastest way of today that fits and loses no token"
    faster = [row for row in tuning.baselines if row.fits and not row.lost and row.step_ns < tuning.best.step_ns]
    if faster:
        today += f"; {min(faster, key=lambda row: row.step_ns).name} is faster and loses no token"
    error = ERRORS[source_of(tuning.options.hardware)]
    if tuning.gain is not None and tuning.gain < 1 + error:
        today += f"; predictions may be off by {error:.0%}: measure both"
    return f"{tuning.gain:.2f}x as fast as {today}"


def _against(tuning: Tuning) -> list[tuple[str, str]]:
    """The speed of the best choice over each of the other baselines that fit."""
    lines = [
        f"{row.step_ns / tuning.best.step_ns:>5.2f}x  {row.name}{f', {percent(row.lost)} lost' if row.lost else ''}"
        for row in tuning.baselines
        if row.fits and row is not tuning.best_baseline
    ]
    return [("over other ways", "\n".join(lines))] if lines else []


def _longest_words(tuning: Tuning) -> str:
    from chunkplan.reporting.plan_words import longest_words
    from chunkplan.tuning.trial import longest_of

    choice = tuning.best
    longest = longest_of(choice.config, choice.cost, choice.memory, tuning.options.gpu_memory)
    can_share = choice.config.cp != "off" or not choice.cost.shares("gradients")
    return longest_words(longest if can_share else longest[:1], tuning.longest_sequence if choice.fits else 0)


def _fewest_words(tuning: Tuning) -> str:
    from chunkplan.tuning.tune import GPU_COUNTS

    used = tuning.best.layout.gpus
    if tuning.fewest_gpus == used:
        return f"{used}: it does not fit on fewer" if used > min(GPU_COUNTS) else "1"
    fewest = typed_gpus(tuning.fewest_gpus, tuning.options.hardware.name)
    return f"{tuning.fewest_gpus} (`--gpus {fewest}` says how long a step takes then)"


def _words(choice: Choice, tuning: Tuning) -> str:
    """Return a choice in words, with its layout where several were compared."""
    words = [f"ChunkSize {choice.config.chunk_size:,}", f"K {k_words(choice.config.k, choice.config.k_by_length)}"]
    return ", ".join([*words, *[layout_words(*choice.layout)] * bool(tuning.layouts), *_how(choice)])
