"""A tuning in the terminal: what people run today, the choices, and the one to take. Readable at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan_cli.quantities import gibibytes, k_words, percent, seconds

if TYPE_CHECKING:
    from chunkplan.tuning.grid import Choice
    from chunkplan.tuning.tune import Tuning

#: Choices that are shown: the fastest, and the others that need less memory than all faster ones.
_MOST_FASTEST, _MOST_PARETO = 12, 8


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Print `tuning`."""
    options = tuning.options
    layout = tuning.chosen.layout
    console.print(
        f"{options.shape.name} on {layout.gpus} x {options.hardware.name} of {gibibytes(options.gpu_memory)}: "
        f"dp {layout.dp}, tp {layout.tp}, pp {layout.pp}; {options.global_batch} sequences a step, "
        f"{tuning.tokens_per_step:,.0f} tokens on average, the longest {tuning.longest_sequence:,}"
        + _uneven(options.shape.num_layers, layout.pp)
    )
    console.print()
    if tuning.layouts:
        console.print(_layouts(tuning))
        console.print()
    console.print(_baselines(tuning))
    console.print()
    console.print(_choices(tuning))
    console.print()
    for line in _verdict(tuning):
        console.print(line)


def _uneven(num_layers: int, pp: int) -> str:
    """Where stages have more and fewer layers, say so."""
    from chunkplan.cost.durations import split_layers

    layers = split_layers(num_layers, pp)
    return f"; {layers[0]} to {layers[-1]} layers a stage" if layers[0] != layers[-1] else ""


def _layouts(tuning: Tuning) -> Table:
    table = _table("Layouts, by a first look", "dp", "tp", "pp", "step")
    for layout, step_ns in tuning.layouts:
        time = "does not fit" if step_ns is None else seconds(step_ns / 1e3)
        table.add_row(str(layout.dp), str(layout.tp), str(layout.pp), time)
    return table


def _baselines(tuning: Tuning) -> Table:
    table = _table("What people run today", "step", "tokens/s", "memory", "checkpoints", "tokens lost", first="way")
    for row in tuning.baselines:
        rate = tuning.tokens_per_step * (1 - row.lost) / (row.step_ns / 1e9)
        table.add_row(
            row.name,
            seconds(row.step_ns / 1e3) if row.fits else f"({seconds(row.step_ns / 1e3)})",
            f"{rate:,.0f}" if row.fits else "",
            gibibytes(row.memory.total) + ("" if row.fits else " !"),
            row.checkpointing,
            percent(row.lost) if row.lost else "",
            style=None if row.fits else "dim",
        )
    return table


