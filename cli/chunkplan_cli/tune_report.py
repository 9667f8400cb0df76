"""Prints a tuning in the terminal: baselines, choices, and the one to take. Readable at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.cost.adapters import trained_words
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.quantities import ZERO, gibibytes, k_words, percent, seconds

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.tuning.grid import Choice
    from chunkplan.tuning.tune import Tuning

#: Choices that are shown: the fastest, others that need less memory than all faster ones, and beside what the runtime
#: can run, the fastest that it cannot.
_MOST_FASTEST, _MOST_PARETO, _MOST_PLAN_ONLY = 12, 8, 4

#: On narrower screens the columns of the choices lie closer together, so that fewer rows are broken.
_WIDE = 116


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Print what a tuning is for, its baselines, the choices that are worth a look, and the one to take."""
    options = tuning.options
    gpus = f"{tuning.chosen.layout.gpus} x {options.hardware.name} of {gibibytes(options.gpu_memory)}"
    adapters = f", {trained_words(options.lora_rank, options.load_in_4bit)}" if options.lora_rank else ""
    console.print(
        f"{options.shape.name}{adapters} on {gpus}{'' if tuning.layouts else f': {_layout_words(tuning.chosen)}'}; "
        f"{options.global_batch} sequences a step, {tuning.tokens_per_step:,.0f} tokens on average, "
        f"the longest {tuning.longest_sequence:,}"
    )
    console.print()
    if tuning.layouts:
        console.print(_layouts(tuning))
        console.print()
    console.print(_baselines(tuning))
    console.print()
    console.print(_choices(tuning, gap=2 if console.width >= _WIDE else 1))
    console.print()
    for line in _verdict(tuning):
        console.print(line)


def _layout_words(choice: Choice) -> str:
    """Say how GPUs are used, and how many layers stages have where they differ."""
    dp, tp, pp = choice.layout
    layers = choice.config.layers(choice.cost.shape.num_layers)
    uneven = f" (layers {','.join(map(str, layers))})" if layers[0] != layers[-1] else ""
    return f"dp {dp}, tp {tp}, pp {pp}{uneven}"


def _layouts(tuning: Tuning) -> Table:
    table = _table("Layouts, by a first look", "dp", "tp", "pp", "step", "runnable")
    for layout, step_ns, runnable_ns in tuning.layouts:
        time = "does not fit" if step_ns is None else seconds(step_ns / 1e3)
        runnable = "" if runnable_ns is None else seconds(runnable_ns / 1e3)
        table.add_row(str(layout.dp), str(layout.tp), str(layout.pp), time, runnable)
    return table


def _baselines(tuning: Tuning) -> Table:
    layouts = ["layout"] if tuning.layouts else []
    table = _table("What people run today", *layouts, "step", "tokens/s", "memory", "notes", first="way")
    for row in tuning.baselines:
        rate = tuning.tokens_per_step * (1 - row.lost) / (row.step_ns / 1e9)
        notes = checkpointing_words(row.checkpointing)
        notes += [ZERO[row.sharding]] if row.sharding != "optimizer" and row.layout.dp > 1 else []
        notes += [f"{percent(row.lost)} lost"] if row.lost else []
        table.add_row(
            row.name,
            *("x".join(map(str, row.layout)) for _ in layouts),
            seconds(row.step_ns / 1e3) if row.fits else f"({seconds(row.step_ns / 1e3)})",
            f"{rate:,.0f}" if row.fits else "",
            gibibytes(row.memory.total) + ("" if row.fits else " !"),
            ", ".join(notes),
            style=None if row.fits else "dim",
        )
    return table


def _choices(tuning: Tuning, gap: int) -> Table:
    table = _table(
        "Chunked", "chunk", "K", "schedule", "step", "MFU", "bubble", "recompute", "memory", "notes", first=""
    )
    table.padding = (0, gap, 0, 0)
    fitting = [choice for choice in tuning.choices if choice.fits]
    others = [place for place, choice in enumerate(fitting) if choice.plan_only and tuning.recommended]
    shown = set([place for place in range(len(fitting)) if place not in others][:_MOST_FASTEST])
    shown |= set([place for place in tuning.pareto if place not in shown][:_MOST_PARETO])
    shown |= set(others[:_MOST_PLAN_ONLY])
    shown |= {place for place, choice in enumerate(fitting) if choice in (tuning.chosen, tuning.recommended)}
    with_layout = len({choice.layout for choice in fitting}) > 1
    for place in sorted(shown):
        choice = fitting[place]
        is_the_one = choice is tuning.best
        notes = [f"{choice.layout.dp}x{choice.layout.tp}x{choice.layout.pp}"] if with_layout else []
        notes += [] if choice.config.cp == "off" else [f"cp {choice.config.cp}"]
        layers = choice.config.stage_layers
        notes += [] if layers is None else [f"layers {','.join(map(str, layers))}"]
        notes += split_words(choice.config)
        notes += ["plan only"] if place in others else []
        notes += memory_words(choice)
        table.add_row(
            (">" if is_the_one else " ") + ("*" if place in tuning.pareto else " "),
            f"{choice.config.chunk_size:,}",
            k_words(choice.config.k, choice.config.k_by_length),
            str(choice.config.schedule),
            seconds(choice.step_ns / 1e3),
            percent(choice.mfu),
            percent(choice.bubble),
            percent(choice.recompute_share),
            gibibytes(choice.memory.total),
            ", ".join(notes),
            style="bold" if is_the_one else None,
        )
    return table


