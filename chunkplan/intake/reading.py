"""What `analyze` and a shard of it do alike: find the sources, load the tokenizer, and have every piece processed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from chunkplan.errors import UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.disk import LEAST, check_room
from chunkplan.intake.options import IntakeOptions
from chunkplan.intake.process import Job
from chunkplan.intake.run import Run, Runner
from chunkplan.intake.run_local import run_here, run_in_processes
from chunkplan.intake.source import Source
from chunkplan.intake.sources import SourceFile, find_sources
from chunkplan.intake.store import Store
from chunkplan.planfile.folder import temporary_folder

#: Bytes of data that are read sooner than other processes would have started.
_LITTLE = 8 << 20

#: Called with the bytes done, the bytes of all sources (None where a stream does not say), and the tokens so far.
Progress = Callable[[int, int | None, int], None]


@dataclass(frozen=True)
class Request:
    """What to read and how; see `analyze` for what is what."""

    paths: str | Path | Sequence[str | Path]
    options: IntakeOptions
    tokenizer: str | Path | None
    chat_template: str | Path | None
    cache: Path
    use_cache: bool
    workers: int | None
    ray: str | None
    progress: Progress | None


@dataclass(frozen=True)
class Done:
    """What became of all sources, where their pieces are, and the entry of the manifest for the tokenizer."""

    sources: list[Source]
    store: Store
    job: Job
    tokenizer: dict[str, Any] | None


def read_all(request: Request, *, shard: tuple[int, int] | None = None) -> Done:
    """Process all pieces, or those of a shard (I, N); raises as `analyze` does."""
    if request.workers is not None and request.workers < 1:
        raise UsageError(f"{request.workers} processes", hint="give 1 or more --workers")
    paths = [request.paths] if isinstance(request.paths, (str, Path)) else request.paths
    files = find_sources(paths)
    job, tokenizer = _job(request)
    share = 1 if shard is None else 1 / shard[1]
    if request.options.stores_tokens and tokenizer:
        least = LEAST * share * sum(file.num_bytes or 0 for file in files if file.kind != "npy")
        check_room(request.cache, least, "storing the tokens")
    total = None if any(file.num_bytes is None for file in files) else sum(file.num_bytes or 0 for file in files)

    def report(num_bytes: int, num_tokens: int) -> None:
        if request.progress is not None:
            request.progress(num_bytes, total, num_tokens)

    store = Store(request.cache, is_trusted=request.use_cache)
    store.clean()
    with temporary_folder(request.cache, "spool") as spool:
        run = Run(files, job, store, spool, shard=shard)
        try:
            run.run(_runner(request, files), report)
        finally:
            store.clean()  # processes that were ended at once leave their pieces behind
    return Done(run.sources, store, job, tokenizer)


def _job(request: Request) -> tuple[Job, dict[str, Any] | None]:
    """What tasks need to know, and the tokenizer's entry in the manifest."""
    options, today = request.options, date.today().isoformat()
    if request.tokenizer is None:
        if request.chat_template is not None:
            raise UsageError("a chat template without a tokenizer", hint="give --tokenizer too")
        return Job(None, None, today, None, options, request.cache, request.use_cache), None
    encoder = load_tokenizer(request.tokenizer, request.chat_template, today=today)
    template = encoder.template
    described = {
        "path": str(request.tokenizer),
        "content_hash": encoder.content_hash,
        "vocab_size": encoder.vocab_size,
        "eos_token": encoder.eos and encoder.eos[0],
        "template_hash": template and template.content_hash,
    }
    chat_template = None if request.chat_template is None else str(request.chat_template)
    return (
        Job(str(request.tokenizer), chat_template, today, encoder.identity, options, request.cache, request.use_cache),
        described,
    )


def _runner(request: Request, files: Sequence[SourceFile]) -> Runner:
    if request.ray is not None:
        from chunkplan.intake.run_ray import run_on_ray

        return partial(run_on_ray, address=request.ray, num_workers=request.workers)
    workers = request.workers or len(os.sched_getaffinity(0))
    is_little = sum(_LITTLE if file.num_bytes is None else file.num_bytes for file in files) < _LITTLE
    return run_here if workers == 1 or is_little else partial(run_in_processes, num_workers=workers)
