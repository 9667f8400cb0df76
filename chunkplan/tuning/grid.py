"""All configurations of a layout, tried on a sample; the integer program's choice among them, and by length."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from chunkplan.building import result_of
from chunkplan.config.plan import VIRTUAL, PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS, checkpointing_words
from chunkplan.cost.durations import balance_layers
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.layers import split_layers
from chunkplan.quantities import ZERO
from chunkplan.solver import deterministic_solver
from chunkplan.tuning.mixing import fitted, mixed
from chunkplan.tuning.options import LADDER, GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.plan_only import why_plan_only
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import Outcome, try_out

#: Deterministic seconds of CP-SAT; the programs have some hundred variables.
_EFFORT = 10.0

#: Times are counted in so many nanoseconds, and these in parts: what is below decides ties.
_TIME, _TIES = 1000, 128

#: Winners of the integer program that are simulated; and choices that are tried with parts of equal time.
_WINNERS = 4

_LAST_LEVEL = len(CHECKPOINTINGS) - 1

#: Called with (what is done, runs done, runs to do), as each was; a run is a ChunkSize and schedule, with all Ks.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A ChunkSize with a schedule, and a way to run the model, its `rung` of the ladder.

    `family` is the same for candidates that differ in their rung alone. `base_ns`: a step's time where nothing is
    recomputed more than the largest K leaves. By length class and K, both ascending: `extra_ns`, what a step takes
    longer with it; `stage_bytes`, what each stage then holds in the step with the longest sequence of the class.
    """

    family: int
    rung: int
    base_ns: float
    extra_ns: tuple[tuple[float, ...], ...]
    stage_bytes: tuple[tuple[tuple[int, ...], ...], ...]


def choose(candidates: list[Candidate], gpu_memory: int, most: int) -> list[tuple[int, tuple[int, ...]]]:
    """Choose the `most` best candidates of different families: (its place, each length class's place of K).

    The fastest comes first. Minimises predicted time under the memory of each stage, as an integer program that
    CP-SAT solves to the optimum; longer sequences, whose keys and values take more room, never get a larger K. Of
    solutions that take the same time it is the one of the lower rung with the smaller Ks. Fewer are returned where
    no more fit.
    """
    from ortools.sat.python import cp_model

    hopeful = _hopeful(candidates, gpu_memory, most)
    candidates = [candidates[place] for place in hopeful]
    found: list[tuple[int, tuple[int, ...]]] = []
    model = cp_model.CpModel()
    takes = [model.new_bool_var("") for _ in candidates]
    model.add_exactly_one(takes)
    terms, costs, choices = [], [], []
    for candidate, taken in zip(candidates, takes, strict=True):
        terms.append(taken)
        costs.append(round(candidate.base_ns / _TIME) * _TIES + candidate.rung)
        of_class = [[model.new_bool_var("") for _ in extra_ns] for extra_ns in candidate.extra_ns]
        for ks, extra_ns, stage_bytes in zip(of_class, candidate.extra_ns, candidate.stage_bytes, strict=True):
            model.add_exactly_one([*ks, ~taken])
            terms += ks
            costs += [round(extra / _TIME) * _TIES + place for place, extra in enumerate(extra_ns)]
            for k, of_stages in zip(ks, stage_bytes, strict=True):
                if max(of_stages) > gpu_memory:
                    model.add(k == 0)
        for shorter, longer in pairwise(of_class):
            for place, k in enumerate(longer):
                model.add_bool_or([~k, *shorter[place:]])
        choices.append(of_class)
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, costs))
    solver = deterministic_solver(_EFFORT)
    while len(found) < min(most, len({candidate.family for candidate in candidates})):
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        chosen = next(place for place, taken in enumerate(takes) if solver.boolean_value(taken))
        ks_of_class = [next(place for place, k in enumerate(ks) if solver.boolean_value(k)) for ks in choices[chosen]]
        found.append((hopeful[chosen], tuple(ks_of_class)))
        for candidate, taken in zip(candidates, takes, strict=True):
            if candidate.family == candidates[chosen].family:
                model.add(taken == 0)
    return found


