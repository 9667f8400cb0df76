"""The cache: the results of pieces, by the content that was read and everything else that they depend on.

A piece is in it whole or not at all. It takes next to no room of its own: its token files are those of the analyses
that were made of them (hard links). When a run has ended well, what was in an analysis and is in none any more is
removed. What an interrupted run leaves behind is kept for a week, to be found by the next. Whether the disk has room is
asked before anything is written, so that little fails halfway.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time_ns
from typing import Any, BinaryIO, TextIO, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import UsageError
from chunkplan.files.folder import CACHE_TAG, remove_left_behind, temporary_folder
from chunkplan.intake.pieces import PieceResult, SampleColumns, TokenColumns
from chunkplan.intake.records import JsonObject, Rejected
from chunkplan.planfile.analysis_writer import TokenFile
from chunkplan.planfile.hashing import sequence_digests
from chunkplan.planfile.schema import SAMPLE_COLUMNS, analysis_schemas, to_arrow, to_numpy

LENGTHS, TOKENS, DIGESTS, REJECTED = "lengths.arrow", "tokens.arrow", "digests.bin", "rejected.jsonl"
_RESULT = "piece.json"

#: And the columns that only samples have; of a group the hash of what those of it have.
_SCHEMA = pa.schema([("number", pa.int64()), ("num_tokens", pa.int32()), ("num_target_tokens", pa.int32())])

#: What the specification of the tag wants in it.
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# The cache of `chunkplan analyze`, which makes it again.\n"

#: Its presence says that the piece has been in an analysis.
_USED = "used"
_UNUSED_NS = 7 * 24 * 3600 * 10**9

#: A file that was changed less than this before it was looked at may change again without its times showing it.
_SETTLED_NS = 2_000_000_000


#: Room that is left to others: as much as is written, and no more than this.
RESERVE_BYTES = 256 << 20

#: Bytes that are stored for a byte of text where tokens are long, and where every character is one.
LEAST, MOST = 0.6, 5.5

ROOM_HINT = (
    "make room, put --workspace elsewhere, or store lengths only with --no-tokens; what was finished is not done again"
)


class KnownFile(TypedDict):
    """The layouts and pieces found in a file that was read whole.

    `layouts`: the fields of its `RecordLayout` by request; `pieces`: digest, reader and origin of each piece, in order.
    """

    layouts: dict[str, JsonObject]
    pieces: list[tuple[str, str, int]]


@dataclass(frozen=True)
class FileState:
    """Identity of a file's content: device, inode, size, and the times of its content and of its inode.

    `looked` is the time of the look in nanoseconds, by the clock that sets the times of files.
    """

    path: Path
    stat: list[int]
    looked: int

    @classmethod
    def of(cls, name: str) -> FileState | None:
        """The state of a file of this machine, and None for anything else."""
        path, looked = Path(name), time_ns()
        return cls(path, _describe(path), looked) if path.is_file() else None

    @property
    def is_unchanged(self) -> bool:
        """True if the file has not changed since."""
        return _describe(self.path) == self.stat


def _describe(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


class Store:
    """The cache in the folder `root`, made when it is needed. With `is_trusted` false nothing in it is used."""

    def __init__(self, root: Path, *, is_trusted: bool = True) -> None:
        self.root = root
        self._is_trusted = is_trusted
        self._own: set[str] = set()  # of this process
        self._lock: TextIO | None = None

    def path(self, key: str) -> Path:
        """The folder of a piece."""
        return self.root / "pieces" / key

    def find(self, key: str) -> PieceResult | None:
        """The result of the piece with this key, if it is here."""
        return self._stored(key) if self._is_trusted or key in self._own else None

    def _stored(self, key: str) -> PieceResult | None:
        try:
            result = PieceResult(**json.loads((self.path(key) / _RESULT).read_text(encoding="utf-8")))
            files = {name: _look(self.path(key) / name) for name in result.files}
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        # A file that was damaged since, here or in an analysis that has it too, is none.
        return result if files == result.files and result.key == key else None

    @contextmanager
    def adding(self, result: PieceResult) -> Iterator[Path]:
        """Yield a folder for the files of a piece, which is in the store once the block ends without an error."""
        with temporary_folder(self.root / "pieces", result.key) as folder:
            yield folder
            result.files = {path.name: _look(path) for path in folder.iterdir()}
            (folder / _RESULT).write_text(json.dumps(asdict(result)), encoding="utf-8")
            # Nothing is synced here: what is lost when the machine goes down shows in the sizes of files, and the
            # files of an analysis are synced when it is whole.
            if self.find(result.key) is None:
                shutil.rmtree(self.path(result.key), ignore_errors=True)
            try:
                folder.rename(self.path(result.key))
            except OSError:  # another process was faster
                if self._stored(result.key) is None:
                    raise
        self._own.add(result.key)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the cache; until the block ends no other run removes anything from it."""
        self.clean()
        with (self.root / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._lock = lock
            except OSError:
                self._lock = None  # some network file systems have no locks: nothing is ever removed there
            yield

    def clean(self) -> None:
        """Remove what runs that were killed have left half done."""
        for folder in (self.root, self.root / "pieces", self.root / "files"):
            folder.mkdir(parents=True, exist_ok=True)
            remove_left_behind(folder)
        (self.root / CACHE_TAG).write_text(_TAG, encoding="utf-8")

    def prune(self, used: Iterable[str]) -> None:
        """Note that an analysis has the pieces that are `used`, and remove what none has any more.

        While other runs use the cache nothing is removed; a later run will.
        """
        keep = set(used)
        for key in keep:
            (self.path(key) / _USED).touch()
        if self._lock is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for folder in (self.root / "pieces").iterdir():
            if folder.name not in keep and not folder.name.startswith(".") and _is_released(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def recall(self, path: Path) -> KnownFile | None:
        """Return what `remember` noted of a file, None if the file has changed since."""
        try:
            entry: JsonObject = json.loads(self._note(path).read_text(encoding="utf-8"))
            stat, looked = entry["stat"], entry["looked"]
            known = KnownFile(layouts=entry["known"]["layouts"], pieces=entry["known"]["pieces"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        # As git's index does: a change within the clock's grain of being looked at might not show in the times.
        is_settled = max(stat[3:]) + _SETTLED_NS < looked
        return known if self._is_trusted and is_settled and stat == _describe(path) else None

    def remember(self, state: FileState, known: KnownFile) -> None:
        """Note what is `known` of a file that was in this state before it was read."""
        note = self._note(state.path)
        with temporary_folder(note.parent, note.stem) as folder:
            temporary = folder / note.name
            entry = {"path": str(state.path), "stat": state.stat, "looked": state.looked, "known": known}
            temporary.write_text(json.dumps(entry))
            temporary.replace(note)

    def _note(self, path: Path) -> Path:
        name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
        return self.root / "files" / f"{name}.json"


def _look(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _is_released(folder: Path) -> bool:
    """True if only the cache still holds a piece, so that it may be removed."""
    try:
        if not (folder / _USED).exists():
            return folder.stat().st_mtime_ns + _UNUSED_NS < time_ns()
        tokens = folder / TOKENS
        return not tokens.exists() or tokens.stat().st_nlink == 1
    except FileNotFoundError:  # another process is removing it
        return False


class PieceWriter:
    """Fills `folder`, and `result` with what it counts; with the `columns` that only samples have."""

    def __init__(self, folder: Path, result: PieceResult, columns: Collection[str] = ()) -> None:
        self._folder = folder
        self._result = result
        self._schema = pa.schema([*_SCHEMA, *(field for field in SAMPLE_COLUMNS if field.name in columns)])
        _, self._token_schema = analysis_schemas(columns)
        self._lengths: list[tuple[npt.NDArray[Any], ...]] = []
        self._tokens: TokenFile | None = None
        self._digests: BinaryIO | None = None
        self._rejected: TextIO | None = None

    def add_lengths(
        self, numbers: Int64Array, num_tokens: Int32Array, num_targets: Int32Array, more: SampleColumns
    ) -> None:
        """Append n sequences; all arrays [n]."""
        others = (more[name] for name in self._schema.names[len(_SCHEMA) :])
        self._lengths.append((numbers, num_tokens, num_targets, *others))
        self._result.num_sequences += len(numbers)
        self._result.num_tokens += int(num_tokens.sum(dtype=np.int64))
        self._result.num_target_tokens += int(num_targets.sum(dtype=np.int64))

    def add_tokens(self, found: TokenColumns) -> None:
        """Append the tokens of sequences."""
        if self._tokens is None:
            self._tokens = TokenFile(self._folder / TOKENS, self._token_schema)
            self._digests = (self._folder / DIGESTS).open("wb")
        assert self._digests is not None
        more = [found.of_tokens[name] for name in self._token_schema.names[2:]]
        self._tokens.add(np.diff(found.offsets), found.input_ids, found.target, *more)
        self._digests.write(sequence_digests(found.offsets, found.input_ids, found.target, *more))
        self._result.max_token_id = max(self._result.max_token_id or 0, int(found.input_ids.max()))

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Note records that were left out."""
        for record in rejected:
            if self._rejected is None:
                self._rejected = (self._folder / REJECTED).open("w", encoding="utf-8")
            self._rejected.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._result.rejected[record.reason] = self._result.rejected.get(record.reason, 0) + 1

    def close(self) -> None:
        """Write what is left into the files, and close them."""
        with pa.ipc.new_file(str(self._folder / LENGTHS), self._schema) as file:
            if self._lengths:
                columns = [to_arrow(np.concatenate(arrays)) for arrays in zip(*self._lengths, strict=True)]
                file.write_batch(pa.record_batch(columns, schema=self._schema))
        if self._tokens is not None:
            self._tokens.close()
            self._result.has_tokens, self._result.rows = True, self._tokens.rows
        for file in (self._digests, self._rejected):
            if file is not None:
                file.close()


def read_lengths(folder: Path) -> tuple[Int64Array, Int32Array, Int32Array, SampleColumns]:
    """Numbers, tokens and target tokens of the sequences of a piece, each [num_sequences], and columns of samples."""
    file = pa.ipc.open_file(pa.memory_map(str(folder / LENGTHS)))
    if not file.num_record_batches:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), {}
    numbers, num_tokens, num_targets, *others = map(to_numpy, file.get_batch(0).columns)
    return numbers, num_tokens, num_targets, dict(zip(file.schema.names[len(_SCHEMA) :], others, strict=True))


def read_rejected(folder: Path) -> Iterator[Rejected]:
    """The records of a piece that were left out."""
    path = folder / REJECTED
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            values: list[Any] = json.loads(line)
            yield Rejected(*values)


def check_room(folder: Path, num_bytes: float, what: str) -> None:
    """Refuse to begin `what`, which writes about `num_bytes` below `folder`, where there is no room for it.

    Raises UsageError: the disk has less than that, and a reserve.
    """
    while not folder.exists():
        folder = folder.parent
    free, reserve = shutil.disk_usage(folder).free, min(num_bytes, RESERVE_BYTES)
    if free < num_bytes + reserve:
        place = next(place for place in (folder, *folder.parents) if ".tmp-" not in place.name)
        raise UsageError(
            f"{what} takes about {_size(num_bytes)}, {_size(reserve)} are to stay free, and {place} has {_size(free)} "
            "left",
            hint=ROOM_HINT,
        )


def _size(num_bytes: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= size), ("KB", 1e3))
    return f"{num_bytes / size:,.1f} {unit}"
