"""One record, or one chunk, in the terminal: how it was read, what would be trained of it, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import counted, kept_words, percent, seconds
from chunkplan_cli.plan_report import print_estimated
from chunkplan_cli.step_report import kind_words
from chunkplan_cli.terminal import facts_grid, marks, titled_table, visible

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.planfile.plan import Plan
    from chunkplan.reporting.chunk_view import ChunkAction, ChunkView, SegmentView
    from chunkplan.reporting.record_view import RecordView, SequenceView
    from chunkplan.reporting.token_text import SequenceText, TextPiece

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


# One chunk of a plan in the terminal: what it is, where its segments come from, and what they say.


def print_chunk(console: Console, view: ChunkView, plan: Plan) -> None:
    """Print `view`; the text of its segments, where it is decoded, below all else."""
    print_estimated(console, plan.manifest)
    title = f"step {view.step}, rank {view.dp_rank}, chunk {view.chunk.chunk_id}: {kind_words(view.chunk)}"
    console.print(Text(title, style="bold"))
    console.print(_chunk_facts(view, plan.config.chunk_size))
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


def _chunk_facts(view: ChunkView, chunk_size: int) -> Table:
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
    """Say what the whole chunk is, of which the rank has slices, and which ranks have the others."""
    from chunkplan.reporting.tables import way_words

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


#: Letters of a record as it is stored, or as it is rendered where nothing says what counts.
_LETTERS = 3000


def print_record(
    console: Console, view: RecordView, tokenizer: RecordTokenizer | None, origin: str | None, *, shows_all: bool
) -> None:
    """Print `view`; `origin` says what was taken from an analysis."""
    console.print(Text(visible(view.place, console), style="bold"))
    console.print(_facts(console, view, tokenizer, origin))
    if view.messages is not None:
        console.print()
        console.print(_choices(view))
    shown = view.sequences.get(view.turns, ())
    texts = [one for one in shown if one.text is not None]
    if texts:
        console.print()
        console.print(marks_note(console))
    for number, one in enumerate(shown, 1):
        if one.text is not None:
            console.print()
            if len(shown) > 1:
                size = f"{counted(one.num_tokens, 'token')}, {counted(one.num_target_tokens or 0, 'target')}"
                console.print(Text(f"sequence {number} of {len(shown)}: {size}", style="bold"))
            print_marked(console, one.text, "--text")
    if view.rendered is not None:
        _print_plain(console, "as rendered; what counts in it is not known", [view.rendered], 0, shows_all)
    if view.stored is not None:
        _print_plain(console, "as it is stored", view.stored.split("\n"), view.num_stored_left_out, shows_all)


def _facts(console: Console, view: RecordView, tokenizer: RecordTokenizer | None, origin: str | None) -> Table:
    from chunkplan.intake.pieces import LEFT_OUT, SHARED

    rows = {"read as": f"{view.schema} ({view.evidence})" if view.evidence else view.schema}
    rows["keys"] = ", ".join(f"`{key}`" if key == role else f"`{key}` ({role})" for role, key in view.columns.items())
    rows["not read"] = ", ".join(f"`{key}`" for key in view.unread)
    rows["messages"] = ", ".join(f"{number} {role}" for role, number in (view.messages or {}).items())
    rows["tokenizer"] = "" if tokenizer is None else tokenizer.path
    rows["defaults"] = origin or ""
    shown = view.sequences.get(view.turns, ())
    if len(shown) > 1:
        rows["sequences"] = f"{len(shown):,}"
    if _num_tokens(shown):
        rows["tokens"] = f"{_num_tokens(shown):,}{_cut(shown)}"
    if (num_targets := _num_targets(shown)) is not None:
        rows["target tokens"] = f"{num_targets:,}, {percent(num_targets / max(_num_tokens(shown), 1))} of the tokens"
    kinds = {kind for one in shown for kind in one.left_out}
    rows["left out"] = "; ".join(words for kind, words in LEFT_OUT.items() if kind in kinds)
    rows["shared"] = "a token that holds the end of a prompt and the begin of an answer" if SHARED in kinds else ""
    if view.rejected is not None:
        rows["rejected"] = f"{view.rejected.reason}: {view.rejected.message}"
    rows |= _what_is_missing(view, tokenizer)
    return facts_grid((name, visible(words, console)) for name, words in rows.items() if words)


def _choices(view: RecordView) -> Table:
    """List what each choice of turns would train of a conversation."""
    table = titled_table("What --turns would train")
    table.add_column("--turns", no_wrap=True)
    for name in ("sequences", "tokens", "target tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("turns that count", overflow="fold")
    for turns, sequences in view.sequences.items():
        kept = [one for one in sequences if one.rejected is None]
        table.add_row(
            f"{turns} (shown)" if turns == view.turns else turns,
            f"{len(kept):,}",
            f"{_num_tokens(kept):,}",
            f"{_num_targets(kept) or 0:,}",
            _trained(kept, view.num_turns) + _rejected(sequences),
        )
    return table


def _trained(sequences: Sequence[SequenceView], num_turns: int) -> str:
    """Say which turns count: "all 3", "1 to 3, 5 of 6"; of several sequences that each has one."""
    trained = sorted({turn for one in sequences if one.num_target_tokens for turn in one.trained})
    if not trained:
        return "none" if sequences else ""
    is_all = len(trained) == num_turns > 1
    words = f"all {num_turns:,}" if is_all else f"{_ranges(trained)} of {num_turns:,}"
    words += ", one a sequence" if len(sequences) > 1 else ""
    return f"{words}, so far as not cut off" if any(one.num_cut for one in sequences) else words


def _ranges(numbers: Sequence[int]) -> str:
    """List ascending numbers, with those that follow one another as a range: "1 to 3, 5"."""
    edges = [0, *(at for at, (low, high) in enumerate(pairwise(numbers), 1) if high > low + 1), len(numbers)]
    runs = [(numbers[start], numbers[stop - 1]) for start, stop in pairwise(edges)]
    return ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in runs)


def _rejected(sequences: Sequence[SequenceView]) -> str:
    reasons = [one.rejected.reason for one in sequences if one.rejected is not None]
    if not reasons:
        return ""
    of_all = f"{len(reasons)} rejected" if len(reasons) < len(sequences) else "rejected"
    return f"{', ' if len(reasons) < len(sequences) else ''}{of_all} ({reasons[0]})"


def _num_tokens(sequences: Sequence[SequenceView]) -> int:
    return sum(one.num_tokens for one in sequences)


def _num_targets(sequences: Sequence[SequenceView]) -> int | None:
    """The target tokens of all, None where they are not known of any."""
    known = [one.num_target_tokens for one in sequences if one.num_target_tokens is not None]
    return sum(known) if known else None


def _cut(sequences: Sequence[SequenceView]) -> str:
    num_cut = sum(one.num_cut for one in sequences)
    return f", and {num_cut:,} cut off by --max-length" if num_cut else ""


def _print_plain(console: Console, title: str, parts: Sequence[str], num_more: int, shows_all: bool) -> None:
    """Print text that nothing is known of, in parts that begin a line each; of a long one its beginning.

    Behind it are `num_more` bytes that were not kept.
    """
    shown = "\n".join(visible(part, console) for part in parts)
    num_left = 0 if shows_all else max(0, len(shown) - _LETTERS)
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Text(shown[: len(shown) - num_left]), overflow="fold")
    if num_left or num_more:
        words = f"{counted(num_left, 'character')} left out here; --text shows all"
        if num_more:
            shown_by_text = f"{counted(num_left, 'character')}, which --text shows, and " if num_left else ""
            words = f"left out here: {shown_by_text}{counted(num_more, 'byte')} of what is too much to show"
        words = f"... {words} ..."
        console.print(Text(words, style="dim"))


def _what_is_missing(view: RecordView, tokenizer: RecordTokenizer | None) -> dict[str, str]:
    """Say why there is less to see than of other records."""
    if view.messages is not None or not view.sequences:
        return {}
    if view.schema == "length":
        return {"text": "none: a length is all that is known of it"}
    if tokenizer is None:
        return {"text": "its tokens are not decoded, as no tokenizer is known: give --tokenizer"}
    return {"--turns": "makes no difference: it is no conversation"}