def _hopeful(candidates: list[Candidate], gpu_memory: int, most: int) -> list[int]:
    """Return places of those that can be among the `most` best: at best no slower than so many families with one K."""
    best: dict[int, float] = {}
    for candidate in candidates:
        for place in range(len(candidate.extra_ns[0]) if candidate.extra_ns else 0):
            if all(max(stages[place]) <= gpu_memory for stages in candidate.stage_bytes):
                time = candidate.base_ns + sum(extra[place] for extra in candidate.extra_ns)
                best[candidate.family] = min(time, best.get(candidate.family, time))
    times = sorted(best.values())
    slowest = times[most - 1] if len(times) >= most else float("inf")
    return [place for place, candidate in enumerate(candidates) if candidate.base_ns <= slowest]


@dataclass(frozen=True)
class Choice:
    """A configuration and what it comes to; see `Outcome`.

    `memory` is that of the fullest stage in any step, `host_bytes` what a GPU keeps in host memory. `mfu`: model FLOPs
    without recompute, over the peak of all GPUs. `plan_only`: why the runtime cannot run it, or None.
    """

    config: PlanConfig
    cost: CostModel
    step_ns: float
    tokens_per_second: float
    mfu: float
    bubble: float
    recompute_share: float
    memory: StageMemory
    host_bytes: int
    fits: bool
    plan_only: str | None

    @property
    def layout(self) -> GpuLayout:
        """The layout that the configuration and the cost model have."""
        return GpuLayout(self.config.dp, self.cost.tp, self.config.pp)


def choice_of(outcome: Outcome, options: TuneOptions, sample: Sample, *, kv_offload: bool | None = None) -> Choice:
    """What was tried, as a choice of what it was tried with, but for `kv_offload` where that is not None."""
    cost = outcome.cost if kv_offload is None else replace(outcome.cost, kv_offload=kv_offload)
    needed = outcome.memory(cost)
    shares_link = "offload" in cost.levels or not cost.rates.hides_attention
    if needed.total <= options.gpu_memory and cost.rates != outcome.cost.rates and shares_link:
        # Keys and values share the link to the host with inputs of layers, and with attention.
        outcome = try_out(sample, outcome.config, cost)
        needed = outcome.memory(cost)
    seconds = outcome.step_ns / 1e9
    gpus = outcome.config.dp * cost.tp * outcome.config.pp
    flops = cost.model_flops(sample.tokens_per_step, sample.attention_pairs_per_step(cost))
    return Choice(
        config=outcome.config,
        cost=cost,
        step_ns=outcome.step_ns,
        tokens_per_second=sample.tokens_per_step / seconds,
        mfu=flops / (seconds * gpus * cost.hardware.peak_flops),
        bubble=outcome.bubble,
        recompute_share=outcome.recompute_share,
        memory=needed,
        host_bytes=outcome.host_bytes(cost),
        fits=needed.total <= options.gpu_memory,
        plan_only=why_plan_only(outcome.config, cost),
    )


def evaluate(config: PlanConfig, cost: CostModel, options: TuneOptions, sample: Sample) -> Choice:
    """Try one configuration: what all choices but those of the grid come from."""
    return choice_of(try_out(sample, config, cost), options, sample)


class Way(NamedTuple):
    """What is tried with all Ks: a schedule, who may share sequences, the layers of stages, and a ChunkSize."""

    schedule: str
    cp: str | int
    stage_layers: tuple[int, ...] | None
    chunk_size: int


#: Ks of ways that are to be tried; what came of those that were; the rungs that a way may take, with that.
Wanted = dict[Way, list[int]]
Tried = dict[Way, list[Outcome]]
Ladder = list[tuple[MemorySaving, list[Outcome]]]


