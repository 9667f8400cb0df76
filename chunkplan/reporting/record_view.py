"""One record: how it was read, what its chat template makes of it, and what each choice of turns would train of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

import numpy as np

from chunkplan.config.intake import IntakeOptions, Turns
from chunkplan.errors import UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.one_record import FoundRecord, find_record, read_place
from chunkplan.intake.pieces import LEFT_OUT, SHARED, token_columns
from chunkplan.intake.process import pair_of, too_long
from chunkplan.intake.records import (
    Conversation,
    Exchange,
    Labelled,
    LengthRecord,
    Pair,
    Record,
    RecordError,
    TokensRecord,
)
from chunkplan.intake.schemas import SCHEMAS, count_unread
from chunkplan.intake.tokenizer import Encoded, RecordTokenizer, by_turns, turns_of, without_padded
from chunkplan.planfile.analysis import Analysis
from chunkplan.quantities import short_repr
from chunkplan.reporting.token_text import SequenceText, decode_sequence


class AnalyzedFile(NamedTuple):
    """A file: where it is, which source of the analysis it is, if any, and whether its size is another one now."""

    path: str
    source: int | None
    has_changed: bool


def find_analyzed(analysis: Analysis, path: str) -> AnalyzedFile:
    """Find the file `path`, and itself among the sources of `analysis`.

    Relative paths are looked for here, and from each folder above the analysis.
    """
    folders: list[str | Path] = ["", *analysis.path.resolve().parents]
    here = next((str(place) for folder in folders if (place := Path(folder, path)).is_file()), None)
    if here is None:
        return AnalyzedFile(path, None, False)
    for number, source in enumerate(analysis.manifest.get("sources", ())):
        places = (Path(folder, source["path"]) for folder in folders)
        found = next((place for place in places if place.is_file()), None)
        if found is not None and found.samefile(here):
            return AnalyzedFile(here, number, source["bytes"] not in (None, found.stat().st_size))
    return AnalyzedFile(here, None, False)


def options_for(analysis: Analysis, file: AnalyzedFile) -> IntakeOptions:
    """The intake options that read a file as `analysis` has read its own sources.

    Options of the layout are left out for a file that is no source of the analysis.
    """
    options = analysis.options or IntakeOptions()
    if file.source is not None:
        return options
    return replace(options, schema=None, formats={}, columns={}, ignore_columns=())


@dataclass(frozen=True)
class RecordRejection:
    """The reason why a record, or a sequence of it, is rejected, in the words of the intake."""

    reason: str
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """A sequence that a record makes, or would make if it were not `rejected`.

    `trained` are the turns of the assistant that count in it, from 1. `num_target_tokens` is None if unknown, as for a
    bare length. `num_cut` tokens are beyond the maximum length. `left_out` are the kinds of `LEFT_OUT` that the chat
    template leaves out of it, and `SHARED`. `text` is None unless decoded.
    """

    trained: tuple[int, ...]
    num_tokens: int = 0
    num_target_tokens: int | None = None
    num_cut: int = 0
    left_out: tuple[str, ...] = ()
    text: SequenceText | None = None
    rejected: RecordRejection | None = None


@dataclass(frozen=True, kw_only=True)
class RecordView:
    """One record as it is read and rendered.

    `place` is its location as in messages. `analyzed` has the tokens and targets of each sequence of it in the
    analysis, None where its file is no source of the analysis; `has_changed`: the file had another size then.

    `schema`, `evidence` and `columns` (role -> key) describe its layout. For a conversation `messages` counts messages
    by role, and `num_turns` the turns of the assistant. `unread` are its keys with content that were not read.

    `sequences` by choice of turns: for a conversation of every choice, else of the requested `turns` alone. `rejected`
    says why those are missing or incomplete. `rendered` is the output of the chat template if nothing else is known;
    `stored` the stored record if nothing is rendered: of one that is no object the beginning of its line, without the
    last `num_stored_left_out` bytes.
    """

    place: str
    analyzed: tuple[tuple[int, int], ...] | None
    has_changed: bool
    schema: str
    evidence: str
    columns: dict[str, str]
    messages: dict[str, int] | None
    num_turns: int
    unread: tuple[str, ...]
    turns: Turns
    sequences: dict[Turns, tuple[SequenceView, ...]]
    rendered: str | None
    stored: str | None
    num_stored_left_out: int
    rejected: RecordRejection | None

    __repr__ = short_repr


def view_record(
    place: str,
    options: IntakeOptions | None = None,
    *,
    analysis: Analysis | None = None,
    tokenizer: RecordTokenizer | str | Path | None = None,
    most_tokens: int | None = None,
) -> RecordView:
    """Read the record at `place`: FILE:LINE, or "FILE, record N" in files without lines.

    Example: `chunkplan.view_record("train.jsonl:1", tokenizer="path/to/model")`

    Args:
        place: the path of the file may be relative to the working folder, or to a folder above `analysis`.
        options: how records are read; by default as for `analysis`, see `options_for`.
        analysis: one that the file may be a source of.
        tokenizer: encodes text: one of `open_tokenizer`, or as in `analyze`.
        most_tokens: of longer sequences, the first and the last tokens are decoded.

    Raises:
        UsageError: there is no such file or record, or no tokenizer for it.
        DataError: the file cannot be read, or no schema fits its records. A record that would be rejected is no error
            here: the view says why.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    typed = read_place(place)
    analyzed, sources = AnalyzedFile(typed.path, None, False), []
    if analysis is not None:
        analyzed = find_analyzed(analysis, typed.path)
        sources = [source["path"] for source in analysis.manifest.get("sources", ())]
        options = options or options_for(analysis, analyzed)
    options = options or IntakeOptions()
    tokenizer = tokenizer and tokenizer.as_asked(options)
    found = find_record(replace(typed, path=analyzed.path), options, sources=sources, named=analyzed.source)
    view = _made_of(found, options, tokenizer, most_tokens)
    known = None if analysis is None else _known(analysis, analyzed.source, found.row)
    return replace(view, analyzed=known, has_changed=analyzed.has_changed)


