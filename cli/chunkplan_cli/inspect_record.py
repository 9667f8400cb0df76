"""`chunkplan inspect --record`: one record of the data, read as `analyze` would, with its options or an analysis's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from chunkplan.config.intake import MEGABYTE, IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.options import Option, options_of
from chunkplan.quantities import counted, percent
from chunkplan.reporting.tables import Table
from chunkplan.workspace import Workspace, find_tokenizer
from chunkplan_cli.analyze import with_length_column
from chunkplan_cli.declared import CliValues
from chunkplan_cli.terminal import drawn_table, facts_grid, note, print_json, stdout, visible, warn

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.reporting.record_view import RecordView, SequenceView

#: Options of `analyze` that say how a record is read and what of it is trained.
READING = (
    *("schema", "columns", "ignore_columns", "turns", "max_length", "long", "max_record_bytes"),
    *("text_split", "text_end", "chat_template_kwargs"),
)

#: Options that say together how records are laid out.
LAYOUT = ("schema", "formats", "columns", "ignore_columns")

#: Options that name files and columns.
FILES = ("chat_template", "length_column")

#: Tokens to show of a sequence, at its two ends if it is longer: about two screens.
MOST_TOKENS = 800


@dataclass(frozen=True)
class RecordRequest:
    """A request for a record, as typed on the command line.

    `reading` has the fields of `IntakeOptions` that were given, `files` those of `AnalyzeOptions`.
    """

    place: str
    tokenizer: str | None
    reading: CliValues
    files: CliValues
    shows_all: bool
    as_json: bool

    @property
    def is_as_analyzed(self) -> bool:
        """True if the record is read as the analysis has read it."""
        return self.tokenizer is None and not self.reading and not self.files


def show_record(request: RecordRequest, path: Path | None, place: Workspace) -> None:
    """Print a record; `path` is the analysis that it may be of, by default that of the workspace, if there is one.

    Raises:
        RecordError: the record would be rejected; raised after what can be shown of it is printed.
    """
    from chunkplan.intake.records import RecordError
    from chunkplan.reporting.record_view import view_record

    analysis = _analysis(path, place)
    options = _options(request, analysis, place)
    tokenizer = _tokenizer(request, analysis, place)
    most = None if request.shows_all or request.as_json else MOST_TOKENS
    view = view_record(request.place, options, analysis=analysis, tokenizer=tokenizer, most_tokens=most)
    _warn_of_others(request, analysis, view)
    if request.as_json:
        made_with = {"analysis": analysis and str(analysis.path), "tokenizer": tokenizer and tokenizer.path}
        print_json(made_with | asdict(view))
    else:
        _print(stdout(), view, tokenizer, _origin(request, view, analysis, options), shows_all=request.shows_all)
    if view.rejected is not None:
        why = view.rejected
        raise RecordError(why.message, reason=why.reason, hint=why.hint, where=view.place)


def _analysis(path: Path | None, place: Workspace) -> Analysis | None:
    from chunkplan.planfile.load import is_analysis, load_analysis

    if path is None:
        return load_analysis(place.analysis) if place.analysis.exists() else None
    if not is_analysis(path):
        raise UsageError(
            "--record is of data, this is a plan", where=str(path), hint="give the folder of an analysis, or none"
        )
    return load_analysis(path)


def _options(request: RecordRequest, analysis: Analysis | None, place: Workspace) -> IntakeOptions:
    """Merge the options: the analysis' own, if there is one, and over them those that were given.

    The layout of records is that of the workspace's file, if neither has one.
    """
    from chunkplan.intake.one_record import read_place
    from chunkplan.reporting.record_view import find_analyzed, options_for

    own = {name: value for name, value in request.files.items() if name == "length_column"}
    given = with_length_column({**request.reading, **own})
    path, options, is_analyzed = read_place(request.place).path, IntakeOptions(), False
    if analysis is not None:
        file = find_analyzed(analysis, path)
        options, is_analyzed = options_for(analysis, file), file.source is not None
    if not given.keys().isdisjoint(LAYOUT):
        options = replace(options, schema=None, formats={}, columns={}, ignore_columns=())
    elif not is_analyzed:
        options = replace(options, **_said_in_workspace(place, path))
    return replace(options, **given)


def _said_in_workspace(place: Workspace, path: str) -> CliValues:
    """The layout options of the workspace's file for the source at `path`."""
    from chunkplan.intake.source_columns import is_named

    found = CliValues({name: value for name, value in place.settings().items() if name in LAYOUT})
    for name, sign in (("columns", ":"), ("formats", "")):
        if name in found:
            sources = {entry: entry.rpartition(sign)[0] if sign else entry for entry in found[name]}
            found[name] = {
                entry: value
                for entry, value in found[name].items()
                if not sources[entry] or is_named(path, sources[entry])
            }
    if any(found.values()):
        note(f"options from {place.file}: {', '.join(name for name in found if found[name])}")
    return found


