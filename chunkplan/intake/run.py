"""A run over sources: cuts them into tasks, has these done, and keeps the result of every piece.

Nothing depends on the order in which tasks end: the results are those of their sources, and of several records that
stop a run the first in the order of the input is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from chunkplan.errors import ChunkplanError, DataError
from chunkplan.intake.files import is_url
from chunkplan.intake.probe import find_layout, look_ahead, probe
from chunkplan.intake.process import IntakeSettings, find, piece_key
from chunkplan.intake.readers import cut, is_stream
from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError, Rejected
from chunkplan.intake.runners import Failed, Outcomes, Report, Task
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.fields import LayoutError
from chunkplan.intake.source import Source, hint_for, unreadable_sources
from chunkplan.intake.source_columns import overrides_of_sources
from chunkplan.intake.sources import LINK, SourceFile
from chunkplan.intake.store import KnownFile, Store, describe, now_ns

#: Does tasks and yields their results, in any order; after one that failed it begins no other.
Runner = Callable[[Iterator[Task], IntakeSettings, Report], Outcomes]

#: How many URLs are looked at at once.
_LOOKS = 16

#: The place of what failed in the order of the input: source, and piece in it.
_Place = tuple[int, int]


class IntakeRun:
    """Sources, and after `run` the results of their pieces; with `shard` (I, N) those of share I of N, from 1."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        settings: IntakeSettings,
        store: Store,
        spool: Path,
        *,
        shard: tuple[int, int] | None = None,
    ) -> None:
        readable = [file for file in files if file.kind != LINK]
        self._paths = [file.path for file in readable]
        overrides = iter(overrides_of_sources(settings.options, self._paths))
        self.sources = [Source(file) if file.kind == LINK else Source(file, next(overrides)) for file in files]
        self._settings = settings
        self._options = settings.options
        self._spool = spool
        self._shard = shard
        self._store = store
        self._failures: dict[_Place, ChunkplanError] = {}
        self._open: dict[int, _Opened] = {}
        self._num_dealt = 0  # pieces and streams that went to one shard or another
        self._passed = [0, 0]  # bytes and tokens that no task processes
        self._opened: dict[int, _Opened | None] = {}

    def run(self, runner: Runner, report: Report) -> None:
        """Have all pieces of all sources processed.

        Raises:
            RecordError: a record, or a file, cannot be read and the run is not to go on without it.
            DataError: sources cannot be read at all, or one changed while it was read.
            UsageError: a source cannot be opened, records need a chat template, or the disk is full.
        """
        self._probe()
        latest = (0, 0)

        def add(num_bytes: int, num_tokens: int) -> None:
            nonlocal latest
            latest = num_bytes, num_tokens
            report(num_bytes + self._passed[0], num_tokens + self._passed[1])

        for task, outcome in runner(self._tasks(), self._settings, add):
            source = self.sources[task.piece.source]
            if isinstance(outcome, Failed):
                self._failures[task.piece.source, task.piece.index] = outcome.error
                continue
            source.results[task.piece.index] = outcome
            self._close(task.piece.source)
        add(*latest)  # with what was found at the end
        if self._failures:
            place = min(self._failures)
            raise self._placed(self._failures[place], *place)

    def _probe(self) -> None:
        """Look at all sources before any is read; those that cannot be read are left out, or end the run together.

        Of what is in the cache the results are taken, and it is not looked at; where errors stop the run, what has some
        is not taken from there.
        """
        problems: list[tuple[Source, DataError]] = []
        threads = ThreadPoolExecutor(_LOOKS)
        looks = {  # at what is behind a URL, which takes long to answer
            index: threads.submit(probe, source, index, self._options, self._spool)
            for index, source in enumerate(self.sources)
            if is_url(source.file.path)
        }
        try:
            for index, source in enumerate(self.sources):
                opened = self._opened[index] = _open(source)
                if opened and self._recall(source, opened):
                    continue
                try:
                    look = looks.get(index)
                    source.layout = look.result() if look else probe(source, index, self._options, self._spool)
                except DataError as error:
                    problems.append((source, error))
        finally:
            threads.shutdown(cancel_futures=True)
        is_schema = any(not isinstance(found, RecordError) for _, found in problems)
        if problems and (self._options.on_error == "stop" or (is_schema and len(problems) == len(self._paths))):
            raise unreadable_sources(problems, self._paths, self._options.columns)
        for source, found in problems:
            hint = hint_for(source, found, self._paths)
            message = (
                f"{found.message}; {hint}" if isinstance(found, LayoutError) and found.is_definite else found.message
            )
            source.broken = Rejected(-1, "unreadable", message, hint)
            source.num_pieces = 0
            self._pass(source, source.num_left)

    def _tasks(self) -> Iterator[Task]:
        """The tasks of all sources in order; one that cannot be cut ends them."""
        for index, source in enumerate(self.sources):
            try:
                yield from self._tasks_of(index, source)
            except RecordError as error:
                if self._options.on_error == "stop":
                    self._failures[index, source.num_cut] = error
                    return
                source.broken = Rejected(-1, error.reason, error.message, error.hint)
                source.num_pieces = source.num_cut
                self._pass(source, source.num_left)
            except ChunkplanError as error:
                self._failures[index, source.num_cut] = error
                return

    def _tasks_of(self, index: int, source: Source) -> Iterator[Task]:
        file = source.file
        if source.num_pieces is not None:  # left out, or taken from the cache
            return
        if file.kind == LINK:
            source.num_pieces = 0
            return
        if is_stream(file) and not self._takes_next():
            self._pass(source, source.num_left)
            return
        opened = self._opened.pop(index)
        found, records = cut(file, index, self._spool), list[JsonObject]()
        if source.layout is None:
            found, records = look_ahead(found, source, self._options)
        for piece in found:
            if source.layout is None:
                source.layout = find_layout(source, records)
            source.num_cut += 1
            source.reader = piece.reader
            share = min(piece.share, source.num_left)
            if is_stream(file) or self._takes_next():
                source.num_left -= share
                yield Task(replace(piece, share=share), source.layout)
            else:
                self._pass(source, share)
            if opened:
                opened.origins.append(piece.origin)
        source.num_pieces = source.num_cut
        self._pass(source, source.num_left)
        if opened and self._shard is None:
            self._open[index] = opened
            self._close(index)

    def _recall(self, source: Source, opened: _Opened) -> bool:
        """Take the results of a file from the cache; whether it is unchanged and they are all there."""
        known = self._store.recall(opened.path)
        if known is None or self._shard is not None or opened.wanted not in known["layouts"]:
            return False
        layout = RecordLayout(**known["layouts"][opened.wanted])
        keys = [piece_key(self._settings, layout, *piece) for piece in known["pieces"]]
        found = [find(self._settings, self._store, key) for key in keys]
        results = {index: result for index, result in enumerate(found) if result is not None}
        if len(results) < len(found):
            return False
        source.layout, source.results, source.num_pieces = layout, results, len(results)
        self._pass(source, source.num_left)
        self._passed[1] += sum(result.num_tokens for result in found if result is not None)
        return True

    def _close(self, index: int) -> None:
        """Note in the cache that a file is processed, once all of its pieces are."""
        source = self.sources[index]
        if index not in self._open or not source.is_complete:
            return
        opened = self._open.pop(index)
        if describe(opened.path) != opened.stat:
            self._failures[index, 0] = DataError(
                "changed while it was read", where=source.name, hint="run the command again when it is finished"
            )
            return
        assert source.layout is not None
        before = self._store.recall(opened.path)
        layouts = (before["layouts"] if before else {}) | {opened.wanted: asdict(source.layout)}
        pieces = [
            (piece.digest, piece.reader, origin) for piece, origin in zip(source.pieces, opened.origins, strict=True)
        ]
        self._store.remember(opened.path, opened.stat, opened.looked, KnownFile(layouts=layouts, pieces=pieces))

    def _placed(self, error: ChunkplanError, source: int, piece: int) -> ChunkplanError:
        """`error` with the place of its record, and with the hint that --on-error skip goes on without what is bad."""
        if isinstance(error, RecordError):
            where = error.where or self.sources[source].place(piece, error.number)
            what = "the rest of this source" if error.reason == "unreadable" else "this source"
            is_said = "--on-error skip" in error.hint or (len(self.sources) == 1 and error.reason != "unreadable")
            hint = hint_for(self.sources[source], error, self._paths)
            hint += "" if is_said else f"; --on-error skip leaves {what} out and goes on"
            return RecordError(error.message, reason=error.reason, hint=hint, where=where)
        if isinstance(error, LayoutError):
            error.hint = hint_for(self.sources[source], error, self._paths)
        return error

    def _pass(self, source: Source, num_bytes: int) -> None:
        """Count bytes that this run does not read: what other shards or runs read, and what is behind damage."""
        if source.file.num_bytes is not None:
            source.num_left -= num_bytes
            self._passed[0] += num_bytes

    def _takes_next(self) -> bool:
        """Whether this shard takes the next piece or stream: they go to the shards in turn."""
        self._num_dealt += 1
        return self._shard is None or (self._num_dealt - 1) % self._shard[1] == self._shard[0] - 1


@dataclass
class _Opened:
    """A file of this machine as it was before it was read; `wanted` is what was asked of its records."""

    path: Path
    stat: list[int]
    looked: int
    wanted: str
    origins: list[int]


def _open(source: Source) -> _Opened | None:
    path = Path(source.file.path)
    if source.file.num_bytes is None or not path.is_file():
        return None
    looked = now_ns()
    file = source.file
    columns, schema, ignored = source.overrides
    asked = [schema, sorted(columns.items()), sorted(ignored)]
    wanted = json.dumps([file.kind, file.compression, *asked])
    return _Opened(path, describe(path), looked, wanted, [])
