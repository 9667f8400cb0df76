"""A step of a plan in the terminal, and a chunk of it: what stages do, what chunks hold and what that says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from chunkplan.operations import OPS
from chunkplan.quantities import counted, kept_words, percent, seconds
from chunkplan.reporting.gantt import OP_WORDS
from chunkplan.reporting.tables import Table, way_words
from chunkplan.schedule.trace import LETTERS
from chunkplan_cli.plan_report import print_estimated
from chunkplan_cli.terminal import drawn_table, facts_grid, marks, visible

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.planfile.plan import Action, Chunk, Plan, PlanStep
    from chunkplan.reporting.chunk_view import ChunkAction, ChunkView, SegmentView
    from chunkplan.reporting.shared_sequences import StepShares
    from chunkplan.reporting.token_text import SequenceText, TextPiece
#: By op its letter, for the line of a stage's actions.
_LETTERS = dict(zip(OPS, LETTERS, strict=True))

#: A step of a large plan has hundreds of chunks and actions: --json shows them all.
_MAX_CHUNKS = 40
_MAX_ACTIONS = 200


def print_step(console: Console, step: PlanStep, shares: StepShares, plan: Plan, *, lists_actions: bool) -> None:
    """Print the chunks of each rank of a step, the shared sequences, and the actions of its stages: their number by op,
    or with `lists_actions` all of them in order."""
    from chunkplan.planfile.manifest import reduction_us_of

    config = plan.config
    print_estimated(console, plan.manifest)
    console.print(
        f"step {step.step} (epoch {step.epoch}): {counted(step.num_sequences, 'sequence')}, "
        f"{counted(step.num_tokens, 'token')}{step.prefix_words}, {counted(step.num_target_tokens, 'target')}, "
        f"{counted(step.num_chunks, 'chunk')}"
    )
    after = reduction_us_of(plan.manifest) or 0.0
    reduction = f", {seconds(after)} of it to sum gradients" if after >= step.predicted_us / 1000 else ""
    before = f", {seconds(step.extra_forward_us)} of it forwards for the loss {config.loss}"
    console.print(f"predicted {seconds(step.predicted_us + after)}{before if step.extra_forward_us else ''}{reduction}")
    if shares.sequences:
        console.print()
        console.print(drawn_table(console, _shared_table(shares)))
    for rank, chunks in step.chunks.items():
        console.print()
        console.print(drawn_table(console, _chunk_table(rank, chunks, config.chunk_size)))
        if len(chunks) > _MAX_CHUNKS:
            console.print(f"... and {len(chunks) - _MAX_CHUNKS:,} more chunks (--json shows all)")
        console.print()
        if lists_actions:
            lines = [_action_line(step.actions[rank, stage], config.virtual_stages) for stage in range(config.pp)]
            console.print(facts_grid((f"stage {stage}", line) for stage, line in enumerate(lines)))
        else:
            console.print(drawn_table(console, _counted_actions(step, rank, config)))
    console.print()
    console.print(Text(_legend(step), style="dim"))
    if lists_actions and config.virtual_stages > 1:
        console.print(Text("F3.1 chunk 3, virtual stage 1", style="dim"))
    if shares.sequences:
        console.print(Text("part 1/2 x4: shared by 4 ranks; time: of one of them, exchange is part of it", style="dim"))
    for where in sorted({chunk.kept_attention for chunks in step.chunks.values() for chunk in chunks}):
        if words := kept_words(where):
            console.print(Text(f"part 1/2 attn {where}: run again, with its attention kept {words}", style="dim"))
    if not lists_actions:
        how = "--actions lists them in order, chunkplan simulate draws when each is done"
        console.print(Text(how, style="dim"))


def _shared_table(shares: StepShares) -> Table:
    rows = [
        (
            *(str(row.sequence_id), f"{row.num_tokens:,}", f"{row.first_rank}-{row.first_rank + row.num_ranks - 1}"),
            *(way_words(row.num_ranks, row.num_heads), f"{row.num_chunks:,}", seconds(row.predicted_us)),
            "?" if row.exchange_us is None else percent(row.exchange_us / max(row.predicted_us, 1e-30)),
        )
        for row in shares.sequences
    ]
    head = ("sequence", "tokens", "ranks", "share", "chunks", "time", "exchange")
    return Table("Shared sequences", head, rows, texts=("share",))


def _chunk_table(rank: int, chunks: list[Chunk], chunk_size: int) -> Table:
    """Make a table that fits 80 columns without cutting a number: sequences wrap, prefixes are there if any are."""
    shown = chunks[:_MAX_CHUNKS]
    prefix = ("prefix",) if any(chunk.prefix_tokens for chunk in shown) else ()
    rows = [
        (
            *(str(chunk.chunk_id), kind_words(chunk), f"{chunk.num_tokens:,}"),
            *(f"{chunk.num_tokens / chunk_size:.0%}", f"{chunk.num_target_tokens:,}"),
            *([f"{chunk.prefix_tokens:,}" if chunk.prefix_tokens else ""] if prefix else []),
            *(seconds(chunk.cost), _sequences(chunk)),
        )
        for chunk in shown
    ]
    head = ("chunk", "kind", "tokens", "fill", "targets", *prefix, "cost", "sequences")
    return Table(f"rank {rank}", head, rows, texts=("kind", "sequences"))


def kind_words(chunk: Chunk) -> str:
    """Return the kind of a chunk, its part of a sequence, and the number of ranks that share it.

    A recomputed chunk that keeps attention is shown with the memory that it keeps it in.
    """
    if chunk.group_id is None:
        return chunk.kind
    shared = f" x{chunk.cp_size}" if chunk.cp_size > 1 else ""
    again = "" if chunk.keeps_activations else " kv"
    again = f" attn {chunk.kept_attention}" if kept_words(chunk.kept_attention) else again
    return f"part {chunk.group_index + 1}/{chunk.group_size}{shared}{again}"


def _sequences(chunk: Chunk) -> str:
    ids = [str(each) for each in dict.fromkeys(segment.sequence_id for segment in chunk.segments)]
    shown = ", ".join(ids[:3])
    return shown if len(ids) <= 3 else f"{shown} +{len(ids) - 3}"


def _counted_actions(step: PlanStep, rank: int, config: PlanConfig) -> Table:
    """Make a row of each run of stages that do as many actions of each op, with when the first and last of them are
    done."""
    counts = [Counter(action.op for action in step.actions[rank, stage]) for stage in range(config.pp)]
    ops = [op for op in OPS if any(op in each for each in counts)]
    rows = []
    for _, run in groupby(range(config.pp), key=lambda stage: sorted(counts[stage].items())):
        stages = list(run)
        first, last = stages[0], stages[-1]
        times = [step.schedule_us[rank, stage] for stage in stages]
        done = list(dict.fromkeys(map(seconds, (min(times), max(times)))))
        name = f"{first}" if first == last else f"{first}-{last}"
        rows.append((name, *(f"{counts[first][op]:,}" for op in ops), f"{counts[first].total():,}", " to ".join(done)))
    head = ("stages" if config.pp > 1 else "stage", *(_LETTERS[op] for op in ops), "all", "done after")
    return Table(f"actions of rank {rank}", head, rows)


def _action_line(actions: list[Action], virtual_stages: int) -> str:
    words = [_word(action, virtual_stages) for action in actions[:_MAX_ACTIONS]]
    if len(actions) > _MAX_ACTIONS:
        words.append(f"... {len(actions) - _MAX_ACTIONS:,} more")
    return " ".join(words)


def _word(action: Action, virtual_stages: int) -> str:
    suffix = f".{action.virtual_stage}" if virtual_stages > 1 else ""
    return f"{_LETTERS.get(action.op, action.op)}{action.chunk_id}{suffix}"


def _legend(step: PlanStep) -> str:
    """Return the meaning of the letters that occur."""
    done = {action.op for actions in step.actions.values() for action in actions[:_MAX_ACTIONS]}
    words = [f"{letter} {what}" for op, letter, what in zip(OPS, LETTERS, OP_WORDS, strict=True) if op in done]
    return "  ".join(words)


# One chunk of a plan in the terminal: what it is, where its segments come from, and what they say.


def print_chunk(console: Console, view: ChunkView, plan: Plan) -> None:
    """Print `view`; the text of its segments, where it is decoded, below all else."""
    print_estimated(console, plan.manifest)
    title = f"step {view.step}, rank {view.dp_rank}, chunk {view.chunk.chunk_id}: {kind_words(view.chunk)}"
    console.print(Text(title, style="bold"))
    console.print(_chunk_facts(view, plan.config.chunk_size))
    if view.segments:
        console.print()
        console.print(drawn_table(console, _segments(view)))
    decoded = [segment for segment in view.segments if segment.text is not None]
    if decoded:
        console.print()
        console.print(marks_note(console))
    for segment in decoded:
        console.print()
        words = f"sequence {segment.sequence_id}, {_range(segment)} of {_number(segment.sequence_tokens)} tokens"
        console.print(Text(f"{words}, {visible(segment.place or '?', console)}", style="bold"))
        if segment.text is not None:
            print_marked(console, segment.text, "--json")


def _chunk_facts(view: ChunkView, chunk_size: int) -> RichTable:
    chunk = view.chunk
    rows = [
        ("tokens", f"{chunk.num_tokens:,}, {percent(chunk.num_tokens / chunk_size)} of ChunkSize"),
        ("targets", f"{chunk.num_target_tokens:,} predicted in this chunk"),
    ]
    if chunk.prefix_tokens:
        rows.append(("prefix", f"{chunk.prefix_tokens:,} tokens before the part, which it attends to"))
    recompute = "" if chunk.keeps_activations else ", with its recompute"
    if words := kept_words(chunk.kept_attention):
        recompute += f", for which attention is kept {words}"
    if chunk.cp_size > 1:
        rows.append(("shared", _shared(view)))
        if view.exchange_us is not None:
            recompute += f", {percent(view.exchange_us / max(chunk.cost, 1e-30))} of it exchange"
    rows.append(("predicted", f"{seconds(chunk.cost)} on all stages together{recompute}"))
    for stage in sorted({action.stage for action in view.actions}):
        of_stage = [action for action in view.actions if action.stage == stage]
        rows.append((f"stage {stage}", f"{_places(of_stage)} of {of_stage[0].num_actions:,} actions"))
    return facts_grid(rows)


def _shared(view: ChunkView) -> str:
    """Describe the shared chunk that the rank has slices of, and which ranks have the others."""
    chunk = view.chunk
    whole = f"[{chunk.prefix_tokens:,}, {chunk.prefix_tokens + chunk.cp_tokens:,}) of the sequence"
    ranks = f"{chunk.cp_first_rank} to {chunk.cp_first_rank + chunk.cp_size - 1}"
    own = "slice is" if len(view.segments) == 1 else f"{len(view.segments)} slices are"
    return (
        f"the whole chunk, {whole}, by ranks {ranks} ({way_words(chunk.cp_size, chunk.cp_heads)}); this rank's {own} "
        "below"
    )


def _places(actions: list[ChunkAction]) -> str:
    """Return the positions of a chunk's actions in a stage's order, by virtual stage where it has several."""
    words: dict[int, list[str]] = {}
    for action in sorted(actions, key=lambda action: action.virtual_stage):
        words.setdefault(action.virtual_stage, []).append(f"{action.op.replace('_', ' ')} {action.place + 1}")
    if len(words) == 1:
        return ", ".join(*words.values())
    return "; ".join(f"virtual stage {virtual_stage}: {', '.join(places)}" for virtual_stage, places in words.items())


def _segments(view: ChunkView) -> Table:
    rows = [
        (
            *(str(each.sequence_id), _range(each), _number(each.sequence_tokens)),
            "" if each.part is None else f"{each.part[0] + 1}/{each.part[1]}",
            *(_number(each.num_target_tokens), each.place or "?"),
        )
        for each in view.segments
    ]
    return Table("Segments", ("sequence", "tokens", "of", "part", "targets", "from"), rows, texts=("from",))


def _range(segment: SegmentView) -> str:
    return f"[{segment.start:,}, {segment.end:,})"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


# Decoded tokens in the terminal: targets marked, with colour and without; special tokens in a style of their own.


def marks_note(console: Console) -> Text:
    """Return the line that says how targets are marked."""
    before, behind = marks(console)
    return Text(f"{before}targets{behind} are marked.", style="dim")


def print_marked(console: Console, text: SequenceText, shows_all: str) -> None:
    """Print what a sequence says, and how many tokens are left out in its middle; `shows_all` names the option that
    shows them."""
    console.print(marked(console, text.first), overflow="fold")
    if text.num_left_out:
        targets = counted(text.num_targets_left_out, "target")
        left_out = f"{counted(text.num_left_out, 'token')} left out here, {targets} among them"
        console.print(Text(f"... {left_out}; {shows_all} shows all ...", style="dim"))
        console.print(marked(console, text.last), overflow="fold")


def marked(console: Console, pieces: Sequence[TextPiece]) -> Text:
    """Return what the pieces say, with marks around each run of targets."""
    before, behind = marks(console)
    text = Text()
    for is_target, run in groupby(pieces, lambda piece: piece.is_target):
        style = "green" if is_target else ""
        text.append(before if is_target else "", style=style)
        for piece in run:
            text.append(visible(piece.text, console), style=f"bold {style or 'cyan'}" if piece.is_special else style)
        text.append(behind if is_target else "", style=style)
    return text
