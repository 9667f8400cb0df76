"""What `analyze` and a shard have in common: find the sources, load the tokenizer, have every piece processed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.files.folder import reserve_folder, temporary_folder
from chunkplan.files.writing import writing
from chunkplan.intake import pieces
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.disk import LEAST, ROOM_HINT, check_room
from chunkplan.intake.files import STDIN, is_url
from chunkplan.intake.process import IntakeSettings
from chunkplan.intake.run import IntakeRun, Runner
from chunkplan.intake.run_local import Prepare, Workers, run_here, run_in_processes
from chunkplan.intake.source import Source
from chunkplan.intake.source_columns import suffixes_of, without_unused
from chunkplan.intake.sources import LINK, SourceFile, find_sources
from chunkplan.intake.store import Store
from chunkplan.intake.tokenizer import TokenizerEntry

#: Fewer bytes of data are read by this process alone, sooner than others would have started.
ONE_PROCESS_BYTES = 8 << 20

#: Called with the bytes done, the bytes of all sources (None where a stream does not say), and the tokens so far.
Progress = Callable[[int, int | None, int], None]


@dataclass(frozen=True, kw_only=True)
class IntakeRequest:
    """What to read and how; `analyze` documents the fields.

    `beside` is called with the files that folders and patterns have beside data, and that are none; `unused` with the
    places of what is said of sources by their names, need not be used, and is of no source here.
    """

    paths: str | Path | Sequence[str | Path]
    cache: Path
    options: IntakeOptions = field(default_factory=IntakeOptions)
    tokenizer: str | Path | None = None
    chat_template: str | Path | None = None
    use_cache: bool = True
    workers: int | None = None
    ray: str | None = None
    progress: Progress | None = None
    beside: Callable[[list[str]], None] | None = None
    unused: Callable[[list[str]], None] | None = None


@dataclass(frozen=True)
class Done:
    """All sources with the results of their pieces, where these are, and the manifest's entry for the tokenizer."""

    sources: list[Source]
    store: Store
    settings: IntakeSettings
    tokenizer: TokenizerEntry | None


@contextmanager
def read_all(request: IntakeRequest, output: Path, *, shard: tuple[int, int] | None = None) -> Iterator[Done]:
    """Process all pieces, or those of a shard (I, N); they are in the store at least until the block ends.

    Until then no other run writes the folder `output`, which they are for. Raises as `analyze` does; an error of
    writing in the block becomes a UsageError too.
    """
    if request.workers is not None and request.workers < 1:
        raise UsageError(f"{request.workers} processes", hint="give 1 or more --workers")
    paths = [request.paths] if isinstance(request.paths, (str, Path)) else request.paths
    beside: list[str] = []
    files = find_sources(paths, beside, suffixes_of(request.options.formats))
    if request.beside is not None:
        request.beside(beside)
    options, unused = without_unused(request.options, [file.path for file in files if file.kind != LINK])
    request = replace(request, options=options)
    if request.unused is not None and unused:
        request.unused(unused)
    if shard is not None:
        _check_can_be_dealt(files)
    store = Store(request.cache, is_trusted=request.use_cache)
    with Workers(_num_workers(request, files)) as workers:
        _begin(workers, request, files, store)
        settings, tokenizer = _settings_of(request)
        share = 1 if shard is None else 1 / shard[1]
        if request.options.stores_tokens and tokenizer:
            least = LEAST * share * sum(file.num_bytes or 0 for file in files if file.kind != "npy")
            check_room(request.cache, least, "storing the tokens")
        total = None if any(file.num_bytes is None for file in files) else sum(file.num_bytes or 0 for file in files)

        def report(num_bytes: int, num_tokens: int) -> None:
            if request.progress is not None:
                request.progress(num_bytes, total, num_tokens)

        kind = "analysis" if shard is None else "shard"
        with reserve_folder(output, kind), writing(request.cache, room_hint=ROOM_HINT), store.in_use():
            with temporary_folder(request.cache, "spool") as spool:
                run = IntakeRun(files, settings, store, spool, shard=shard)
                try:
                    run.run(_runner(request, workers), report)
                finally:
                    store.clean()  # processes that were ended at once leave their pieces behind
            yield Done(run.sources, store, settings, tokenizer)


def _check_can_be_dealt(files: Sequence[SourceFile]) -> None:
    """Refuse to make shards of what can be read only once: the other shards would not find it."""
    for file in files:
        if file.num_bytes is None and not is_url(file.path):
            name = "the standard input" if file.path == STDIN else file.path
            raise UsageError(
                f"{name} can be read once, so no shards can be made of it", hint="write it to a file first"
            )


def _settings_of(request: IntakeRequest) -> tuple[IntakeSettings, TokenizerEntry | None]:
    """What all tasks share, and the entry of the manifest for the tokenizer."""
    settings = IntakeSettings(
        tokenizer=None,
        chat_template=None if request.chat_template is None else str(request.chat_template),
        today=date.today().isoformat(),
        identity=None,
        options=request.options,
        store=request.cache,
        use_cache=request.use_cache,
    )
    if request.tokenizer is None:
        if request.chat_template is not None:
            raise UsageError("a chat template without a tokenizer", hint="give --tokenizer too")
        return settings, None
    encoder = load_tokenizer(request.tokenizer, request.chat_template, today=settings.today)
    settings = replace(settings, tokenizer=str(request.tokenizer), identity=encoder.identity)
    return settings, encoder.describe()


def _num_workers(request: IntakeRequest, files: Sequence[SourceFile]) -> int:
    """How many processes read on this machine; 1 is this one."""
    num_bytes = sum(ONE_PROCESS_BYTES if file.num_bytes is None else file.num_bytes for file in files)
    must_be_alone = multiprocessing.current_process().daemon  # such as a worker of a DataLoader
    if must_be_alone or num_bytes < ONE_PROCESS_BYTES or request.ray is not None:
        return 1
    if request.workers:
        return request.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def _begin(workers: Workers, request: IntakeRequest, files: Sequence[SourceFile], store: Store) -> None:
    """Have the processes that will be needed load the tokenizer while this one does."""
    new = [file.num_bytes for file in files if file.num_bytes is None or store.recall(Path(file.path)) is None]
    if workers.num_workers == 1 or not new:
        return
    num_pieces = sum(-(-(size or ONE_PROCESS_BYTES) // pieces.PIECE_BYTES) for size in new)
    tokenizer, template = (None if path is None else str(path) for path in (request.tokenizer, request.chat_template))
    workers.begin(min(workers.num_workers, num_pieces), Prepare(tokenizer, template, date.today().isoformat()))


def _runner(request: IntakeRequest, workers: Workers) -> Runner:
    if request.ray is not None:
        from chunkplan.intake.run_ray import run_on_ray

        return partial(run_on_ray, address=request.ray, num_workers=request.workers)
    return run_here if workers.num_workers == 1 else partial(run_in_processes, workers=workers)
