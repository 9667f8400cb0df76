"""Rows that are numbers already, as columns: what is plain at once, the rest as `schemas.parse` says, row by row.

What is taken at once is what `schemas.parse` would make the same of; nothing is refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, IntArray, offsets_of
from chunkplan.intake.pieces import LengthColumn, TokenColumns
from chunkplan.intake.readers.parsing import Row, parse_rows
from chunkplan.intake.records import LengthRecord, TokensRecord
from chunkplan.intake.rejection import Rejected
from chunkplan.intake.schemas import RecordLayout

#: Schemas whose records are columns, and the roles of these, the required one first.
COLUMN_ROLES = {"length": ("length",), "input_ids": ("input_ids", "labels", "attention_mask")}

_LARGEST = np.iinfo(np.int32).max


def are_columns(layout: RecordLayout) -> bool:
    """Whether records are taken at once that are laid out so: of tokens, if nothing is beside them but these roles."""
    roles = COLUMN_ROLES.get(layout.schema, ())
    keys = {layout.columns[role] for role in roles}
    return bool(roles) and keys.isdisjoint(layout.ignored) and keys.issuperset(layout.marks or ())


class Lists(NamedTuple):
    """A list of numbers for each of n rows: `values` one after another, `offsets` [n + 1]; `present` [n] or not."""

    values: Int32Array
    offsets: Int64Array
    present: BoolArray


class PlainRows(NamedTuple):
    """Which of n rows were plain, bool [n], the columns of these, and their keys that nothing was made of, counted."""

    taken: BoolArray
    columns: LengthColumn | TokenColumns
    unread: Mapping[str, int] = {}


def plain_lengths(values: IntArray, present: BoolArray) -> PlainRows:
    """The plain ones of n rows, of which `present` have a length: whole numbers from 1 that fit int32."""
    taken = present & (values >= 1) & (values <= _LARGEST)
    return PlainRows(taken, LengthColumn(values[taken].astype(np.int32)))


def complete(
    plain: PlainRows, layout: RecordLayout, rest: Sequence[Row], numbers: Int64Array
) -> tuple[Int64Array, LengthColumn | TokenColumns, list[Rejected], Counter[str]]:
    """The columns of all rows: the plain ones, and `rest`, the others, parsed. Numbers are those of all rows [n]."""
    if not rest:
        return numbers, plain.columns, [], Counter(plain.unread)
    others = np.flatnonzero(~plain.taken)
    kept, records, rejected, unread = parse_rows(layout, rest, range(len(rest)))
    rejected = [one._replace(number=int(numbers[others[one.number]])) for one in rejected]
    is_kept = plain.taken.copy()
    is_kept[others[kept]] = True
    rows = np.flatnonzero(is_kept)
    columns: LengthColumn | TokenColumns
    if isinstance(plain.columns, LengthColumn):
        lengths = np.zeros(len(numbers), np.int32)
        lengths[plain.taken] = plain.columns.num_tokens
        lengths[others[kept]] = [record.num_tokens for record in records if isinstance(record, LengthRecord)]
        columns = LengthColumn(lengths[rows])
    else:
        by_row = dict(zip(others[kept].tolist(), records, strict=True))
        columns = _merge(plain.columns, rows.tolist(), by_row)
    return numbers[rows], columns, rejected, unread + Counter(plain.unread)


def _merge(plain: TokenColumns, rows: list[int], others: dict[int, object]) -> TokenColumns:
    """`plain`, of one sequence each, in order, with the records of some rows between them."""
    documents: list[tuple[Int32Array, BoolArray]] = []
    counts, taken = np.ones(len(rows), np.int64), 0
    for place, row in enumerate(rows):
        record = others.get(row)
        if isinstance(record, TokensRecord):
            documents += record.documents
            counts[place] = len(record.begins)
        else:
            start, stop = plain.offsets[taken], plain.offsets[taken + 1]
            documents.append((plain.input_ids[start:stop], plain.target[start:stop]))
            taken += 1
    return token_columns(documents, counts)


def token_columns(documents: list[tuple[Int32Array, BoolArray]], counts: Int64Array) -> TokenColumns:
    """Tokens and targets of sequences as columns, where records have so many of them each."""
    offsets = offsets_of([len(ids) for ids, _ in documents])
    ids, targets = [ids for ids, _ in documents], [target for _, target in documents]
    return TokenColumns(offsets, join(ids, np.int32), join(targets, np.bool_), counts)


def join(runs: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Runs of numbers one after another, as one array [n]; there may be none."""
    return np.concatenate(runs) if runs else np.empty(0, dtype)
