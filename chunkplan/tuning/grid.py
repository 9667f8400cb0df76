"""All configurations of a layout that are worth it, tried on a sample, and what is made of the best of them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from chunkplan.building import result_of
from chunkplan.config.plan import VIRTUAL, PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.durations import balance_layers
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.layers import split_layers
from chunkplan.quantities import short_repr
from chunkplan.tuning.bound import fewest_bytes
from chunkplan.tuning.mixing import fitted, mixed
from chunkplan.tuning.options import LADDER, GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.program import Candidate, choose
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.search import CLOSE, Search
from chunkplan.tuning.trial import Outcome, why_plan_only

#: Winners of the integer program that are simulated; and choices that are tried with parts of equal time.
_WINNERS = 4

#: Points that are tried before the best of them rules others out.
_BATCH = 4

_LAST_LEVEL = len(CHECKPOINTINGS) - 1

#: Called with (what is done, parts done, parts to do), as each was.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choice:
    """A configuration with its predicted time and memory; see `Outcome`.

    `memory` is that of the fullest stage in any step, `host_bytes` the host memory of a GPU. `mfu`: model FLOPs without
    recompute, over the peak of all GPUs. `plan_only`: why the runtime cannot run it, or None.
    """

    config: PlanConfig
    cost: CostModel
    step_ns: float
    extra_ns: float
    tokens_per_second: float
    mfu: float
    bubble: float
    recompute_share: float
    memory: StageMemory
    host_bytes: int
    fits: bool
    plan_only: str | None

    __repr__ = short_repr

    @property
    def layout(self) -> GpuLayout:
        """The layout that the configuration and the cost model have."""
        return GpuLayout(self.config.dp, self.cost.tp, self.config.pp)


def choice_of(outcome: Outcome, search: Search, *, kv_offload: bool | None = None) -> Choice:
    """Turn an outcome into a choice, with another `kv_offload` where that is not None."""
    options, sample = search.options, search.sample
    cost = outcome.cost if kv_offload is None else replace(outcome.cost, kv_offload=kv_offload)
    needed = outcome.memory(cost)
    if needed.total <= options.gpu_memory and not _takes_as_long(outcome, cost):
        outcome = search.try_out(outcome.config, cost)
        needed = outcome.memory(cost)
    seconds = outcome.step_ns / 1e9
    gpus = outcome.config.dp * cost.tp * outcome.config.pp
    flops = cost.model_flops(sample.tokens_per_step, sample.attention_pairs_per_step(cost))
    return Choice(
        config=outcome.config,
        cost=cost,
        step_ns=outcome.step_ns,
        extra_ns=outcome.extra_ns,
        tokens_per_second=sample.tokens_per_step / seconds,
        mfu=flops / (seconds * gpus * cost.hardware.peak_flops),
        bubble=outcome.bubble,
        recompute_share=outcome.recompute_share,
        memory=needed,
        host_bytes=outcome.host_bytes(cost),
        fits=needed.total <= options.gpu_memory,
        plan_only=why_plan_only(outcome.config, cost),
    )


def _takes_as_long(outcome: Outcome, cost: CostModel) -> bool:
    """True if the outcome takes as long with `cost`, which may also offload keys and values.

    These share the link to the host with inputs of layers, and with attention.
    """
    shares_link = "offload" in cost.levels or not cost.rates.hides_attention
    return not shares_link or cost.rates == outcome.cost.rates


def evaluate(config: PlanConfig, cost: CostModel, search: Search) -> Choice:
    """Try one configuration: what all choices but those of the grid come from."""
    return choice_of(search.try_out(config, cost), search)


class GridPoint(NamedTuple):
    """A point of the grid, tried with all Ks: schedule, cp, layers of stages, and ChunkSize."""

    schedule: str
    cp: str | int
    stage_layers: tuple[int, ...] | None
    chunk_size: int


#: Ks to try at each point; outcomes of each point; the rungs that a point may take, with their outcomes.
KsByPoint = dict[GridPoint, list[int]]
Trials = dict[GridPoint, list[Outcome]]
MemoryLadder = list[tuple[MemorySaving, list[Outcome]]]


def try_grid(
    search: Search, layout: GpuLayout, chunk_sizes: Sequence[int], ks: Sequence[int], progress: Progress
) -> list[Choice]:
    """Try one choice for each ChunkSize, K, schedule and `cp`; winners of the integer program, which mix Ks; where
    memory is short, levels of activation checkpointing layer by layer; and the fastest of all with other shardings and,
    on a pipeline, with sequences cut into parts of equal time.

    A choice uses the first rung of the ladder that fits, or the last if none does. Trials without checkpointing predict
    that rung; if it does not fit, those after it are tried. A sharding that saves recomputation, or makes a point fit,
    makes a choice of its own. Only what is hopeful in `search` is tried, best bounds first.
    """
    sample, options = search.sample, search.options
    cancelled = threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool, _cancelling(pool, cancelled):
        grid = _Grid(search, layout, progress, pool, cancelled)
        trials = grid.try_all(chunk_sizes, ks)
    choices: list[Choice] = []
    for of_levels in trials:
        ladders = grid.ladders(of_levels)
        for ladder in ladders:
            for k in dict.fromkeys(outcome.config.k for _, outcomes in ladder for outcome in outcomes):
                made = [
                    choice_of(outcome, search, kv_offload=saving.kv_offload)
                    for saving, outcomes in ladder
                    for outcome in outcomes
                    if outcome.config.k == k
                ]
                choices.append(next((choice for choice in made if choice.fits), made[-1]))
        choices += _mixed_ks(search, ladders)
    outcomes = [each for of_levels in trials for level in of_levels for of_point in level.values() for each in of_point]
    fastest = [choice.step_ns for choice in choices if choice.fits]
    fastest += [search.least_ns] if outcomes and not options.thorough else []
    found = mixed(sample, options, outcomes, min(fastest, default=math.inf))
    choices += [choice_of(outcome, search) for outcome in found]
    choices += _other_shardings(search, choices)
    choices += _cut_by_cost(search, choices)
    for choice in choices:
        if choice.fits:
            search.note(choice.config, choice.cost, choice.step_ns)
    return choices


@contextmanager
def _cancelling(pool: ThreadPoolExecutor, cancelled: threading.Event) -> Iterator[None]:
    """Cancel the pending work of `pool` if the block raises, as by an interrupt."""
    try:
        yield
    except BaseException:
        cancelled.set()
        pool.shutdown(cancel_futures=True)
        raise


@dataclass(frozen=True)
class _Grid:
    """The points of a layout, each tried with the levels of activation checkpointing that it needs to fit."""

    search: Search
    layout: GpuLayout
    progress: Progress
    pool: ThreadPoolExecutor
    cancelled: threading.Event
    costs: dict[tuple[MemorySaving, Sharding], CostModel] = field(default_factory=dict)

    @property
    def options(self) -> TuneOptions:
        """The options that are tuned for."""
        return self.search.options

    def try_all(self, chunk_sizes: Sequence[int], ks: Sequence[int]) -> list[list[Trials]]:
        """Return the outcomes by sharding, and by the index of the level of the last layers."""
        pending = {point: self._sensible_ks(ks, point) for point in self._points(chunk_sizes)}
        first, *others = self.options.shardings_of(self.layout)
        trials: list[list[Trials]] = [[{} for _ in CHECKPOINTINGS] for _ in (first, *others)]
        for batch in self._batches(pending):
            plain = self._try(0, batch, first)
            found = [[plain, *self._climb(self._first_levels(plain, first), first)]]
            found += [self._climb(self._worth_sharding(sharding, plain), sharding) for sharding in others]
            for of_sharding, new in zip(trials, found, strict=True):
                for of_level, outcomes in zip(of_sharding, new, strict=True):
                    of_level |= outcomes
        return trials

    def _batches(self, pending: KsByPoint) -> Iterator[KsByPoint]:
        """Yield the points of the grid in batches, best bounds first, without those that became hopeless.

        If nothing is expected to fit and nothing did, they are those that take least memory.
        """
        search, total = self.search, len(pending)
        if self.options.thorough:
            yield pending
            return
        shardings = self.options.shardings_of(self.layout)
        levels = range(len(CHECKPOINTINGS))
        bounds = {
            (point, k): min(
                search.bound_ns(self._config(point, k), self._costs(point, sharding, *levels)) for sharding in shardings
            )
            for point, ks in pending.items()
            for k in ks
        }
        some = self._config(*next(iter(bounds))), self.options.cost(self.layout, LADDER[0])
        if min(bounds.values()) == math.inf == search.best_ns(*some):
            yield {point: pending[point][:1] for point in [min(pending, key=self._fewest_bytes)]}
            return
        order = sorted(pending, key=lambda point: min(bounds[point, k] for k in pending[point]))
        for start in range(0, total, _BATCH):
            most = CLOSE * search.best_ns(*some)
            hopeful = {
                point: [k for k in pending[point] if bounds[point, k] <= most and bounds[point, k] < math.inf]
                for point in order[start : start + _BATCH]
            }
            yield {point: ks for point, ks in hopeful.items() if ks}
            self.progress("layouts", min(start + _BATCH, total), total)

    def _fewest_bytes(self, point: GridPoint) -> int:
        """The least memory of a point with the smallest K and all that saves memory."""
        sharding, config = self.options.shardings_of(self.layout)[-1], self._config(point, min(self.options.ks))
        return min(
            fewest_bytes(self.search.longest, config, cost) for cost in self._costs(point, sharding, _LAST_LEVEL)
        )

    def _config(self, point: GridPoint, k: int) -> PlanConfig:
        """The configuration of a point and a K."""
        config = self.options.plan_config(self.layout, point.chunk_size, k, point.schedule, point.cp)
        return replace(config, stage_layers=point.stage_layers)

    def _costs(self, point: GridPoint, sharding: Sharding, *levels: int) -> list[CostModel]:
        """The cost models of the rungs of `levels` that a point may take, from the fastest on."""
        rungs = (saving for level in levels for saving in self._rungs(level, point))
        return [self._cost(saving, sharding) for saving in rungs]

    def _cost(self, saving: MemorySaving, sharding: Sharding) -> CostModel:
        """The cost model of a rung, made once, as its rates take long to find."""
        if (saving, sharding) not in self.costs:
            self.costs[saving, sharding] = self.options.cost(self.layout, saving, sharding)
        return self.costs[saving, sharding]

    def ladders(self, of_levels: list[Trials]) -> list[MemoryLadder]:
        """The rungs that each point may take, with the outcomes on each, from the fastest on."""
        first = len(CHECKPOINTINGS) - len(of_levels)
        return [
            [
                (saving, trials[point])
                for level, trials in enumerate(of_levels, first)
                if point in trials
                for saving in self._rungs(level, point)
            ]
            for point in dict.fromkeys(point for trials in of_levels for point in trials)
        ]

    def _points(self, chunk_sizes: Sequence[int]) -> list[GridPoint]:
        """All points of the grid; layers of equal time only where they differ from an even split.

        ChunkSizes above the first one that holds a rank's share of the largest step, and any sequence, are left out.
        """
        sample, options, layout = self.search.sample, self.options, self.layout
        cost = options.cost(layout, LADDER[0], options.shardings_of(layout)[0])
        pairs_per_token = sample.attention_pairs_per_step(cost) / sample.tokens_per_step
        layers = balance_layers(cost, layout.pp, pairs_per_token)
        splits = [None] if layers == split_layers(options.shape.num_layers, layout.pp) else [None, layers]
        of_steps = np.add.reduceat(sample.num_tokens.astype(np.int64), sample.first_of_step[:-1])
        most = max(int(sample.num_tokens.max()), -(-int(of_steps.max()) // layout.dp))
        return [
            GridPoint(schedule, cp, stage_layers, chunk_size)
            for (schedule, cp), stage_layers, chunk_size in product(
                options.ways_of(layout), splits, _up_to_enough(chunk_sizes, most)
            )
            if schedule not in VIRTUAL or stage_layers is None
        ]

    def _sensible_ks(self, ks: Sequence[int], point: GridPoint) -> list[int]:
        """Leave out Ks larger than the first one that keeps all chunks of the longest sequence."""
        return _up_to_enough(ks, -(-int(self.search.sample.num_tokens.max()) // point.chunk_size))

    def _try(self, level: int, pending: KsByPoint, sharding: Sharding) -> Trials:
        """Try the pending Ks of each point with the level of this index; keys and values are on the GPU."""
        search, cost = self.search, self._cost(LADDER[2 * level], sharding)
        started: dict[GridPoint, list[Future[Outcome]]] = {}
        for point, ks in pending.items():
            # Trials without any level and sharding tell what stages hold, whatever fits.
            is_first = level == 0 and sharding == self.options.shardings_of(self.layout)[0]
            rungs, configs = self._costs(point, sharding, level), [self._config(point, k) for k in ks]
            configs = [config for config in configs if is_first or search.is_hopeful(config, *rungs)]
            futures = [self.pool.submit(search.try_out, config, cost, self.cancelled.is_set) for config in configs]
            started |= {point: futures} if futures else {}
        outcomes: Trials = {}
        for point, futures in started.items():
            outcomes[point] = [result_of(future) for future in futures]
            if self.options.thorough:
                self.progress("layouts", len(outcomes), len(started))
            for outcome in outcomes[point]:
                alike = [each for each in self._costs(point, sharding, level) if _takes_as_long(outcome, each)]
                if any(outcome.fits(each, self.options.gpu_memory) for each in alike):
                    search.note(outcome.config, cost, outcome.step_ns)
        return outcomes

    def _rungs(self, level: int, point: GridPoint) -> list[MemorySaving]:
        """The rungs of the level of this index, without those whose transfers take longer than what hides them."""
        rungs = LADDER[2 * level : 2 * level + 2]
        least = self._cost(LADDER[0], "optimizer").offload_chunk_size
        return [rung for rung in rungs if not rung.kv_offload or point.chunk_size >= least]

    def _fits(self, outcome: Outcome, level: int, point: GridPoint, sharding: Sharding) -> bool:
        """True if an outcome fits with a level."""
        return any(outcome.fits(cost, self.options.gpu_memory) for cost in self._costs(point, sharding, level))

    def _first_level(self, outcome: Outcome, point: GridPoint, sharding: Sharding) -> int:
        """Index of the first level that fits an outcome without levels, or the number of levels if none does."""
        fitting = (level for level in range(len(CHECKPOINTINGS)) if self._fits(outcome, level, point, sharding))
        return next(fitting, len(CHECKPOINTINGS))

    def _first_levels(self, plain: Trials, sharding: Sharding) -> list[KsByPoint]:
        """The Ks of each point that are worth trying at each level but "none": those that fit no earlier one.

        If no K fits without checkpointing, all are tried at the first level that any fits, as an integer program may
        mix them; if none fits at all, at the last one.
        """
        pending: list[KsByPoint] = [{} for _ in CHECKPOINTINGS]
        for point, outcomes in plain.items():
            levels = [self._first_level(each, point, sharding) for each in outcomes]
            least = min(*levels, _LAST_LEVEL)
            for level in range(1, len(CHECKPOINTINGS)):
                ks = [
                    each.config.k
                    for each, own in zip(outcomes, levels, strict=True)
                    if own == level or (level == least and own > 0)
                ]
                pending[level] |= {point: ks} if ks else {}
        return pending[1:]

    def _worth_sharding(self, sharding: Sharding, plain: Trials) -> list[KsByPoint]:
        """The Ks of each point that fit an earlier level with this sharding than with less.

        The chunks that a stage holds are taken from the trials with the least sharding.
        """
        shardings = self.options.shardings_of(self.layout)
        less = shardings[: shardings.index(sharding)]
        pending: list[KsByPoint] = [{} for _ in CHECKPOINTINGS]
        for point, outcomes in plain.items():
            for outcome in outcomes:
                level = self._first_level(outcome, point, sharding)
                if level < min(self._first_level(outcome, point, one) for one in less):
                    pending[level].setdefault(point, []).append(outcome.config.k)
        return pending

    def _climb(self, pending: list[KsByPoint], sharding: Sharding) -> list[Trials]:
        """Try the pending Ks at the last `len(pending)` levels; those that do not fit are tried at the next level."""
        found = []
        for level, of_level in enumerate(pending, len(CHECKPOINTINGS) - len(pending)):
            found.append(self._try(level, of_level, sharding))
            if level == _LAST_LEVEL:
                break
            following = pending[len(found)]
            for point, outcomes in found[-1].items():
                if not any(self._fits(each, level, point, sharding) for each in outcomes):
                    following[point] = sorted({*(each.config.k for each in outcomes), *following.get(point, [])})
        return found


def _up_to_enough(sizes: Sequence[int], enough: int) -> list[int]:
    """The `sizes` up to the first one that is at least `enough`, or all."""
    largest = min((size for size in sizes if size >= enough), default=max(sizes))
    return [size for size in sizes if size <= largest]


def mixed_again(choice: Choice, on_heaviest: Outcome, heaviest: Sample, search: Search) -> Choice | None:
    """Replace levels layer by layer that do not fit the `heaviest` steps by levels that do; None if none do."""
    moments = on_heaviest.peaks[int(choice.cost.kv_offload)]
    found = fitted((search.sample, heaviest), choice.config, choice.cost, moments, search.options.gpu_memory)
    if found is None:
        return None
    memory = max((each.memory(each.cost) for each in found), key=lambda each: each.total)
    host_bytes = max(each.host_bytes(each.cost) for each in found)
    return replace(choice_of(found[0], search), memory=memory, host_bytes=host_bytes)


def _mixed_ks(search: Search, ladders: list[MemoryLadder]) -> list[Choice]:
    """Simulate the winners of the integer program, except those with one K for all lengths, which have been tried."""
    sample, options = search.sample, search.options
    rungs = [(family, *rung) for family, ladder in enumerate(ladders) for rung in ladder]
    candidates = [_candidate(*rung, sample) for rung in rungs]
    choices: list[Choice] = []
    if all(len(outcomes) == 1 for _, _, outcomes in rungs):
        return choices
    for index, places in choose(candidates, options.gpu_memory, _WINNERS):
        _, saving, outcomes = rungs[index]
        ks = [outcomes[place].config.k for place in places]
        if len(set(ks)) < 2:
            continue
        by_length = tuple(
            (length_class.over, k)
            for before, k, length_class in zip(ks, ks[1:], sample.classes[1:], strict=False)
            if k != before
        )
        config = replace(outcomes[0].config, k=ks[0], k_by_length=by_length)
        outcome = search.try_out(config, outcomes[0].cost)
        choices.append(choice_of(outcome, search, kv_offload=saving.kv_offload))
    return choices


def _candidate(family: int, saving: MemorySaving, outcomes: list[Outcome], sample: Sample) -> Candidate:
    """Make the integer program's candidate for a ChunkSize, from trials with one K for all lengths.

    Recomputation costs a length class its share of the difference in step time between the smallest and largest K.
    """
    cost = replace(outcomes[0].cost, kv_offload=saving.kv_offload)
    most, least = outcomes[-1], outcomes[0]
    more_work = sum(least.recompute_ns) - sum(most.recompute_ns)
    rate = max(0.0, least.step_ns - most.step_ns) / more_work if more_work > 0 else 0.0
    return Candidate(
        family=family,
        rung=LADDER.index(saving),
        base_ns=most.step_ns,
        extra_ns=tuple(
            tuple(rate * max(0.0, outcome.recompute_ns[place] - most.recompute_ns[place]) for outcome in outcomes)
            for place in range(len(sample.classes))
        ),
        stage_bytes=tuple(
            tuple(tuple(stage.total for stage in outcome.stages(cost, length_class.step)) for outcome in outcomes)
            for length_class in sample.classes
        ),
    )


def _fastest(choices: list[Choice]) -> list[Choice]:
    """The fastest that fit, and the fastest of those that the runtime can run."""
    fitting = sorted((each for each in choices if each.fits), key=lambda choice: choice.step_ns)
    runnable = [choice for choice in fitting if choice.plan_only is None]
    return list({id(each): each for each in (*fitting[:_WINNERS], *runnable[:_WINNERS])}.values())


def _other_shardings(search: Search, choices: list[Choice]) -> list[Choice]:
    """Try the fastest choices with the other shardings, and return those that are faster.

    Sharded gradients and weights are sent while chunks are computed.
    """
    found, known = [], {(each.config, each.cost) for each in choices}
    for choice in _fastest(choices):
        for sharding in search.options.shardings_of(choice.layout):
            cost = replace(choice.cost, sharding=sharding)
            if (choice.config, cost) not in known and search.is_hopeful(choice.config, cost):
                made = evaluate(choice.config, cost, search)
                found += [made] if made.fits and made.step_ns < choice.step_ns else []
    return found


def _cut_by_cost(search: Search, choices: list[Choice]) -> list[Choice]:
    """Try the fastest choices on a pipeline with parts of equal time, and return those that are faster.

    Parts of equal length take longer the longer their prefix is, and stages wait for each other between them. A single
    stage never waits.
    """
    longest = int(search.sample.num_tokens.max())
    found = []
    for choice in _fastest([each for each in choices if each.config.pp > 1 and longest > each.config.chunk_size]):
        config = replace(choice.config, split="cost")
        if search.is_hopeful(config, choice.cost):
            made = evaluate(config, choice.cost, search)
            found += [made] if made.step_ns < choice.step_ns else []
    return found