def _tokenizer(request: RecordRequest, analysis: Analysis | None, place: Workspace) -> RecordTokenizer | None:
    """Load the tokenizer that was given, else that of the analysis, else that of the environment or the workspace."""
    from chunkplan.intake.backends import load_tokenizer
    from chunkplan.reporting.token_text import open_tokenizer

    template = request.files.get("chat_template")
    if request.tokenizer is None and analysis is not None and analysis.manifest.get("tokenizer") is not None:
        return open_tokenizer(analysis, chat_template=template)
    name = find_tokenizer(request.tokenizer, place)
    if name is None and template is not None:
        raise UsageError("a chat template without a tokenizer", hint="give --tokenizer too")
    return None if name is None else load_tokenizer(name, template)


def _warn_of_others(request: RecordRequest, analysis: Analysis | None, view: RecordView) -> None:
    """Warn if the analysis has something else of the record, though no other options were given."""
    if analysis is None or view.analyzed is None:
        return
    if view.has_changed:
        warn(f"the file has another size than when it was analyzed: {view.place} may be another record now")
        return
    kept = [one for one in view.sequences.get(view.turns, ()) if one.rejected is None]
    made = [(one.num_tokens, one.num_target_tokens) for one in kept]
    if not analysis.has_tokens:  # then every token but the first counts as a target
        made = [(num_tokens, num_tokens - 1) for num_tokens, _ in made]
    is_left_out = analysis.sample is not None and not view.analyzed
    if request.is_as_analyzed and analysis.is_exact and not is_left_out and made != list(view.analyzed):
        warn(
            f"the analysis has other numbers of tokens of {view.place}: was it made with --chat-template, or has the "
            "file changed since?"
        )


def _origin(request: RecordRequest, view: RecordView, analysis: Analysis | None, options: IntakeOptions) -> str | None:
    """Return the options that are taken from the analysis."""
    if analysis is None:
        return None
    words = ["its tokenizer"] if request.tokenizer is None and analysis.manifest.get("tokenizer") else []
    for name in READING:
        if name not in request.reading and (view.analyzed is not None or name not in LAYOUT):
            words += _typed(options_of(IntakeOptions)[name], getattr(options, name))
    if view.analyzed is None and not words:
        return None
    unknown = "" if view.analyzed is not None else ", of which this file is no source"
    return f"of the analysis {analysis.path}{unknown}" + (f": {', '.join(words)}" if words else "")


def _typed(one: Option, value: Any) -> list[str]:
    """The flags that give an option this value; none for its default."""
    if value == one.default:
        return []
    match one.name:
        case "columns":
            return [shlex.join([one.flag, f"{role}={key}"]) for role, key in value.items()]
        case "ignore_columns":
            return [shlex.join([one.flag, key]) for key in value]
        case "max_record_bytes":
            return [f"{one.flag} {value / MEGABYTE:g}"]
        case _:
            return [f"{one.flag} {value}"]


#: Letters of a record as it is stored, or as it is rendered where nothing says what counts.
_LETTERS = 3000


def _print(
    console: Console, view: RecordView, tokenizer: RecordTokenizer | None, origin: str | None, *, shows_all: bool
) -> None:
    """Print `view`; `origin` says what was taken from an analysis."""
    from chunkplan_cli.step_report import marks_note, print_marked

    console.print(Text(visible(view.place, console), style="bold"))
    console.print(_facts(console, view, tokenizer, origin))
    if view.messages is not None:
        console.print()
        console.print(drawn_table(console, _choices(view)))
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
                is_pair = view.schema == "preference"
                name = ("chosen", "rejected")[number - 1] if is_pair else f"sequence {number} of {len(shown)}"
                console.print(Text(f"{name}: {size}", style="bold"))
            print_marked(console, one.text, "--text")
    if view.rendered is not None:
        _print_plain(console, "as rendered; what counts in it is not known", [view.rendered], 0, shows_all)
    if view.stored is not None:
        _print_plain(console, "as it is stored", view.stored.split("\n"), view.num_stored_left_out, shows_all)


def _facts(console: Console, view: RecordView, tokenizer: RecordTokenizer | None, origin: str | None) -> RichTable:
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
    rows = []
    for turns, sequences in view.sequences.items():
        kept = [one for one in sequences if one.rejected is None]
        name = f"{turns} (shown)" if turns == view.turns else turns
        counts = (len(kept), _num_tokens(kept), _num_targets(kept) or 0)
        counted_turns = _trained(kept, view.num_turns) + _rejected(sequences)
        rows.append((name, *(f"{number:,}" for number in counts), counted_turns))
    head = ("--train-turns", "sequences", "tokens", "target tokens", "turns that count")
    return Table("What --train-turns would train", head, rows, texts=(head[0], head[-1]))


def _trained(sequences: Sequence[SequenceView], num_turns: int) -> str:
    """Return the turns that count: "all 3", "1 to 3, 5 of 6"; of several sequences that each has one."""
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
    """Explain what is missing for this record, and why."""
    if view.messages is not None or not view.sequences or view.schema == "preference":
        return {}
    if view.schema == "length":
        return {"text": "none: a length is all that is known of it"}
    if tokenizer is None:
        return {"text": "its tokens are not decoded, as no tokenizer is known: give --tokenizer"}
    return {"--train-turns": "makes no difference: it is no conversation"}
