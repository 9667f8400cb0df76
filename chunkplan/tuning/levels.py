"""What is tried of each way to run a plan: levels of activation checkpointing, from the fastest to what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.tuning.options import LADDER, GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.trial import Outcome


class Way(NamedTuple):
    """What is tried with all Ks: a schedule, who may share sequences, the layers of stages, and a ChunkSize."""

    schedule: str
    cp: str | int
    stage_layers: tuple[int, ...] | None
    chunk_size: int

    def config(self, options: TuneOptions, layout: GpuLayout, k: int) -> PlanConfig:
        """Return the configuration of a plan."""
        config = options.plan_config(layout, self.chunk_size, k, self.schedule, self.cp)
        return replace(config, stage_layers=self.stage_layers)


#: Ks of ways that are to be tried; what came of those that were; the rungs that a way may take, with that.
Wanted = dict[Way, list[int]]
Tried = dict[Way, list[Outcome]]
Ladder = list[tuple[MemorySaving, list[Outcome]]]


def _rungs_of(level: int, way: Way, options: TuneOptions, layout: GpuLayout) -> list[MemorySaving]:
    """The rungs of a level of activation checkpointing, by its place, that a way may take."""
    return _usable(LADDER[2 * level : 2 * level + 2], way.chunk_size, options, layout)


def rungs(of_levels: list[Tried], options: TuneOptions, layout: GpuLayout) -> dict[Way, Ladder]:
    """Return the rungs that each way may take, with what was tried on each, from the fastest on.

    `of_levels`: what was tried, by the place of the last of so many levels of activation checkpointing.
    """
    first = len(CHECKPOINTINGS) - len(of_levels)
    return {
        way: [
            (memory, tried[way])
            for level, tried in enumerate(of_levels, first)
            if way in tried
            for memory in _rungs_of(level, way, options, layout)
        ]
        for way in dict.fromkeys(way for tried in of_levels for way in tried)
    }


def _first_level(outcome: Outcome, way: Way, sharding: Sharding, options: TuneOptions, layout: GpuLayout) -> int:
    """The place of the first level of activation checkpointing that fits what was tried without it, or one more than
    there are."""
    return next(
        (
            level
            for level in range(len(CHECKPOINTINGS))
            for memory in _rungs_of(level, way, options, layout)
            if fits(outcome, options.cost(layout, memory, sharding), options)
        ),
        len(CHECKPOINTINGS),
    )


def first_levels(plain: Tried, sharding: Sharding, options: TuneOptions, layout: GpuLayout) -> list[Wanted]:
    """Return the Ks of each way that are worth trying at each level: those that fit no earlier one.

    Where none fits without checkpointing, all are tried at the first level that any fits, as an integer program may mix
    them; where none fits at all, at the last one.
    """
    last = len(CHECKPOINTINGS) - 1
    wanted: list[Wanted] = [{} for _ in CHECKPOINTINGS]
    for way, outcomes in plain.items():
        levels = [_first_level(each, way, sharding, options, layout) for each in outcomes]
        least = min(min(levels), last)
        for level in range(1, last + 1):
            ks = [
                each.config.k
                for each, own in zip(outcomes, levels, strict=True)
                if own == level or (level == least and own > 0)
            ]
            if ks:
                wanted[level][way] = ks
    return wanted


def climb(
    tries: Callable[[MemorySaving, Wanted, Sharding], Tried],
    wanted: list[Wanted],
    sharding: Sharding,
    options: TuneOptions,
    layout: GpuLayout,
) -> list[Tried]:
    """Try what is wanted of the last so many levels, and at the next one what then does not fit."""
    first = len(CHECKPOINTINGS) - len(wanted)
    found = []
    for level, of_level in enumerate(wanted, first):
        found.append(tries(LADDER[2 * level], of_level, sharding))
        if level + 1 == len(CHECKPOINTINGS):
            break
        following = wanted[level + 1 - first]
        for way, outcomes in found[-1].items():
            costs = [options.cost(layout, memory, sharding) for memory in _rungs_of(level, way, options, layout)]
            tight = [each.config.k for each in outcomes if not any(fits(each, cost, options) for cost in costs)]
            if tight and len(tight) == len(outcomes):
                following[way] = sorted({*tight, *following.get(way, [])})
    return found


def worth_sharding(sharding: Sharding, plain: Tried, options: TuneOptions, layout: GpuLayout) -> list[Wanted]:
    """Return the Ks of each way that fit an earlier level if ranks share that than while they share less.

    What a stage holds of chunks is taken from the trials with least sharding.
    """
    shardings = options.shardings_of(layout)
    less = shardings[: shardings.index(sharding)]
    wanted: list[Wanted] = [{} for _ in CHECKPOINTINGS]
    for way, outcomes in plain.items():
        for outcome in outcomes:
            level = _first_level(outcome, way, sharding, options, layout)
            if level < min(_first_level(outcome, way, one, options, layout) for one in less):
                wanted[level].setdefault(way, []).append(outcome.config.k)
    return wanted


def _usable(
    rungs: Sequence[MemorySaving], chunk_size: int, options: TuneOptions, layout: GpuLayout
) -> list[MemorySaving]:
    """Leave out rungs whose transfers to and from host memory would take longer than what hides them."""
    least = options.cost(layout, LADDER[0]).offload_chunk_size
    return [rung for rung in rungs if not rung.kv_offload or chunk_size >= least]


def fits(outcome: Outcome, cost: CostModel, options: TuneOptions) -> bool:
    """Whether what was tried fits the memory of a GPU if it is run as `cost` says."""
    return outcome.memory(cost).total <= options.gpu_memory