def try_grid(
    sample: Sample,
    options: TuneOptions,
    layout: GpuLayout,
    chunk_sizes: Sequence[int],
    ks: Sequence[int],
    progress: Progress,
) -> list[Choice]:
    """Try one choice for each ChunkSize, K, schedule and `cp`; winners of the integer program, which mix Ks; where
    memory is short, what may be fastest with levels of activation checkpointing layer by layer; of the fastest of all,
    the same with ranks that share more or less; and, on a pipeline, with sequences cut into parts of equal time.

    A choice is of the first rung of the ladder that fits; where none does, of the last. Which one it
    is, what stages hold without checkpointing tells; where it does not fit, those after it are tried. Where ranks may
    share more than one thing, each that spares recomputing, or fits what otherwise does not, makes a choice of its own.
    """
    cancelled = threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool, _cancelling(pool, cancelled):
        grid = _Grid(sample, options, layout, progress, pool, cancelled)
        tried = grid.try_all(chunk_sizes, ks)
    choices: list[Choice] = []
    for of_levels in tried:
        ladders = grid.ladders(of_levels)
        for ladder in ladders:
            for k in dict.fromkeys(outcome.config.k for _, outcomes in ladder for outcome in outcomes):
                made = [
                    choice_of(outcome, options, sample, kv_offload=saving.kv_offload)
                    for saving, outcomes in ladder
                    for outcome in outcomes
                    if outcome.config.k == k
                ]
                choices.append(next((choice for choice in made if choice.fits), made[-1]))
        choices += _mixed_ks(sample, options, ladders)
    fastest_ns = min((choice.step_ns for choice in choices if choice.fits), default=math.inf)
    outcomes = [each for of_levels in tried for level in of_levels for of_way in level.values() for each in of_way]
    choices += [choice_of(outcome, options, sample) for outcome in mixed(sample, options, outcomes, fastest_ns)]
    choices += _shared_otherwise(sample, options, choices)
    return choices + _cut_by_cost(sample, options, choices)


@contextmanager
def _cancelling(pool: ThreadPoolExecutor, cancelled: threading.Event) -> Iterator[None]:
    """Where the block raises, as by an interrupt, the threads of `pool` are not waited for to do all they have."""
    try:
        yield
    except BaseException:
        cancelled.set()
        pool.shutdown(cancel_futures=True)
        raise


