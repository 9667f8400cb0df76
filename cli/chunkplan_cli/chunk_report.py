"""One chunk of a plan in the terminal: what it is, where its segments come from, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import kept_words, percent, seconds
from chunkplan_cli.marked_text import marks_note, print_marked
from chunkplan_cli.plan_report import print_estimated
from chunkplan_cli.step_report import kind_words
from chunkplan_cli.tables import titled_table
from chunkplan_cli.terminal import visible

if TYPE_CHECKING:
    from chunkplan.reporting.chunk_view import ChunkAction, ChunkView, SegmentView
    from chunkplan.reporting.plan_words import PlanHeader


def print_chunk(console: Console, view: ChunkView, header: PlanHeader) -> None:
    """Print `view`; the text of its segments, where it is decoded, below all else."""
    print_estimated(console, header)
    title = f"step {view.step}, rank {view.dp_rank}, chunk {view.chunk.chunk_id}: {kind_words(view.chunk)}"
    console.print(Text(title, style="bold"))
    console.print(_facts(view, header.config.chunk_size))
    if view.segments:
        console.print()
        console.print(_segments(console, view))
    decoded = [segment for segment in view.segments if segment.text is not None]
    if decoded:
        console.print()
        console.print(marks_note(console))
    for segment in decoded:
        console.print()
        console.print(_heading(console, segment))
        if segment.text is not None:
            print_marked(console, segment.text, "--json")


def _facts(view: ChunkView, chunk_size: int) -> Table:
    chunk = view.chunk
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("tokens", f"{chunk.num_tokens:,}, {percent(chunk.num_tokens / chunk_size)} of ChunkSize")
    grid.add_row("targets", f"{chunk.num_target_tokens:,} predicted in this chunk")
    if chunk.prefix_tokens:
        grid.add_row("prefix", f"{chunk.prefix_tokens:,} tokens before the part, which it attends to")
    recompute = "" if chunk.keeps_activations else ", with its recompute"
    if words := kept_words(chunk.kept_attention):
        recompute += f", for which attention is kept {words}"
    if chunk.cp_size > 1:
        grid.add_row("shared", _shared(view))
        if view.exchange_us is not None:
            recompute += f", {percent(view.exchange_us / max(chunk.cost, 1e-30))} of it exchange"
    grid.add_row("predicted", f"{seconds(chunk.cost)} on all stages together{recompute}")
    for stage in sorted({action.stage for action in view.actions}):
        of_stage = [action for action in view.actions if action.stage == stage]
        grid.add_row(f"stage {stage}", f"{_places(of_stage)} of {of_stage[0].num_actions:,} actions")
    return grid


def _shared(view: ChunkView) -> str:
    """Say what the whole chunk is, of which the rank has slices, and which ranks have the others."""
    from chunkplan.reporting.shared_sequences import way_words

    chunk = view.chunk
    whole = f"[{chunk.prefix_tokens:,}, {chunk.prefix_tokens + chunk.cp_tokens:,}) of the sequence"
    ranks = f"{chunk.cp_first_rank} to {chunk.cp_first_rank + chunk.cp_size - 1}"
    own = "slice is" if len(view.segments) == 1 else f"{len(view.segments)} slices are"
    return (
        f"the whole chunk, {whole}, by ranks {ranks} ({way_words(chunk.cp_size, chunk.cp_heads)}); this rank's {own} "
        "below"
    )


def _places(actions: list[ChunkAction]) -> str:
    """Say where in the order of a stage its actions with the chunk are, by virtual stage where it has several."""
    words: dict[int, list[str]] = {}
    for action in sorted(actions, key=lambda action: action.virtual_stage):
        words.setdefault(action.virtual_stage, []).append(f"{action.op.replace('_', ' ')} {action.place + 1}")
    if len(words) == 1:
        return ", ".join(*words.values())
    return "; ".join(f"virtual stage {virtual_stage}: {', '.join(places)}" for virtual_stage, places in words.items())


def _segments(console: Console, view: ChunkView) -> Table:
    table = titled_table("Segments")
    for name in ("sequence", "tokens", "of", "part", "targets"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for segment in view.segments:
        table.add_row(
            str(segment.sequence_id),
            Text(_range(segment)),
            _number(segment.sequence_tokens),
            "" if segment.part is None else f"{segment.part[0] + 1}/{segment.part[1]}",
            _number(segment.num_target_tokens),
            Text(_place(console, segment)),
        )
    return table


def _heading(console: Console, segment: SegmentView) -> Text:
    words = f"sequence {segment.sequence_id}, {_range(segment)} of {_number(segment.sequence_tokens)} tokens"
    return Text(f"{words}, {_place(console, segment)}", style="bold")


def _range(segment: SegmentView) -> str:
    return f"[{segment.start:,}, {segment.end:,})"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _place(console: Console, segment: SegmentView) -> str:
    return "?" if segment.place is None else visible(segment.place, console)
