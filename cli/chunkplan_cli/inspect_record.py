"""`chunkplan inspect --record`: one record of the data, read as `analyze` would, with its options or an analysis's."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkplan.config.intake import MEGABYTE, IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.options import Option, options_of
from chunkplan.workspace import Workspace, find_tokenizer
from chunkplan_cli.analyze import with_length_column
from chunkplan_cli.declared import CliValues
from chunkplan_cli.terminal import note, print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.reporting.record_view import RecordView

#: Options of `analyze` that say how a record is read and what of it is trained.
READING = ("schema", "columns", "ignore_columns", "turns", "max_length", "long", "max_record_bytes")

#: Options that say together how records are laid out.
LAYOUT = ("schema", "formats", "columns", "ignore_columns")

#: Those that name files and columns.
FILES = ("chat_template", "length_column")

#: Of a longer sequence the two ends are shown: about two screens.
MOST_TOKENS = 800


@dataclass(frozen=True)
class RecordRequest:
    """What was asked for of a record, as the command line has it.

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
        """Whether nothing is to be read otherwise than the analysis has read it."""
        return self.tokenizer is None and not self.reading and not self.files


def show_record(request: RecordRequest, path: Path | None, place: Workspace) -> None:
    """Print a record; `path` is the analysis that it may be of, by default that of the workspace, if there is one.

    Raises:
        RecordError: the record would be rejected, which is said after what can be shown of it.
    """
    from chunkplan.intake.records import RecordError
    from chunkplan.reporting.record_view import view_record
    from chunkplan_cli.record_report import print_record

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
        print_record(stdout(), view, tokenizer, _origin(request, view, analysis, options), shows_all=request.shows_all)
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
    """Those of the analysis, if there is one, and over them what was given.

    How records are laid out the file of the workspace says, where neither does.
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
    """What the file of the workspace says of how the records of the source at `path` are laid out."""
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
    """What was given, else that of the analysis, else what the environment or the workspace names."""
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
    """Say so where the analysis has something else of the record, though nothing else was asked for."""
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
    """Say what is taken from the analysis without being asked for."""
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
    """What would be typed for an option to have this value; nothing where it is the default."""
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
