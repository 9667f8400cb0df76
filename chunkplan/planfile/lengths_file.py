"""A bare file of lengths (.parquet or .npy, one integer column): an analysis without tokens."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import Int32Array, IntArray
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.arrow import to_arrow
from chunkplan.planfile.hashing import ContentHasher, combine_hashes
from chunkplan.planfile.schema import SEQUENCES
from chunkplan.planfile.tables import open_parquet

IntegerArray = npt.NDArray[np.integer]

#: Rows. Fresh memory costs more time than hashing it.
_HASHED_AT_ONCE = 1 << 16

_HINT = "a lengths file is a .npy array or a .parquet file with one integer column"


def load_lengths(path: Path) -> Analysis:
    """Read lengths in tokens, one a sequence; every token but a sequence's first counts as a target.

    Raises:
        UsageError: there is no such file.
        DataError: it is not one column of whole numbers from 1 to 2^31 - 1.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}", hint=_HINT)
    if path.suffix not in (".npy", ".parquet"):
        hint = f"give its folder, {path.parent}" if path.name == MANIFEST else f"`chunkplan analyze {path}` first"
        raise UsageError(f"{path} is neither an analysis nor a file of lengths", hint=hint)
    values = _read_npy(path) if path.suffix == ".npy" else _read_parquet(path)
    if values.size == 0:
        raise DataError("no lengths in it", where=str(path), hint=_HINT)
    if not 1 <= values.min() <= values.max() <= np.iinfo(np.int32).max:
        wrong = np.flatnonzero((values < 1) | (values > np.iinfo(np.int32).max))
        raise DataError(
            f"the length of sequence {wrong[0]} is {values[wrong[0]]}, expected 1 to 2147483647",
            where=f"{path}, row {wrong[0]}",
            hint="leave out sequences without tokens; longer ones cannot be planned",
        )
    num_tokens = np.array(values, np.int32)
    return Analysis(
        path=path,
        content_hash=combine_hashes({"sequences": _hash_sequences(num_tokens)}),
        manifest={"kind": "lengths", "exact": True, "tokens": []},
        num_tokens=num_tokens,
        num_target_tokens=num_tokens - 1,
    )


def _hash_sequences(num_tokens: Int32Array) -> str:
    """The content hash of the sequences.parquet that an analysis of these lengths would have."""
    hasher = ContentHasher(SEQUENCES)
    for start in range(0, num_tokens.size, _HASHED_AT_ONCE):
        tokens = num_tokens[start : start + _HASHED_AT_ONCE]
        record = np.arange(start, start + tokens.size)
        columns: list[IntArray] = [record, np.zeros(tokens.size, np.int32), record, tokens, tokens - 1]
        hasher.update(pa.RecordBatch.from_arrays([to_arrow(column) for column in columns], schema=SEQUENCES))
    return hasher.hexdigest()


def _read_npy(path: Path) -> IntegerArray:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped, a shape that the file has not is refused
    except (OSError, ValueError, SyntaxError, TokenError, OverflowError, EOFError) as error:  # the header is Python
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError("not one row of whole numbers", where=str(path), hint=_HINT)
    return values


def _read_parquet(path: Path) -> IntegerArray:
    with open_parquet(path, _HINT) as file:
        table = file.read()
        table.validate(full=True)
    if table.num_columns != 1 or not pa.types.is_integer(table.schema.field(0).type):
        found = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        raise DataError(f"found columns {found}; expected one of whole numbers", where=str(path), hint=_HINT)
    if table.column(0).null_count:
        row = int(np.flatnonzero(table.column(0).is_null().to_numpy())[0])
        raise DataError(f"the length of sequence {row} is null", where=f"{path}, row {row}", hint=_HINT)
    lengths: IntegerArray = table.column(0).to_numpy()
    return lengths
