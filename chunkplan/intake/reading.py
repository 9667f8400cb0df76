"""`analyze`: data of any kind -> an analysis folder, in bounded memory; the Python twin of the command.

Every record becomes one sequence, is counted as rejected with its reason, or is left out of a requested sample. The
same records, tokenizer and options give the same content hash, whatever files they are in, and whichever processes or
machines do the work, in any order: of several records that stop a run the first in the order of the input is reported.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.files.folder import fill_folder, refuse_other_content, reserve_folder, temporary_folder
from chunkplan.files.writing import writing
from chunkplan.intake import pieces
from chunkplan.intake.assemble import assemble
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.files import STDIN, is_url
from chunkplan.intake.probe import cut_with_layout, probe
from chunkplan.intake.process import IntakeSettings, find, piece_key
from chunkplan.intake.readers import is_stream
from chunkplan.intake.recipes import declared
from chunkplan.intake.records import RecordError, Rejected
from chunkplan.intake.runners import Outcomes, Report, Task, Workers, run_here, run_in_processes, run_on_ray
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.fields import LayoutError
from chunkplan.intake.source import Source, hint_for, unreadable_sources
from chunkplan.intake.source_columns import overrides_of_sources, suffixes_of, without_unused
from chunkplan.intake.sources import LINK, SourceFile, find_sources, named_again
from chunkplan.intake.store import LEAST, ROOM_HINT, FileState, KnownFile, Store, check_room
from chunkplan.intake.tokenizer import TokenizerEntry
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis

#: Fewer bytes of data are read by this process alone, sooner than others would have started.
ONE_PROCESS_BYTES = 8 << 20

#: Called with the bytes done, the bytes of all sources (None where a stream does not say), and the tokens so far.
Progress = Callable[[int, int | None, int], None]


#: Files, folders, patterns and URLs of data.
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class IntakeRequest:
    """The sources to read and the options to read them with; `analyze` documents the fields.

    Example: `chunkplan.IntakeRequest(paths="train.jsonl", cache=Path("cache"))`

    `beside` is called with the files in folders and patterns that are no data; `notes` with what a user should know:
    per-source options that match no source here, where that is no error, files named twice, and what recipes say.
    """

    paths: Paths | Mapping[str, Paths]
    cache: Path
    options: IntakeOptions = field(default_factory=IntakeOptions)
    tokenizer: str | Path | None = None
    chat_template: str | Path | None = None
    use_cache: bool = True
    workers: int | None = None
    ray: str | None = None
    progress: Progress | None = None
    beside: Callable[[list[str]], None] | None = None
    notes: Callable[[str], None] | None = None


@dataclass(frozen=True)
class IntakeResult:
    """All sources with the results of their pieces, the store of these, and the manifest's entry for the tokenizer."""

    sources: list[Source]
    store: Store
    settings: IntakeSettings
    tokenizer: TokenizerEntry | None


