"""How few GPUs a model and the data fit on, of 1, 2, 4 and so on: by a small ChunkSize and all that saves memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chunkplan.errors import UsageError
from chunkplan.tuning.grid import Progress, try_grid
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.sampling import Sample

#: The smallest ChunkSize that is asked; smaller ones spare next to no memory.
_CHUNK_SIZE = 2048

#: How many are looked at.
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def fewest_gpus(sample: Sample, options: TuneOptions, progress: Progress, *, above: int = 0) -> int | None:
    """The fewest GPUs above `above` on which some layout of `options` fits and can be run; None where none is found.

    `sample` has the longest sequences, by which memory goes.
    """
    return next((count for count in COUNTS if count > above and _fits(sample, options, count, progress)), None)


def _fits(sample: Sample, options: TuneOptions, gpus: int, progress: Progress) -> bool:
    def report(doing: str, done: int, total: int) -> None:
        progress(f"fewest GPUs, {gpus}", done, total)

    for asked in _layouts(options, gpus):
        [layout] = asked.layouts()
        for choice in try_grid(sample, asked, layout, asked.chunk_sizes, (1,), report):
            if choice.fits and choice.plan_only is None:
                return True
    return False


def _layouts(options: TuneOptions, gpus: int) -> Iterator[TuneOptions]:
    """The options of two layouts of `gpus` that take little memory: without a pipeline, and with the longest one."""
    chunk_size = max(_CHUNK_SIZE, options.chunk_sizes[0])
    try:
        layouts = replace(options, gpus=gpus, dp=1, pp=1, schedules=None, cp="auto").layouts()
    except UsageError:  # not with so many layers, or sequences a step
        return
    for dp, tp, pp in dict.fromkeys((layouts[0], layouts[-1])):
        schedules = None if pp == 1 else ("auto",)
        shared = "weights" if options.sharding == "auto" and dp > 1 else options.sharding
        yield replace(
            options,
            gpus=None,
            dp=dp,
            tp=tp,
            pp=pp,
            cp="auto",
            schedules=schedules,
            sharding=shared,
            chunk_sizes=(chunk_size,),
        )
