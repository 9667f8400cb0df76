"""`analyze`: data of any kind -> an analysis folder, in bounded memory; the Python twin of the command.

Every record becomes one sequence, is counted as rejected with its reason, or is left out of a sample that was asked
for. The same records, tokenizer and options give the same content hash, whatever files they lie in, and whichever
processes or machines did the work.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.files.folder import fill_folder, refuse_other_content, reserve_folder, temporary_folder
from chunkplan.files.writing import writing
from chunkplan.intake import pieces
from chunkplan.intake.assemble import assemble
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.files import STDIN, is_url
from chunkplan.intake.process import IntakeSettings
from chunkplan.intake.run import IntakeRun, Runner
from chunkplan.intake.runners import Workers, run_here, run_in_processes, run_on_ray
from chunkplan.intake.source import Source
from chunkplan.intake.source_columns import suffixes_of, without_unused
from chunkplan.intake.sources import LINK, SourceFile, find_sources
from chunkplan.intake.store import LEAST, ROOM_HINT, Store, check_room
from chunkplan.intake.tokenizer import TokenizerEntry
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis

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


def analyze(
    paths: str | Path | Sequence[str | Path],
    output: str | Path,
    options: IntakeOptions | None = None,
    *,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    cache: str | Path | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Analysis:
    """Analyze data into the folder `output`, which is replaced as a whole at the end.

    Several processes are used where there is much to read.

    Args:
        paths: files, folders, patterns, URLs or "-", see `sources.find_sources`.
        output: the folder of the analysis.
        options: what is done with the records.
        tokenizer: a tokenizer.json, a folder with one, the name of a model on the Hugging Face Hub, or tiktoken:NAME.
            Without it the lengths of text are estimated and no tokens are stored.
        chat_template: a file with the template to use in place of the tokenizer's.
        workers: processes; one for every core by default.
        ray: the address of a Ray cluster ("local" starts one) that does the work in place of processes.
        cache: the folder of what was done before (see `store`); by default `cache` beside `output`.
        use_cache: False does everything anew.
        progress: called as records are read.

    Raises:
        UsageError: a path is not there, an option makes no sense, the disk has no room, or another run is writing
            `output`.
        DataError: a record is not what its source's schema says, or there is nothing to train on.
        ChunkplanError: a process was killed.
    """
    request = IntakeRequest(
        paths=paths,
        options=options or IntakeOptions(),
        tokenizer=tokenizer,
        chat_template=chat_template,
        cache=Path(cache or Path(output).parent / "cache"),
        use_cache=use_cache,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return write_analysis(request, Path(output))


def write_analysis(request: IntakeRequest, output: Path) -> Analysis:
    """Do what was asked for into the folder `output`, as `analyze` does, which documents it and what is raised."""
    refuse_other_content(output, "analysis")
    with read_all(request, output) as done:
        with fill_folder(output) as folder:
            tokenizer = done.tokenizer and _found_from(output, done.tokenizer)
            assemble(folder, done.sources, done.store.path, done.settings.options, tokenizer)
            analysis = load_analysis(folder)  # later, another run may have replaced it
        done.store.prune(piece.key for source in done.sources for piece in source.pieces)
    return replace(analysis, path=output)


def _found_from(output: Path, tokenizer: TokenizerEntry) -> TokenizerEntry:
    """The entry for a tokenizer whose path leads to it from an analysis in `output`, wherever one is then.

    A relative path does so from a folder above; where this folder is none of these, it is made absolute.
    """
    path = Path(tokenizer["path"])
    if not path.exists() or Path.cwd() in output.resolve().parents:
        return tokenizer
    return {**tokenizer, "path": str(path.absolute())}


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
    with ExitStack() as stack:
        runner = _runner(request, files, store, stack)
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
                    run.run(runner, report)
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


def _runner(request: IntakeRequest, files: Sequence[SourceFile], store: Store, stack: ExitStack) -> Runner:
    """What does the tasks: a cluster, or this process and others, which load the tokenizer while this one does."""
    if request.ray is not None:
        return partial(run_on_ray, address=request.ray, num_workers=request.workers)
    num_bytes = sum(ONE_PROCESS_BYTES if file.num_bytes is None else file.num_bytes for file in files)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # on macOS
    num_workers = request.workers or num_cores
    must_be_alone = multiprocessing.current_process().daemon  # such as a worker of a DataLoader
    if must_be_alone or num_bytes < ONE_PROCESS_BYTES or num_workers == 1:
        return run_here
    tokenizer, template = (None if path is None else str(path) for path in (request.tokenizer, request.chat_template))
    workers = stack.enter_context(Workers(num_workers, tokenizer, template, date.today().isoformat()))
    new = [file.num_bytes for file in files if file.num_bytes is None or store.recall(Path(file.path)) is None]
    if new:
        workers.start(min(num_workers, sum(-(-(size or ONE_PROCESS_BYTES) // pieces.PIECE_BYTES) for size in new)))
    return partial(run_in_processes, workers=workers)