def _choices(tuning: Tuning) -> Table:
    table = _table("Chunked", "chunk", "K", "schedule", "step", "MFU", "bubble", "again", "memory", "notes", first="")
    fitting = [choice for choice in tuning.choices if choice.fits]
    shown = set(range(min(_MOST_FASTEST, len(fitting))))
    shown |= set([place for place in tuning.pareto if place not in shown][:_MOST_PARETO])
    shown |= {place for place, choice in enumerate(fitting) if choice in (tuning.chosen, tuning.recommended)}
    with_layout = len({choice.layout for choice in fitting}) > 1
    for place in sorted(shown):
        choice = fitting[place]
        is_the_one = choice is (tuning.recommended or tuning.chosen)
        notes = [f"{choice.layout.dp}x{choice.layout.tp}x{choice.layout.pp}"] if with_layout else []
        notes += ["plan only"] if choice.plan_only and tuning.recommended else []
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
    fitting = sum(choice.fits for choice in tuning.choices)
    lines = [
        Text(
            "* needs less memory than all faster ones   again: forwarded twice   memory: of the fullest stage\n"
            f"{fitting} of {len(tuning.choices)} choices fit",
            style="dim",
        ),
        Text(),
    ]
    choice = tuning.recommended or tuning.chosen
    words = [
        f"ChunkSize {choice.config.chunk_size:,}",
        f"K {k_words(choice.config.k, choice.config.k_by_length)}",
        str(choice.config.schedule),
    ]
    words += memory_words(choice)
    title = "Recommended: " if tuning.recommended else "Fastest, plan only: "
    lines.append(Text.assemble((title, "bold"), ", ".join(words)))
    today = tuning.baselines[0]
    gain = f"{today.step_ns / choice.step_ns:.2f}x as fast as one sequence a micro-batch"
    gain += "" if today.fits else f" (which would need {gibibytes(today.memory.total)} a GPU)"
    best = tuning.best_of_today
    if best is not None and best is not today:
        gain += f", {best.step_ns / choice.step_ns:.2f}x as fast as {best.name}"
    lines.append(Text(f"{gain}; {gibibytes(choice.memory.total)} of {gibibytes(tuning.options.gpu_memory)}."))
    equals = [each for each in tuning.choices if each.fits and not (tuning.recommended and each.plan_only)]
    if choice is not equals[0]:
        lines.append(Text("Of those as fast within 0.5 %, it takes least memory."))
    if not tuning.recommended:
        lines.append(
            Text(f"Not recommended: the runtime cannot run {choice.plan_only} yet. Other trainers can follow its plan.")
        )
    elif tuning.chosen is not choice:
        faster = f"{seconds(tuning.chosen.step_ns / 1e3)} a step with {', '.join(memory_words(tuning.chosen))}"
        lines.append(Text(f"Plan only, faster: {faster}, which the runtime cannot run yet."))
    return lines


def print_headline(console: Console, tuning: Tuning) -> None:
    """Print what chunks would gain, in one line."""
    today, choice, best = tuning.baselines[0], tuning.chosen, tuning.best_of_today
    fits = "" if today.fits else f" on larger GPUs ({gibibytes(today.memory.total)})"
    other = f", {seconds(best.step_ns / 1e3)} {best.name}" if best is not None and best is not today else ""
    console.print(
        f"{tuning.options.shape.name} on {choice.layout.gpus} x {tuning.options.hardware.name}: a step takes "
        f"{seconds(today.step_ns / 1e3)} with one sequence a micro-batch{fits}{other}, "
        f"{seconds(choice.step_ns / 1e3)} in chunks of {choice.config.chunk_size:,} with K {choice.config.k}: "
        f"{today.step_ns / choice.step_ns:.1f}x as fast as the first, by prediction. `chunkplan tune` does this for "
        "your model and GPUs."
    )


def headline_document(tuning: Tuning) -> dict[str, Any]:
    """The same, for JSON."""
    today, choice, best = tuning.baselines[0], tuning.chosen, tuning.best_of_today
    return {
        "model": tuning.options.shape.name,
        "hardware": tuning.options.hardware.name,
        "gpus": choice.layout.gpus,
        "one_sequence_seconds": today.step_ns / 1e9,
        "best_of_today_seconds": best.step_ns / 1e9 if best else None,
        "chunked_seconds": choice.step_ns / 1e9,
        "chunk_size": choice.config.chunk_size,
        "k": choice.config.k,
        "speedup": today.step_ns / choice.step_ns,
    }


def memory_words(choice: Choice) -> list[str]:
    """How memory is saved."""
    words = ["checkpoints"] if choice.cost.checkpointing == "full" else []
    return words + (["KV offload"] if choice.cost.kv_offload else [])


def _table(title: str, *names: str, first: str | None = None) -> Table:
    table = Table(title=Text(title, style="bold", no_wrap=True), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.min_width = len(title)
    if first is not None:
        table.add_column(first, header_style="dim")
    for name in names:
        justify = "left" if name in ("schedule", "checkpoints", "notes") else "right"
        table.add_column(name, justify=justify, header_style="dim", no_wrap=name not in ("notes", "K"), overflow="fold")  # type: ignore[arg-type]
    return table