def analyze(
    paths: Paths | Mapping[str, Paths],
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

    Example: `chunkplan.analyze("train.jsonl", "analysis", tokenizer="path/to/model")`

    Several processes are used where there is much to read.

    Args:
        paths: files, folders, patterns, URLs or "-", see `sources.find_sources`; also by what they are for, as in
            {"train": "train.jsonl", "eval": ["dev.jsonl", "test.jsonl"]}.
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
    """Read the sources and write the analysis to the folder `output`; `analyze` documents the result and the errors."""
    refuse_other_content(output, "analysis")
    with read_all(request, output) as done:
        with fill_folder(output) as folder:
            tokenizer = done.tokenizer
            # Its path leads to it from a folder above the analysis; where this folder is none, it is made absolute.
            if tokenizer and Path(tokenizer["path"]).exists() and Path.cwd() not in output.resolve().parents:
                tokenizer = {**tokenizer, "path": str(Path(tokenizer["path"]).absolute())}
            assemble(folder, done.sources, done.store.path, done.settings.options, tokenizer)
            analysis = load_analysis(folder)  # later, another run may have replaced it
        done.store.prune(piece.key for source in done.sources for piece in source.pieces)
    return replace(analysis, path=output)


@contextmanager
def read_all(request: IntakeRequest, output: Path, *, shard: tuple[int, int] | None = None) -> Iterator[IntakeResult]:
    """Process all pieces, or those of a shard (I, N); they are in the store at least until the block ends.

    Until then no other run writes the folder `output`, which they are for. Raises as `analyze` does; an error of
    writing in the block becomes a UsageError too.
    """
    if request.workers is not None and request.workers < 1:
        raise UsageError(f"{request.workers} processes", hint="give 1 or more --workers")
    beside: list[str] = []
    train, evaluation = map(declared, _by_part(request.paths))
    request = replace(request, options=evaluation.options(train.options(request.options)))
    suffixes, split = suffixes_of(request.options.formats), request.options.text_split
    to_evaluate = [*evaluation.paths, *train.evaluation]
    files = find_sources(train.paths, beside, suffixes, evaluation=to_evaluate, text_split=split)
    if request.beside is not None:
        request.beside(beside)
    options, unused = without_unused(request.options, [file.path for file in files if file.kind != LINK])
    request = replace(request, options=options)
    found = [f"ignored, as there is no such source: {', '.join(unused)}"] if unused else []
    found += [f"read each time that it is given: {', '.join(again)}"] if (again := named_again(files)) else []
    if split and not any(file.text_split for file in files):
        raise UsageError("--text-split, and no source is a text (.txt)", hint="leave it out, or say --format FILE=txt")
    if request.notes is not None:
        for note in (*train.notes, *evaluation.notes, *found):
            request.notes(note)
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
            yield IntakeResult(run.sources, store, settings, tokenizer)


def _by_part(paths: Paths | Mapping[str, Paths]) -> list[Sequence[str | Path]]:
    """The paths to train on and those to evaluate on."""
    parts = paths if isinstance(paths, Mapping) else {"train": paths}
    if unknown := next((part for part in parts if part not in ("train", "eval")), None):
        raise UsageError(f"paths are given for {unknown!r}", hint="parts are train and eval")
    given = (parts.get(part, ()) for part in ("train", "eval"))
    return [[each] if isinstance(each, (str, Path)) else each for each in given]


def _check_can_be_dealt(files: Sequence[SourceFile]) -> None:
    """Refuse to make shards of what can be read only once: the other shards would not find it."""
    for file in files:
        if file.num_bytes is None and not is_url(file.path):
            name = "the standard input" if file.path == STDIN else file.path
            raise UsageError(
                f"{name} can be read once, so no shards can be made of it", hint="write it to a file first"
            )


def _settings_of(request: IntakeRequest) -> tuple[IntakeSettings, TokenizerEntry | None]:
    """Build the settings of all tasks, and the tokenizer's entry in the manifest."""
    tokenizer, template = (None if path is None else str(path) for path in (request.tokenizer, request.chat_template))
    options = request.options
    needs: dict[str, object] = {"a chat template": template, "--template-kwargs": options.chat_template_kwargs}
    needs["--text-end eos"] = options.text_end == "eos"
    if given := next((what for what, value in needs.items() if tokenizer is None and value), None):
        raise UsageError(f"{given} without a tokenizer", hint="give --tokenizer too")
    today = date.today().isoformat()
    encoder = load_tokenizer(tokenizer, template, today=today).as_asked(request.options) if tokenizer else None
    settings = IntakeSettings(
        tokenizer=tokenizer,
        chat_template=template,
        today=today,
        identity=encoder.identity if encoder else None,
        options=request.options,
        store=request.cache,
        use_cache=request.use_cache,
    )
    return settings, encoder.describe() if encoder else None


def _runner(request: IntakeRequest, files: Sequence[SourceFile], store: Store, stack: ExitStack) -> Runner:
    """Choose where tasks run: a Ray cluster, this process, or worker processes that load the tokenizer meanwhile."""
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


#: Does tasks and yields their results, in any order; after one that failed it begins no other.
Runner = Callable[[Iterator[Task], IntakeSettings, Report], Outcomes]

#: URLs that are looked at at once.
_LOOKS = 16


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
        self._failures: dict[tuple[int, int], ChunkplanError] = {}  # by source and piece, for the first to be reported
        self._num_dealt = 0  # pieces and streams that went to one shard or another
        self._done = [0, 0]  # bytes and tokens, also of what no task processes
        self._states: dict[int, FileState | None] = {}  # of files before they were read

    def run(self, runner: Runner, report: Report) -> None:
        """Process all pieces of all sources.

        Raises RecordError: a record, or a file, cannot be read and the run is not to go on without it; DataError:
        sources cannot be read at all, or one changed while it was read; UsageError: a source cannot be opened, records
        need a chat template, or the disk is full.
        """
        self._probe()

        def add(num_bytes: int, num_tokens: int) -> None:
            self._done[0] += num_bytes
            self._done[1] += num_tokens
            report(*self._done)

        for task, outcome in runner(self._tasks(), self._settings, add):
            if isinstance(outcome, ChunkplanError):
                self._failures[task.piece.source, task.piece.index] = outcome
                continue
            self.sources[task.piece.source].results[task.piece.index] = outcome
            self._close(task.piece.source)
        add(0, 0)  # with what was found at the end
        if self._failures:
            place = min(self._failures)
            raise self._placed(self._failures[place], *place)

    def _probe(self) -> None:
        """Look at all sources before any is read; those that cannot be read are left out, or end the run together.

        Cached results are used without a look at the source; if errors stop the run, only those without errors.
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
                state = self._states[index] = None if source.file.num_bytes is None else FileState.of(source.file.path)
                if self._recall(source, state):
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
                    self._failures[index, len(source.origins)] = error
                    return
                source.broken = error.of_row(-1)
                source.num_pieces = len(source.origins)
                self._pass(source, source.num_left)
            except ChunkplanError as error:
                self._failures[index, len(source.origins)] = error
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
        for piece in cut_with_layout(source, index, self._options, self._spool):
            share = min(piece.share, source.num_left)
            if is_stream(file) or self._takes_next():
                source.num_left -= share
                assert source.layout is not None
                yield Task(replace(piece, share=share), source.layout)
            else:
                self._pass(source, share)
        source.num_pieces = len(source.origins)
        self._pass(source, source.num_left)
        self._close(index)

    def _recall(self, source: Source, state: FileState | None) -> bool:
        """Take the results of a file from the cache; whether it is unchanged and they are all there."""
        known = self._store.recall(state.path) if state and self._shard is None else None
        if known is None or source.request not in known["layouts"]:
            return False
        layout = RecordLayout(**known["layouts"][source.request])
        keys = [piece_key(self._settings, layout, *piece) for piece in known["pieces"]]
        found = [result for key in keys if (result := find(self._settings, self._store, key)) is not None]
        if len(found) < len(keys):
            return False
        source.layout, source.results, source.num_pieces = layout, dict(enumerate(found)), len(found)
        self._pass(source, source.num_left)
        self._done[1] += sum(result.num_tokens for result in found)
        return True

    def _close(self, index: int) -> None:
        """Note in the cache that a file is processed, once all of its pieces are."""
        source, state = self.sources[index], self._states.get(index)
        if state is None or self._shard is not None or source.broken or not source.is_complete:
            return
        if not state.is_unchanged:
            self._failures[index, 0] = DataError(
                "changed while it was read", where=source.name, hint="run the command again when it is finished"
            )
            return
        assert source.layout is not None
        before = self._store.recall(state.path)
        layouts = (before["layouts"] if before else {}) | {source.request: asdict(source.layout)}
        pieces = [(one.digest, one.reader, origin) for one, origin in zip(source.pieces, source.origins, strict=True)]
        self._store.remember(state, KnownFile(layouts=layouts, pieces=pieces))

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
            self._done[0] += num_bytes

    def _takes_next(self) -> bool:
        """True if this shard takes the next piece or stream: they go to the shards in turn."""
        self._num_dealt += 1
        return self._shard is None or (self._num_dealt - 1) % self._shard[1] == self._shard[0] - 1