def _known(analysis: Analysis, source: int | None, row: int) -> tuple[tuple[int, int], ...] | None:
    """Tokens and target tokens of each sequence that the analysis has of a record; None without a source."""
    if source is None:
        return None
    found = np.flatnonzero((analysis.source == source) & (analysis.record == row))
    counts = (analysis.num_tokens[found].tolist(), analysis.num_target_tokens[found].tolist())
    return tuple(zip(*counts, strict=True))


def _made_of(
    found: FoundRecord, options: IntakeOptions, tokenizer: RecordTokenizer | None, most_tokens: int | None
) -> RecordView:
    """The view of a record, whatever analysis it is of."""
    if isinstance(found.read, RecordError):
        return _view(found, options, rejected=_rejection(found.read))
    record = found.read
    if isinstance(record, LengthRecord):
        sequence = _limited(SequenceView(trained=(), num_tokens=record.num_tokens), options)
        return _view(found, options, {options.turns: (sequence,)})
    if isinstance(record, Labelled):
        record = record.record
    if tokenizer is None and not isinstance(record, TokensRecord):
        raise UsageError(
            "no tokenizer is known, so nothing says what this record becomes",
            where=found.place,
            hint="give --tokenizer, or analyze the data with one first",
        )
    if isinstance(record, Exchange) and tokenizer is not None and tokenizer.template is not None:
        record = record.conversation
    if isinstance(record, TokensRecord):
        documents = [_unless_padded(document, tokenizer) for document in record.documents]
        whole = "" if record.rollout is None else "a rollout"
        sequences = _views(documents, [()] * len(documents), options, tokenizer, most_tokens, whole=whole)
        return _view(found, options, {options.turns: sequences})
    if isinstance(record, Pair):
        assert tokenizer is not None
        return _view(found, options, {options.turns: _pair(record, options, tokenizer, most_tokens)})
    if not isinstance(record, Conversation):
        assert tokenizer is not None
        sequences = _sequences([record], [()], options, tokenizer, most_tokens)
        return _view(found, options, {options.turns: sequences})
    assert tokenizer is not None
    made: dict[Turns, tuple[SequenceView, ...]] = {}
    turns = list(turns_of(record.messages))
    for choice in get_args(Turns):
        several = by_turns(record, choice)
        trained = [_trained(one, turns) for one in several]
        made[choice] = _sequences(several, trained, options, tokenizer, most_tokens, decodes=choice == options.turns)
    rejected = _first_rejected(made[options.turns])
    rendered = _rendered(record, tokenizer) if rejected is not None and rejected.reason == "template" else None
    return _view(found, options, made, conversation=record, num_turns=len(turns), rendered=rendered)


def _pair(
    pair: Pair, options: IntakeOptions, tokenizer: RecordTokenizer, most_tokens: int | None
) -> tuple[SequenceView, ...]:
    """Both sequences of a pair, the chosen one first."""
    sides: list[Record] = [
        by_turns(side, options.turns)[-1] if isinstance(side, Conversation) else side
        for side in (pair.chosen, pair.rejected)
    ]
    left_out: dict[int, set[str]] = {}
    encoded = tokenizer.encode(sides, left_out)
    try:
        encoded = [*(pair_of(sides, encoded, tokenizer) or ())]
    except RecordError as error:
        encoded = [error, error]
    return _views(encoded, [()] * 2, options, tokenizer, most_tokens, left_out, whole="a pair")


def _unless_padded(document: Encoded, tokenizer: RecordTokenizer | None) -> Encoded | RecordError:
    """A document that is tokens already, or the error of one that would be trained on padding."""
    columns = token_columns([document])
    for rejected in without_padded(np.zeros(1, np.int64), columns, tokenizer)[2]:
        return RecordError(rejected.message, reason=rejected.reason, hint=rejected.hint)
    return document