@dataclass(frozen=True)
class _Grid:
    """The ways of a layout, each tried with the levels of activation checkpointing that it needs to fit."""

    sample: Sample
    options: TuneOptions
    layout: GpuLayout
    progress: Progress
    pool: ThreadPoolExecutor
    cancelled: threading.Event

    def try_all(self, chunk_sizes: Sequence[int], ks: Sequence[int]) -> list[list[Tried]]:
        """What was tried, by what ranks share, and by the place of the last so many levels."""
        first, *others = self.options.shardings_of(self.layout)
        plain = self._try(0, {way: self._sensible_ks(ks, way) for way in self._ways(chunk_sizes)}, first)
        tried = [[plain, *self._climb(self._first_levels(plain, first), first)]]
        return tried + [self._climb(self._worth_sharding(sharding, plain), sharding) for sharding in others]

    def ladders(self, of_levels: list[Tried]) -> list[Ladder]:
        """The rungs that each way may take, with what was tried on each, from the fastest on."""
        first = len(CHECKPOINTINGS) - len(of_levels)
        return [
            [
                (saving, tried[way])
                for level, tried in enumerate(of_levels, first)
                if way in tried
                for saving in self._rungs(level, way)
            ]
            for way in dict.fromkeys(way for tried in of_levels for way in tried)
        ]

    def _ways(self, chunk_sizes: Sequence[int]) -> list[Way]:
        """All that is tried with all Ks; layers of equal time only where they are not as even as they come.

        ChunkSizes above the first one that holds all that a rank has in the largest step, and any sequence, are left
        out.
        """
        sample, options, layout = self.sample, self.options, self.layout
        cost = options.cost(layout, LADDER[0], options.shardings_of(layout)[0])
        pairs_per_token = sample.attention_pairs_per_step(cost) / sample.tokens_per_step
        layers = balance_layers(cost, layout.pp, pairs_per_token)
        splits = [None] if layers == split_layers(options.shape.num_layers, layout.pp) else [None, layers]
        of_steps = np.add.reduceat(sample.num_tokens.astype(np.int64), sample.first_of_step[:-1])
        most = max(int(sample.num_tokens.max()), -(-int(of_steps.max()) // layout.dp))
        return [
            Way(schedule, cp, stage_layers, chunk_size)
            for (schedule, cp), stage_layers, chunk_size in product(
                options.ways_of(layout), splits, _up_to_enough(chunk_sizes, most)
            )
            if schedule not in VIRTUAL or stage_layers is None
        ]

    def _sensible_ks(self, ks: Sequence[int], way: Way) -> list[int]:
        """Leave out Ks larger than the first one that keeps all chunks of the longest sequence."""
        return _up_to_enough(ks, -(-int(self.sample.num_tokens.max()) // way.chunk_size))

    def _try(self, level: int, wanted: Wanted, sharding: Sharding) -> Tried:
        """Try the Ks that are wanted of each way with a level, by its place; keys and values are on the GPU."""
        saving = LADDER[2 * level]
        cost = self.options.cost(self.layout, saving, sharding)
        words = [f"dp {self.layout.dp}, tp {self.layout.tp}, pp {self.layout.pp}"]
        words += checkpointing_words(saving.checkpointing, "full checkpointing")
        words += [ZERO[sharding]] if self.layout.dp > 1 else []
        started = {}
        for way, ks in wanted.items():
            config = self.options.plan_config(self.layout, way.chunk_size, ks[0], way.schedule, way.cp)
            configs = [replace(config, stage_layers=way.stage_layers, k=k) for k in ks]
            started[way] = [
                self.pool.submit(try_out, self.sample, config, cost, self.cancelled.is_set) for config in configs
            ]
        outcomes: Tried = {}
        for way, futures in started.items():
            outcomes[way] = [result_of(future) for future in futures]
            self.progress(f"simulating {', '.join(words)}", len(outcomes), len(started))
        return outcomes

    def _rungs(self, level: int, way: Way) -> list[MemorySaving]:
        """The rungs of a level, by its place, but those whose transfers take longer than what hides them."""
        rungs = LADDER[2 * level : 2 * level + 2]
        least = self.options.cost(self.layout, LADDER[0]).offload_chunk_size
        return [rung for rung in rungs if not rung.kv_offload or way.chunk_size >= least]

    def _fits(self, outcome: Outcome, level: int, way: Way, sharding: Sharding) -> bool:
        """Whether what was tried fits with a level."""
        costs = (self.options.cost(self.layout, saving, sharding) for saving in self._rungs(level, way))
        return any(outcome.fits(cost, self.options.gpu_memory) for cost in costs)

    def _first_level(self, outcome: Outcome, way: Way, sharding: Sharding) -> int:
        """The place of the first level that fits what was tried without any, or one more than there are."""
        fitting = (level for level in range(len(CHECKPOINTINGS)) if self._fits(outcome, level, way, sharding))
        return next(fitting, len(CHECKPOINTINGS))

    def _first_levels(self, plain: Tried, sharding: Sharding) -> list[Wanted]:
        """The Ks of each way that are worth trying at each level but "none": those that fit no earlier one.

        Where none fits without checkpointing, all are tried at the first level that any fits, as an integer program may
        mix them; where none fits at all, at the last one.
        """
        wanted: list[Wanted] = [{} for _ in CHECKPOINTINGS]
        for way, outcomes in plain.items():
            levels = [self._first_level(each, way, sharding) for each in outcomes]
            least = min(*levels, _LAST_LEVEL)
            for level in range(1, len(CHECKPOINTINGS)):
                ks = [
                    each.config.k
                    for each, own in zip(outcomes, levels, strict=True)
                    if own == level or (level == least and own > 0)
                ]
                wanted[level] |= {way: ks} if ks else {}
        return wanted[1:]

    def _worth_sharding(self, sharding: Sharding, plain: Tried) -> list[Wanted]:
        """The Ks of each way that fit an earlier level if ranks share that than while they share less.

        What a stage holds of chunks is taken from the trials with least sharding.
        """
        shardings = self.options.shardings_of(self.layout)
        less = shardings[: shardings.index(sharding)]
        wanted: list[Wanted] = [{} for _ in CHECKPOINTINGS]
        for way, outcomes in plain.items():
            for outcome in outcomes:
                level = self._first_level(outcome, way, sharding)
                if level < min(self._first_level(outcome, way, one) for one in less):
                    wanted[level].setdefault(way, []).append(outcome.config.k)
        return wanted

    def _climb(self, wanted: list[Wanted], sharding: Sharding) -> list[Tried]:
        """Try what is wanted of the last so many levels, and at the next one what then does not fit."""
        found = []
        for level, of_level in enumerate(wanted, len(CHECKPOINTINGS) - len(wanted)):
            found.append(self._try(level, of_level, sharding))
            if level == _LAST_LEVEL:
                break
            following = wanted[len(found)]
            for way, outcomes in found[-1].items():
                if not any(self._fits(each, level, way, sharding) for each in outcomes):
                    following[way] = sorted({*(each.config.k for each in outcomes), *following.get(way, [])})
        return found


def _up_to_enough(sizes: Sequence[int], enough: int) -> list[int]:
    """Those of `sizes` up to the first one that is `enough`, or all."""
    largest = min((size for size in sizes if size >= enough), default=max(sizes))
    return [size for size in sizes if size <= largest]


def mixed_again(
    choice: Choice, on_heaviest: Outcome, sample: Sample, heaviest: Sample, options: TuneOptions
) -> Choice | None:
    """A choice with levels layer by layer that do not fit the `heaviest` steps, with levels that do; None: none do."""
    moments = on_heaviest.peaks[int(choice.cost.kv_offload)]
    found = fitted((sample, heaviest), choice.config, choice.cost, moments, options.gpu_memory)
    if found is None:
        return None
    memory = max((each.memory(each.cost) for each in found), key=lambda each: each.total)
    host_bytes = max(each.host_bytes(each.cost) for each in found)
    return replace(choice_of(found[0], options, sample), memory=memory, host_bytes=host_bytes)


def _mixed_ks(sample: Sample, options: TuneOptions, ladders: list[Ladder]) -> list[Choice]:
    """Simulate the winners of the integer program; those with one K for all lengths are among the others already."""
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
        outcome = try_out(sample, config, outcomes[0].cost)
        choices.append(choice_of(outcome, options, sample, kv_offload=saving.kv_offload))
    return choices


def _candidate(family: int, saving: MemorySaving, outcomes: list[Outcome], sample: Sample) -> Candidate:
    """Make what the integer program knows of a ChunkSize, from trials with one K for all.

    Recomputing costs a length class its share of what a step takes longer with the smallest K than with the largest.
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


def _shared_otherwise(sample: Sample, options: TuneOptions, choices: list[Choice]) -> list[Choice]:
    """Try the fastest choices with whatever else ranks may share: return what is faster so.

    Where ranks share gradients or weights, these are on their way while chunks are at work.
    """
    found, known = [], {(each.config, each.cost) for each in choices}
    for choice in _fastest(choices):
        for sharding in options.shardings_of(choice.layout):
            cost = replace(choice.cost, sharding=sharding)
            if (choice.config, cost) not in known:
                made = evaluate(choice.config, cost, options, sample)
                found += [made] if made.fits and made.step_ns < choice.step_ns else []
    return found


def _cut_by_cost(sample: Sample, options: TuneOptions, choices: list[Choice]) -> list[Choice]:
    """Try the fastest choices on a pipeline, and the fastest that the runtime can run, with parts of equal time: return
    what is faster so.

    Parts of equal length take longer the more is before them, and stages wait for each other between them. On one stage
    nothing waits.
    """
    longest = int(sample.num_tokens.max())
    found = []
    for choice in _fastest([each for each in choices if each.config.pp > 1 and longest > each.config.chunk_size]):
        made = evaluate(replace(choice.config, split="cost"), choice.cost, options, sample)
        found += [made] if made.step_ns < choice.step_ns else []
    return found