def _verdict(tuning: Tuning) -> list[Text]:
    from chunkplan.reporting.plan_words import longest_words
    from chunkplan.tuning.trial import longest_of

    fitting = [choice for choice in tuning.choices if choice.fits]
    rivals = [choice for choice in fitting if not (tuning.recommended and choice.plan_only)]
    faster = "faster ones" if len(rivals) == len(fitting) else "faster runnable ones"
    lines = [
        Text(
            f"* needs less memory than all {faster}   recompute: share of the work   memory: of the fullest stage\n"
            f"{len(fitting)} of {len(tuning.choices)} choices fit",
            style="dim",
        ),
        Text(),
    ]
    choice = tuning.best
    title = "Recommended: " if tuning.recommended else "Fastest, plan only: "
    lines.append(Text.assemble((title, "bold"), _words(choice, tuning)))
    whole = tuning.baselines[0]
    gain = f"{whole.step_ns / choice.step_ns:.2f}x as fast as one sequence a micro-batch"
    gain += "" if whole.fits else f" (which would need {gibibytes(whole.memory.total)} a GPU)"
    best = tuning.best_baseline
    if best is not None and best is not whole:
        gain += f", {best.step_ns / choice.step_ns:.2f}x as fast as {best.name}"
    lines.append(Text(f"{gain}; {gibibytes(choice.memory.total)} of {gibibytes(tuning.options.gpu_memory)}."))
    memory = tuning.options.gpu_memory
    longest = longest_of(choice.config, choice.cost, choice.memory, memory)
    can_share = choice.config.cp != "off" or not choice.cost.shares("gradients")
    lines.append(Text(f"{longest_words(longest if can_share else longest[:1])}."))
    if choice is not rivals[0]:
        lines.append(Text("Of those as fast within 0.5%, it takes least memory."))
    if not tuning.recommended:
        lines.append(
            Text(f"Not recommended: the runtime cannot run {choice.plan_only} yet. Other trainers can follow its plan.")
        )
    elif tuning.chosen.step_ns < choice.step_ns:
        time = seconds(tuning.chosen.step_ns / 1e3)
        words = f"Faster, plan only: {time} a step with {_words(tuning.chosen, tuning)}"
        lines.append(Text(f"{words}. The runtime cannot run {tuning.chosen.plan_only} yet."))
    return lines


def _words(choice: Choice, tuning: Tuning) -> str:
    """Say what a choice is, with its layout where several were compared."""
    words = [
        f"ChunkSize {choice.config.chunk_size:,}",
        f"K {k_words(choice.config.k, choice.config.k_by_length)}",
        str(choice.config.schedule),
        *([] if choice.config.cp == "off" else [f"cp {choice.config.cp}"]),
        *split_words(choice.config),
        *memory_words(choice),
    ]
    words += [_layout_words(choice)] if tuning.layouts else []
    return ", ".join(words)


def print_headline(console: Console, tuning: Tuning) -> None:
    """Print what chunks would gain, in one line: over the best baseline that fits and loses no token."""
    choice, best, whole = tuning.chosen, tuning.best_baseline, tuning.baselines[0]
    dp, tp, pp = choice.layout
    if best is not None:
        gain = f", {best.step_ns / choice.step_ns:.1f}x as fast as {best.name} ({seconds(best.step_ns / 1e3)}), the "
        gain += "fastest way of today that fits and loses no token"
    else:
        gain = f"; no way of today fits {gibibytes(tuning.options.gpu_memory)} without cutting sequences: {whole.name} "
        gain += f"would need {gibibytes(whole.memory.total)}"
    console.print(
        f"{tuning.options.shape.name} on {dp * tp * pp} x {tuning.options.hardware.name} (tp {tp}, pp {pp}), by "
        f"prediction: a step takes {seconds(choice.step_ns / 1e3)} in chunks of {choice.config.chunk_size:,} with "
        f"K {choice.config.k}{gain}."
    )


def split_words(config: PlanConfig) -> list[str]:
    """Say where long sequences are cut, if not at ChunkSize."""
    return [] if config.split == "full" else [f"split {config.split}"]


def memory_words(choice: Choice) -> list[str]:
    """Say how a choice saves memory."""
    words = checkpointing_words(choice.cost.checkpointing)
    words += ["KV offload"] if choice.cost.kv_offload else []
    shares_otherwise = choice.cost.sharding != "optimizer" and choice.layout.dp > 1
    return words + ([ZERO[choice.cost.sharding]] if shares_otherwise else [])


def _table(title: str, *names: str, first: str | None = None) -> Table:
    table = Table(title=Text(title, style="bold", no_wrap=True), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.min_width = len(title)
    if first is not None:
        table.add_column(first, header_style="dim")
    for name in names:
        justify = "left" if name in ("schedule", "checkpointing", "notes") else "right"
        table.add_column(name, justify=justify, header_style="dim", no_wrap=name not in ("notes", "K"), overflow="fold")  # type: ignore[arg-type]
    return table