def _view(
    found: FoundRecord,
    options: IntakeOptions,
    sequences: dict[Turns, tuple[SequenceView, ...]] | None = None,
    *,
    conversation: Conversation | None = None,
    num_turns: int = 0,
    rendered: str | None = None,
    rejected: RecordRejection | None = None,
) -> RecordView:
    layout, keys = found.layout, found.keys
    own = {} if keys is None else layout.as_read(keys)
    sequences = sequences or {}
    rejected = rejected or _first_rejected(sequences.get(options.turns, ()))
    columns = SCHEMAS[layout.schema].keys_of(own, layout.columns)
    is_read = keys is not None and not isinstance(found.read, RecordError)
    is_shown = any(one.text is not None for one in sequences.get(options.turns, ()))
    return RecordView(
        place=found.place,
        analyzed=None,
        has_changed=False,
        schema=layout.schema,
        evidence=layout.evidence,
        columns={role: key for role, key in columns.items() if own.get(key) is not None},
        messages=None if conversation is None else dict(Counter(each.role for each in conversation.messages)),
        num_turns=num_turns,
        unread=tuple(sorted(count_unread(layout, [keys]))) if is_read and keys is not None else (),
        turns=options.turns,
        sequences=sequences,
        rendered=rendered,
        stored=_stored(found) if rejected is not None and not is_shown and rendered is None else None,
        num_stored_left_out=found.num_line_bytes,
        rejected=rejected,
    )


def _stored(found: FoundRecord) -> str | None:
    """The record as it is stored, or how its line begins; None where neither is known."""
    if found.keys is None:
        return found.line
    return json.dumps(found.keys, ensure_ascii=False, indent=2, default=str)


def _rejection(error: RecordError) -> RecordRejection:
    return RecordRejection(error.reason, error.message, error.hint)


def _first_rejected(sequences: Sequence[SequenceView]) -> RecordRejection | None:
    return next((one.rejected for one in sequences if one.rejected is not None), None)


def _trained(conversation: Conversation, turns: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The turns, from 1, in which a message counts."""
    return tuple(
        number
        for number, (start, stop) in enumerate(turns, 1)
        if any(message.counts_in_loss for message in conversation.messages[start:stop])
    )


def _sequences(
    records: Sequence[Record],
    trained: Sequence[tuple[int, ...]],
    options: IntakeOptions,
    tokenizer: RecordTokenizer,
    most_tokens: int | None,
    *,
    decodes: bool = True,
) -> tuple[SequenceView, ...]:
    """Build the sequences of `records`; `trained` lists the turns that each trains."""
    left_out: dict[int, set[str]] = {}
    encoded = tokenizer.encode(records, left_out)
    return _views(encoded, trained, options, tokenizer if decodes else None, most_tokens, left_out)


def _views(
    encoded: Sequence[Encoded | RecordError],
    trained: Sequence[tuple[int, ...]],
    options: IntakeOptions,
    tokenizer: RecordTokenizer | None,
    most_tokens: int | None,
    left_out: Mapping[int, set[str]] = MappingProxyType({}),
    *,
    whole: str = "",
) -> tuple[SequenceView, ...]:
    """The views of sequences, which are decoded if there is a tokenizer; `whole` says of what is not to be cut."""
    views = []
    for place, (one, turns) in enumerate(zip(encoded, trained, strict=True)):
        if isinstance(one, RecordError):
            views.append(SequenceView(trained=turns, rejected=_rejection(one)))
            continue
        input_ids, target = one
        view = _limited(SequenceView(trained=turns, num_tokens=len(input_ids)), options, whole)
        input_ids, target = input_ids[: view.num_tokens], target[: view.num_tokens]
        text = None
        if tokenizer is not None:
            text = decode_sequence(tokenizer.library, input_ids, target, most_tokens)
        lacks = tuple(kind for kind in (*LEFT_OUT, SHARED) if kind in left_out.get(place, ()))
        views.append(replace(view, num_target_tokens=int(target.sum()), left_out=lacks, text=text))
    return tuple(views)


def _limited(view: SequenceView, options: IntakeOptions, whole: str = "") -> SequenceView:
    """The sequence as the maximum length leaves it."""
    if options.max_length is None or view.num_tokens <= options.max_length:
        return view
    if options.long == "truncate" and not whole:
        return replace(view, num_tokens=options.max_length, num_cut=view.num_tokens - options.max_length)
    rejected = too_long(0, view.num_tokens, options.max_length, whole)
    return replace(view, rejected=RecordRejection(rejected.reason, rejected.message, rejected.hint))


def _rendered(conversation: Conversation, tokenizer: RecordTokenizer) -> str | None:
    """The conversation as the template renders it, None where it does not."""
    assert tokenizer.template is not None
    try:
        return tokenizer.template.text(conversation)
    except RecordError:
        return None
