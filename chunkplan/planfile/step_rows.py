"""Reads the rows of chunks.parquet or schedule.parquet step by step, a row group at a time.

Columns become numpy arrays, and only the rows of one step at a time Python values: a plan of any size is read in
bounded memory, at a cost that a training step does not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.tables import conform, open_parquet

#: The rows of a step: of every column a list with one entry a row. In a column of lists an entry is a list of numbers,
#: or of tuples, the fields of each struct in it.
StepRows = dict[str, list[Any]]


def rows_by_step(path: Path, schema: pa.Schema, start: int) -> Iterator[tuple[int, StepRows]]:
    """Yield (step, its rows) from step `start` on, in file order; row groups that end before `start` are not read.

    Raises:
        DataError: the file is damaged or not of `schema`.
    """
    for table in _whole_steps(path, schema, start):
        flat, lists = _arrays(table)
        steps = flat["step"]
        edges = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1, append=steps[-1] - 1)).tolist()
        for first_row, stop in pairwise(edges):
            if steps[first_row] < start:
                continue
            rows: StepRows = {name: values[first_row:stop].tolist() for name, values in flat.items()}
            for name, (offsets, fields) in lists.items():
                bounds = offsets[first_row : stop + 1].tolist()
                items = [values[bounds[0] : bounds[-1]].tolist() for values in fields]
                items = list(zip(*items, strict=True)) if len(items) > 1 else items[0]
                rows[name] = [items[i - bounds[0] : j - bounds[0]] for i, j in pairwise(bounds)]
            yield int(steps[first_row]), rows


def _whole_steps(path: Path, schema: pa.Schema, start: int) -> Iterator[pa.Table]:
    """All rows in order, in tables with at least one row, none of which ends in the middle of a step."""
    rest = schema.empty_table()
    for table in _row_groups(path, schema, start):
        table = pa.concat_tables([rest, conform(table, schema, path)])
        steps = to_numpy(table.column("step").combine_chunks())
        changes = np.flatnonzero(np.diff(steps))
        cut = int(changes[-1]) + 1 if changes.size else 0
        if cut:
            yield table.slice(0, cut)
        rest = table.slice(cut)
    if rest.num_rows:
        yield rest


def _row_groups(path: Path, schema: pa.Schema, start: int) -> Iterator[pa.Table]:
    step = pa.schema([schema.field("step")])
    with open_parquet(path, hint="build the plan again") as file:
        for group in range(file.num_row_groups):
            if start:
                # Statistics would tell too, but pyarrow ends the process when it is asked for those of a damaged file.
                steps = conform(file.read_row_group(group, step.names), step, path).column("step").combine_chunks()
                if not (to_numpy(steps) >= start).any():
                    continue
            yield file.read_row_group(group, schema.names)


_Array = npt.NDArray[Any]


def _arrays(table: pa.Table) -> tuple[dict[str, _Array], dict[str, tuple[_Array, list[_Array]]]]:
    """The plain columns; of those of lists, where the items of each row begin [num_rows + 1], and their fields."""
    flat, lists = {}, {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_list(column.type):
            offsets = to_numpy(column.offsets)
            items = column.flatten()
            leaves = items.flatten() if pa.types.is_struct(items.type) else [items]
            lists[name] = offsets - offsets[0], [_array(leaf) for leaf in leaves]
        else:
            flat[name] = _array(column)
    return flat, lists


def _array(column: pa.Array) -> _Array:
    """Numbers and booleans as they are; words, and numbers among nulls (None), as objects."""
    if pa.types.is_dictionary(column.type):
        words = np.array(column.dictionary.to_pylist(), np.object_)
        return np.asarray(words[to_numpy(column.indices)])
    values = to_numpy(column)
    if column.null_count:
        values = values.astype(np.object_)
        values[~to_numpy(column.is_valid())] = None
    return values
