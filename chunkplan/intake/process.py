"""Processes one piece, from reading to storing: the work of one task, in this process, another, or on a cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.pieces import (
    EQUAL,
    Batch,
    LengthColumn,
    Piece,
    PieceResult,
    SampleColumns,
    TokenColumns,
    add_left_out,
    token_columns,
)
from chunkplan.intake.readers import digest, read
from chunkplan.intake.records import (
    HINTS_OF_ALL,
    Conversation,
    Exchange,
    Labelled,
    Pair,
    PromptRecord,
    Record,
    RecordError,
    Rejected,
    TextRecord,
    TokensRecord,
)
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.tokens import OF_TOKENS
from chunkplan.intake.store import MOST, PieceWriter, Store, check_room
from chunkplan.intake.tokenizer import RecordTokenizer, by_turns, from_divergence, without_padded
from chunkplan.planfile.analysis_writer import NO_COLUMNS
from chunkplan.planfile.manifest import add_unread, most_unread
from chunkplan.planfile.samples import IN_WORDS
from chunkplan.planfile.schema import TOKEN_COLUMNS

#: Goes into every key: a change of the results of pieces needs a new number.
_VERSION = 11

_LONGEST = np.iinfo(np.int32).max

#: Called with bytes and tokens since the last call.
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class IntakeSettings:
    """Settings that all tasks of an intake share.

    `today` is the date, as YYYY-MM-DD, that chat templates print; `identity` a hash of everything beside the records
    that tokens depend on.
    """

    tokenizer: str | None
    chat_template: str | None
    today: str
    identity: str | None
    options: IntakeOptions
    store: Path
    use_cache: bool


def process(settings: IntakeSettings, piece: Piece, layout: RecordLayout, report: Report) -> PieceResult:
    """Read a piece, encode it and put it into the store, unless it is there.

    Raises RecordError: `--on-error stop`, and a record cannot become a sequence; UsageError: records need a chat
    template that is not there, or the disk is full.
    """
    refuse_together(layout, settings.options)
    store = Store(settings.store, is_trusted=settings.use_cache)
    found = digest(piece)
    result = PieceResult(piece_key(settings, layout, found, piece.reader, piece.origin), found, piece.reader)
    if (known := find(settings, store, result.key)) is not None:
        report(piece.share, known.num_tokens)
        return known
    options = settings.options
    if options.stores_tokens and (settings.tokenizer or layout.schema in OF_TOKENS):
        check_room(store.root, MOST * piece.num_bytes, "the next piece")
    encoder = _encoder(settings)
    with store.adding(result) as folder:
        writer = PieceWriter(folder, result, stored_columns(layout, options))
        task = _Task(writer, result, encoder, options)
        num_read, num_reported = 0, 0
        for batch in read(piece, layout, max_record_bytes=options.max_record_bytes, sample=options.sample):
            before = result.num_tokens
            task.add(batch, is_source=piece.index == 0 and batch.num_bytes >= piece.num_bytes)
            num_read += batch.num_bytes
            now = min(piece.share * num_read // max(1, piece.num_bytes), piece.share)
            report(now - num_reported, result.num_tokens - before)
            num_reported = now
        writer.close()
        result.unread, result.num_unread = most_unread(result.unread), len(result.unread)
        report(piece.share - num_reported, 0)  # a last line that another piece has
        accounted = result.num_sequences + result.num_rejected + result.num_not_sampled
        assert result.num_records + result.num_more == accounted
    return result


def find(settings: IntakeSettings, store: Store, key: str) -> PieceResult | None:
    """The piece with this key, if it is in the store and has nothing that stops the run."""
    known, options = store.find(key), settings.options
    if known is None or (options.on_error == "stop" and not _may_be_rejected(options, set(known.rejected))):
        return None
    return known


def _may_be_rejected(options: IntakeOptions, reasons: set[str]) -> bool:
    """True if none of the reasons stops a run under `on_error="stop"`: empty records, or drops the user asked for."""
    allowed = {"empty", "untrained"}
    allowed |= {"too-long"} if options.long == "drop" else set()
    allowed |= {"undesirable"} if options.undesirable == "drop" else set()
    return reasons <= allowed


def piece_key(settings: IntakeSettings, layout: RecordLayout, found: str, reader: str, origin: int) -> str:
    """The name of a piece in the store: a hash of everything that its result depends on."""
    options = settings.options
    dependencies = {
        "version": _VERSION,
        "digest": found,
        "reader": reader,  # the same bytes are other records as lines than as one text
        "schema": layout.schema,
        "columns": layout.columns,
        "ignored": sorted(layout.ignored),
        **({"inside": layout.inside} if layout.inside else {}),
        "marks": layout.marks and sorted(layout.marks),
        **({"labels": True} if layout.labels else {}),
        **({"numbers": layout.numbers} if layout.numbers else {}),
        "tokenizer": settings.identity,
        "turns": options.turns,
        "max_length": options.max_length,
        "long": options.long,
        "tokens": options.stores_tokens,
        "sample": options.sample and [options.sample, origin],
        "first": origin == 0,  # where a byte order mark is none of the text
        "max_record_bytes": options.max_record_bytes,
    }
    return hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()


def refuse_together(layout: RecordLayout, options: IntakeOptions) -> None:
    """Raise UsageError for options that take apart what belongs together in samples of a layout."""
    kind, _ = layout.samples
    if kind in ("preference", "labelled") and options.turns == "each":
        raise UsageError(
            f"--train-turns each with {IN_WORDS[kind]}, which say something of one answer",
            hint="leave it out, or say --train-turns last",
        )
    if kind == "rollouts" and options.sample is not None:
        raise UsageError(
            "--sample takes groups of rollouts apart, each of which is trained whole",
            hint="leave it out; lengths of rollouts are known without a tokenizer",
        )


def stored_columns(layout: RecordLayout, options: IntakeOptions) -> tuple[str, ...]:
    """The columns of samples that are stored of a piece; where sequences stand says which are a pair."""
    kind, columns = layout.samples
    stored = () if kind == "preference" else columns
    return tuple(name for name in stored if options.stores_tokens or name not in TOKEN_COLUMNS.names)


def prepare(tokenizer: str | None, chat_template: str | None, today: str) -> None:
    """Load what most tasks of a run need, before the first is known; what cannot be loaded is reported by others."""
    if tokenizer is not None and Path(tokenizer).exists():  # from elsewhere only one process is to fetch it
        with suppress(Exception):
            _load(tokenizer, chat_template, today)


def _encoder(settings: IntakeSettings) -> RecordTokenizer | None:
    """The tokenizer, loaded once in a process; again where the same name stands for something else."""
    if settings.tokenizer is None:
        return None
    arguments = settings.tokenizer, settings.chat_template, settings.today
    if (loaded := _load(*arguments).as_asked(settings.options)).identity != settings.identity:
        _load.cache_clear()
        loaded = _load(*arguments).as_asked(settings.options)
    return loaded


@lru_cache(maxsize=1)
def _load(tokenizer: str, chat_template: str | None, today: str) -> RecordTokenizer:
    return load_tokenizer(tokenizer, chat_template, today=today)


class _Task:
    """Turns the batches of a piece into sequences and counts them."""

    def __init__(
        self, writer: PieceWriter, result: PieceResult, encoder: RecordTokenizer | None, options: IntakeOptions
    ) -> None:
        self._writer = writer
        self._result = result
        self._encoder = encoder
        self._options = options
        self._rejected: list[Rejected] = []

    def add(self, batch: Batch, *, is_source: bool) -> None:
        """`is_source` says that it is all there is of the source."""
        self._rejected = list(batch.rejected)
        result = self._result
        before = result.num_sequences - result.num_more
        match batch.records:
            case LengthColumn(num_tokens):
                self._lengths(batch.numbers, num_tokens, {})
            case [TokensRecord(), *_] as records:
                self._documents(batch.numbers, [one for one in records if isinstance(one, TokensRecord)])
            case [Pair(), *_] as records:
                self._pairs(batch.numbers, [one for one in records if isinstance(one, Pair)])
            case [Labelled(), *_] as records:
                labelled = [one for one in records if isinstance(one, Labelled)]
                labels = {"label": np.array([one.label for one in labelled])}
                self._sequences(*self._by_turns(batch.numbers, [one.record for one in labelled]), labels)
            case records:
                self._sequences(*self._by_turns(batch.numbers, records))
        num_left_out = batch.num_records - (result.num_sequences - result.num_more - before + len(self._rejected))
        assert num_left_out >= 0 if self._options.sample is not None else num_left_out == 0
        result.num_not_sampled += num_left_out
        result.num_records += batch.num_records
        result.num_rows += batch.num_rows
        add_unread(result.unread, batch.unread)
        self._settle(is_source)

    def _settle(self, is_source: bool) -> None:
        """Note what was rejected, or stop at the first that the user has not asked to be dropped."""
        self._rejected.sort()
        if self._options.on_error == "stop":
            bad = [one for one in self._rejected if not _may_be_rejected(self._options, {one.reason})]
            for number, reason, message, hint in bad[:1]:
                if is_source and not self._result.num_sequences:  # to leave such records out leaves nothing
                    is_whole = reason == "too-long" and self._options.long == "truncate"  # what is not to be cut
                    of_all = hint if is_whole else HINTS_OF_ALL.get(reason, hint)
                    raise RecordError(message, reason=reason, hint=of_all, number=number)
                found = f"{len({one.number for one in bad}):,} of the {self._result.num_records:,} read here"
                hint = f"{hint}; --on-error skip counts such records and goes on ({found})"
                raise RecordError(message, reason=reason, hint=hint, number=number)
        self._writer.reject(self._rejected)

    def _documents(self, numbers: Int64Array, records: list[TokensRecord]) -> None:
        """Add the sequences of records that are tokens, which are several of a packed row."""
        counts = [len(record.begins) for record in records]
        self._result.num_more += sum(counts) - len(counts)
        found = token_columns([document for record in records for document in record.documents])
        if rollouts := [record.rollout for record in records if record.rollout is not None]:  # of one document each
            of_sequences, of_tokens = rollouts[0].of_sequence.keys(), rollouts[0].of_tokens.keys()
            found = replace(
                found,
                of_sequences={name: np.array([one.of_sequence[name] for one in rollouts]) for name in of_sequences},
                of_tokens={name: np.concatenate([one.of_tokens[name] for one in rollouts]) for name in of_tokens},
            )
        numbers, found, rejected = without_padded(np.repeat(numbers, counts), found, self._encoder)
        self._rejected += rejected
        self._tokens(numbers, found)

    def _by_turns(self, numbers: Int64Array, records: list[Record]) -> tuple[list[int], list[Record]]:
        """The records that become sequences, and of each the number of the record that it is of: conversations make
        one for each turn where that was asked for."""
        if self._options.turns == "rendered":
            return numbers.tolist(), records
        owners: list[int] = []
        made: list[Record] = []
        for number, record in zip(numbers.tolist(), records, strict=True):
            several = by_turns(record, self._options.turns) if isinstance(record, Conversation) else [record]
            owners += [number] * len(several)
            made += several
        return owners, made

    def _pairs(self, numbers: Int64Array, pairs: list[Pair]) -> None:
        """Add both sequences of each pair, the chosen one first, or reject the pair."""
        owners, sides = self._by_turns(
            np.repeat(numbers, 2), [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        )
        left_out: dict[int, set[str]] = {}
        encoded = None if self._encoder is None else self._encoder.encode(sides, left_out)
        self._result.is_estimated |= encoded is None
        kept: list[tuple[int, tuple[Int32Array, BoolArray] | None]] = []
        lengths: list[int] = []
        for place in range(0, len(sides), 2):
            two = sides[place : place + 2]
            try:
                found = pair_of(two, encoded and encoded[place : place + 2], self._encoder)
                own = [len(one[0]) for one in found] if found else [min(estimate_tokens(one), _LONGEST) for one in two]
                refuse_long(max(own), self._options, "a pair")
            except RecordError as error:
                self._rejected.append(error.of_row(owners[place]))
                continue
            kept += [(place, found[0] if found else None), (place + 1, found[1] if found else None)]
            lengths += own
            kinds = {EQUAL} if found and np.array_equal(found[0][0], found[1][0]) else set[str]()
            add_left_out(self._result, kinds.union(left_out.get(place, ()), left_out.get(place + 1, ())), owners[place])
        if not kept:
            return
        self._result.num_more += len(kept) // 2
        numbers = np.array([owners[place] for place, _ in kept], np.int64)
        sequences = [one for _, one in kept if one is not None]
        if sequences:
            self._tokens(numbers, token_columns(sequences))
        else:
            self._lengths(numbers, np.array(lengths, np.int32), {})

    def _sequences(self, owners: list[int], records: list[Record], more: SampleColumns = NO_COLUMNS) -> None:
        """Add what `records` become; those of one record are kept or rejected each by itself."""
        self._result.num_more += len(owners) - len(set(owners))
        if self._encoder is None:
            self._result.is_estimated = True
            lengths = [min(estimate_tokens(record), _LONGEST) for record in records]
            self._lengths(np.array(owners, np.int64), np.array(lengths, np.int32), more)
            return
        encoded: list[tuple[Int32Array, BoolArray]] = []
        kept: list[int] = []
        left_out: dict[int, set[str]] = {}
        for place, one in enumerate(self._encoder.encode(records, left_out)):
            if isinstance(one, RecordError):
                self._rejected.append(one.of_row(owners[place]))
            else:
                encoded.append(one)
                kept.append(place)
        if not encoded:
            return
        of_kept = {name: values[kept] for name, values in more.items()}
        is_kept = self._tokens(np.array(owners, np.int64)[kept], token_columns(encoded, of_kept))
        for place in np.array(kept)[is_kept].tolist():
            if place in left_out:
                add_left_out(self._result, left_out[place], owners[place])

    def _tokens(self, numbers: Int64Array, found: TokenColumns) -> BoolArray:
        """Add sequences; which of them are kept, bool [n]."""
        is_rollout = "group" in found.of_sequences
        kept, cut = self._limit(numbers, np.diff(found.offsets), "a rollout" if is_rollout else "")
        found = found.kept(kept, cut)
        if not kept.any():
            return kept
        num_targets = np.add.reduceat(found.target, found.offsets[:-1], dtype=np.int64)
        lengths = cut[kept].astype(np.int32)
        self._writer.add_lengths(numbers[kept], lengths, num_targets.astype(np.int32), found.of_sequences)
        if self._options.stores_tokens:
            self._writer.add_tokens(found)
        return kept

    def _lengths(self, numbers: Int64Array, lengths: Int32Array, more: SampleColumns) -> None:
        kept, cut = self._limit(numbers, lengths.astype(np.int64))
        lengths = cut[kept].astype(np.int32)
        of_kept = {name: values[kept] for name, values in more.items()}
        self._writer.add_lengths(numbers[kept], lengths, lengths - 1, of_kept)

    def _limit(self, numbers: Int64Array, lengths: Int64Array, whole: str = "") -> tuple[BoolArray, Int64Array]:
        """Apply the length limit: mask of the sequences that are kept, bool [n], and their lengths, int64 [n].

        Where `whole` says of what they are, none is cut.
        """
        options = self._options
        limit = options.max_length if options.max_length is not None else _LONGEST
        is_long = lengths > limit
        if not is_long.any():
            return ~is_long, lengths
        if options.max_length is not None and options.long == "truncate" and not whole:
            self._result.num_truncated += int(is_long.sum())
            self._result.num_truncated_tokens += int((lengths - limit)[is_long].sum())
            return np.ones(len(lengths), np.bool_), np.minimum(lengths, limit)
        for number, length in zip(numbers[is_long].tolist(), lengths[is_long].tolist(), strict=True):
            self._rejected.append(too_long(number, length, options.max_length, whole))
        return ~is_long, lengths


#: About right for English and for code.
_BYTES_PER_TOKEN = 4


def estimate_tokens(record: Record) -> int:
    """About how many tokens `record` has, at least 1; those of a conversation include tool calls and reasoning."""
    match record:
        case TextRecord(text):
            num_bytes = len(text.encode())
        case PromptRecord(prompt, completion):
            num_bytes = len(prompt.encode()) + len(completion.encode())
        case Exchange(system, prompt, completion):
            num_bytes = len((system or "").encode()) + len(prompt.encode()) + len(completion.encode())
        case Conversation(messages):
            num_bytes = 0
            for message in messages:
                num_bytes += len((message.content or "").encode())
                for key in ("tool_calls", "reasoning_content"):
                    if value := message.fields.get(key):
                        num_bytes += len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
        case _:
            raise AssertionError("tokens and lengths are not estimated")
    return max(1, -(-num_bytes // _BYTES_PER_TOKEN))


def pair_of(
    sides: Sequence[Record],
    encoded: Sequence[tuple[Int32Array, BoolArray] | RecordError] | None,
    tokenizer: RecordTokenizer | None,
) -> tuple[tuple[Int32Array, BoolArray], tuple[Int32Array, BoolArray]] | None:
    """Tokens and targets of the two sides of a pair; None without a tokenizer.

    Raises RecordError: one has none, or nothing in it counts.
    """
    found = []
    for one in encoded or ():
        if isinstance(one, RecordError):
            raise one
        found.append(one)
    if not found or tokenizer is None:
        return None
    is_text = all(
        isinstance(side, PromptRecord) or (isinstance(side, Exchange) and tokenizer.template is None) for side in sides
    )
    chosen, rejected = from_divergence(*found) if is_text else found
    for name, (_, target) in (("chosen", chosen), ("rejected", rejected)):
        if not target.any():
            hint = "give an answer of the assistant to both, or leave this record out"
            raise RecordError(f"nothing of `{name}` counts in the loss", reason="schema", hint=hint)
    return chosen, rejected


def refuse_long(num_tokens: int, options: IntakeOptions, whole: str) -> None:
    """Raise RecordError for more tokens than are asked for, or than there can be, of what is not to be cut."""
    if num_tokens > (_LONGEST if options.max_length is None else options.max_length):
        _, reason, message, hint = too_long(0, num_tokens, options.max_length, whole)
        raise RecordError(message, reason=reason, hint=hint)


def too_long(number: int, num_tokens: int, max_length: int | None, whole: str = "") -> Rejected:
    """The entry of a record whose sequence has more tokens than are asked for, or than there can be.

    `whole` says of what is not to be cut.
    """
    limit = _LONGEST if max_length is None else max_length
    if whole and max_length is not None:
        message = f"{num_tokens:,} tokens, more than {limit:,}, and {whole} that is cut is another one"
        return Rejected(number, "too-long", message, "raise --max-length; --overlong drop leaves such out, counted")
    hint = (
        f"raise --max-length; --overlong truncate cuts {num_tokens - limit:,} tokens off it, --overlong drop leaves it "
        "out; both do so with all that are longer, counted"
        if max_length is not None
        else "split the record; that is the most a plan can address"
    )
    return Rejected(number, "too-long", f"{num_tokens:,} tokens, more than {limit:,}", hint)
