"""Files of safetensors, read and written a tensor at a time, or some rows of one: without mapping files into memory.

A mapped file counts as memory of the process as far as it was read. The format is that of
https://github.com/huggingface/safetensors: the length of a header, a header in JSON, then the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from chunkplan.errors import DataError

#: Names of dtypes in a header, in the order in which their tensors stand in a file.
_DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"

#: How much of a tensor is read or written at once, where it goes by rows.
_BYTES_AT_ONCE = 1 << 21

Rows = slice | EllipsisType | tuple[slice, ...]


class Kind(NamedTuple):
    """What is known of a tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """How many bytes its numbers take."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def rows_at_once(self) -> int:
        """How many rows take as much memory as is read or written at once, at least one."""
        return max(1, _BYTES_AT_ONCE // max(1, self.dtype.itemsize * torch.Size(self.shape[1:]).numel()))


class TensorFile:
    """The tensors in a safetensors file, by name, read when they are asked for.

    Raises:
        DataError: it is not such a file, or torn.
    """

    def __init__(self, path: Path, hint: str) -> None:
        self.path, self._hint = path, hint
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                left = path.stat().st_size - 8 - size
                header = json.loads(file.read(size)) if left >= 0 else None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), hint=hint) from error
        if not isinstance(header, dict):
            raise DataError("cannot be read: its header is not whole", where=str(path), hint=hint)
        header.pop(_METADATA, None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != left:
            what = f"cannot be read: its tensors take {end:,} bytes, it has {max(0, left):,}"
            raise DataError(what, where=str(path), hint=hint)
        self._header: dict[str, dict[str, list[int]]] = header
        self._begin = 8 + size

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def kind(self, name: str) -> Kind:
        """Dtype and shape of a tensor.

        Raises:
            DataError: its dtype is not known.
        """
        entry = self._header[name]
        dtype = _DTYPES.get(str(entry["dtype"]))
        if dtype is None:
            raise DataError(f"{name} is of dtype {entry['dtype']}", where=str(self.path), hint=self._hint)
        return Kind(dtype, tuple(entry["shape"]))

    def read(self, name: str, where: Rows = ...) -> Tensor:
        """A tensor, or the part of it that slices, one for each of its first dimensions, say.

        Raises:
            DataError: the file ends before it, or cannot be read.
        """
        dtype, shape = self.kind(name)
        slices = () if where is ... else where if isinstance(where, tuple) else (where,)
        begin = self._header[name]["data_offsets"][0]
        if slices and shape:  # rows lie behind each other
            start, stop, _ = slices[0].indices(shape[0])
            begin += start * dtype.itemsize * torch.Size(shape[1:]).numel()
            shape = (max(0, stop - start), *shape[1:])
        found = torch.empty(shape, dtype=dtype)
        self._fill(_bytes_of(found), begin, name)
        return found[(slice(None), *slices[1:])] if len(slices) > 1 else found

    def read_rows(self, name: str, first: int, target: Tensor) -> None:
        """Fill `target`, contiguous on the CPU and of the dtype in the file, with the rows of a tensor from `first` on.

        Raises:
            DataError: the file ends before it, or cannot be read.
        """
        dtype, shape = self.kind(name)
        assert target.dtype == dtype and target.shape[1:] == shape[1:], name
        row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        self._fill(_bytes_of(target), self._header[name]["data_offsets"][0] + first * row_bytes, name)

    def sample(self, name: str, num_bytes: int) -> bytes:
        """Up to so many bytes from the middle of a tensor.

        Raises:
            DataError: the file ends before it, or cannot be read.
        """
        begin, end = self._header[name]["data_offsets"]
        found = bytearray(min(num_bytes, end - begin))
        self._fill(memoryview(found), begin + (end - begin - len(found)) // 2, name)
        return bytes(found)

    def _fill(self, left: memoryview, begin: int, name: str) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._begin + begin)
                while len(left) and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise DataError(f"cannot read {name}: {error}", where=str(self.path), hint=self._hint) from error
        if len(left):
            raise DataError(f"ends within {name}", where=str(self.path), hint=self._hint)


class StoredTensor:
    """A tensor in a file, or `rows` of it, that is read when it is indexed, as a slice of safetensors is."""

    def __init__(self, file: TensorFile, name: str, rows: slice | None = None) -> None:
        self._file, self._name, self.rows = file, name, rows

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self._file.path

    @property
    def kind(self) -> Kind:
        """Dtype and shape of it, of its rows where these are given."""
        dtype, shape = self._file.kind(self._name)
        return Kind(dtype, shape if self.rows is None else (len(range(*self.rows.indices(shape[0]))), *shape[1:]))

    def sample(self, num_bytes: int) -> bytes:
        """Up to so many bytes from the middle of the whole of it."""
        return self._file.sample(self._name, num_bytes)

    def get_shape(self) -> list[int]:
        """Its shape, as safetensors calls it."""
        return [*self.kind.shape]

    def get_dtype(self) -> str:
        """Its dtype, by the name that safetensors has for it."""
        return _NAMES[self.kind.dtype]

    def __getitem__(self, where: Rows) -> Tensor:
        found = self._file.read(self._name, ... if self.rows is None else self.rows)
        return found if where is ... else found[where]


class TensorWriter:
    """Writes a safetensors file of tensors whose `kinds` are known, in whatever order they come.

    The file is that of `safetensors.torch.save_file`, byte for byte.
    """

    def __init__(self, file: BinaryIO, kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> None:
        order = [*_NAMES]
        header: dict[str, object] = {_METADATA: dict(metadata)}
        #: Of each tensor that is not there yet, how many bytes of it are; and where they begin.
        self._written, self._places = dict.fromkeys(kinds, 0), dict[str, int]()
        end = 0
        for name, kind in sorted(kinds.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
            offsets = [end, end + kind.num_bytes]
            header[name] = {"dtype": _NAMES[kind.dtype], "shape": [*kind.shape], "data_offsets": offsets}
            self._places[name], end = offsets
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._kinds, self._file = dict(kinds), file
        self._begin = 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(self._begin + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor, or its next rows, of the kind that was said and on any device, where it belongs."""
        kind, written = self._kinds[name], self._written.pop(name)
        is_part = tensor.dtype == kind.dtype and tensor.shape[1:] == kind.shape[1:] and tensor.dim() == len(kind.shape)
        assert is_part and written + tensor.nbytes <= kind.num_bytes, f"{name} is {tensor.shape} of {tensor.dtype}"
        self._file.seek(self._begin + self._places[name] + written)
        self._file.write(_bytes_of(tensor.detach().cpu().contiguous()))
        if written + tensor.nbytes < kind.num_bytes:
            self._written[name] = written + tensor.nbytes

    def check_whole(self) -> None:
        """See that all tensors were written, and each whole."""
        left = self._written
        assert not left, f"{len(left)} tensors were not written, the first is {min(left)}"


@contextmanager
def writing_tensors(path: Path, kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> Iterator[TensorWriter]:
    """A file to write all tensors of `kinds` into within the block."""
    with path.open("wb") as file:
        writer = TensorWriter(file, kinds, metadata)
        yield writer
        writer.check_whole()


def open_files(paths: Iterable[Path], hint: str) -> dict[str, StoredTensor]:
    """All tensors of several files, by name.

    Raises:
        DataError: one of the files is torn.
    """
    return {name: StoredTensor(file, name) for path in paths for file in (TensorFile(path, hint),) for name in file}


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
