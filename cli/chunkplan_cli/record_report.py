"""One record in the terminal: how it was read, what each choice of turns would train, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import counted, percent
from chunkplan_cli.marked_text import marks_note, print_marked
from chunkplan_cli.tables import titled_table
from chunkplan_cli.terminal import visible

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.reporting.record_view import RecordView, SequenceView

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

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
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
    for name, words in rows.items():
        if words:
            grid.add_row(name, Text(visible(words, console)))
    return grid


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
