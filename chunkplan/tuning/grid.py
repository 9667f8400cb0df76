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

import numpy as np

from chunkplan.building import result_of
from chunkplan.config.plan import VIRTUAL, PlanConfig
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.durations import balance_layers
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.layers import split_layers
from chunkplan.quantities import ZERO
from chunkplan.solver import deterministic_solver
from chunkplan.tuning.levels import (
    Ladder,
    Tried,
    Wanted,
    Way,
    climb,
    first_levels,
    rungs,
    worth_sharding,
)
from chunkplan.tuning.mixing import fitted, mixed
from chunkplan.tuning.options import LADDER, GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.plan_only import why_plan_only
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import Outcome, try_out

# The choice as an integer program: one ChunkSize, and one K for each length class.


#: Deterministic seconds of CP-SAT; the programs have some hundred variables.
_EFFORT = 10.0

#: Times are counted in so many nanoseconds, and these in parts: what is below decides ties.
_TIME, _TIES = 1000, 128


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


#: Winners of the integer program that are simulated; and choices that are tried with parts of equal time.
_WINNERS = 4

#: Called with (what is done, runs done, runs to do), as each was; a run is a ChunkSize and schedule, with all Ks.
Progress = Callable[[str, int, int], None]


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
    ways = ways_to_try(sample, options, layout, chunk_sizes)
    first, *others = options.shardings_of(layout)
    choices: list[Choice] = []
    cancelled = threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool, _cancelling(pool, cancelled):

        def tries(memory: MemorySaving, wanted: Wanted, sharding: Sharding) -> Tried:
            cost = options.cost(layout, memory, sharding)
            doing = _words(layout, memory, sharding)
            started = {
                way: [
                    pool.submit(try_out, sample, way.config(options, layout, k), cost, cancelled.is_set) for k in of_way
                ]
                for way, of_way in wanted.items()
            }
            outcomes = {}
            for way, futures in started.items():
                outcomes[way] = [result_of(future) for future in futures]
                progress(doing, len(outcomes), len(started))
            return outcomes

        plain = tries(LADDER[0], {way: _sensible_ks(ks, way.chunk_size, sample) for way in ways}, first)
        tried = [[plain, *climb(tries, first_levels(plain, first, options, layout)[1:], first, options, layout)]]
        tried += [
            climb(tries, worth_sharding(sharding, plain, options, layout), sharding, options, layout)
            for sharding in others
        ]
    for of_levels in tried:
        ladders = rungs(of_levels, options, layout)
        for ladder in ladders.values():
            for k in dict.fromkeys(outcome.config.k for _, outcomes in ladder for outcome in outcomes):
                made = [
                    _choice(outcome, memory, options, sample)
                    for memory, outcomes in ladder
                    for outcome in outcomes
                    if outcome.config.k == k
                ]
                choices.append(next((choice for choice in made if choice.fits), made[-1]))
        choices += _mixed(sample, options, list(ladders.values()))
    fastest_ns = min((choice.step_ns for choice in choices if choice.fits), default=math.inf)
    outcomes = [each for of_levels in tried for level in of_levels for of_way in level.values() for each in of_way]
    choices += [choice_of(outcome, options, sample) for outcome in mixed(sample, options, outcomes, fastest_ns)]
    choices += _shared_otherwise(sample, options, choices)
    return choices + _cut_by_cost(sample, options, choices)


def _words(layout: GpuLayout, memory: MemorySaving, sharding: Sharding) -> str:
    """What runs are tried with, as progress says it."""
    words = [f"dp {layout.dp}, tp {layout.tp}, pp {layout.pp}"]
    words += checkpointing_words(memory.checkpointing, "full checkpointing")
    words += [ZERO[sharding]] if layout.dp > 1 else []
    return f"simulating {', '.join(words)}"


@contextmanager
def _cancelling(pool: ThreadPoolExecutor, cancelled: threading.Event) -> Iterator[None]:
    """Where the block raises, as by an interrupt, the threads of `pool` are not waited for to do all they have."""
    try:
        yield
    except BaseException:
        cancelled.set()
        pool.shutdown(cancel_futures=True)
        raise


def ways_to_try(sample: Sample, options: TuneOptions, layout: GpuLayout, chunk_sizes: Sequence[int]) -> list[Way]:
    """Return all that is tried with all Ks; layers of equal time only where they are not as even as they come."""
    shape, pp = options.shape, layout.pp
    cost = options.cost(layout, LADDER[0], options.shardings_of(layout)[0])
    pairs_per_token = sample.attention_pairs_per_step(cost) / sample.tokens_per_step
    layers = balance_layers(cost, pp, pairs_per_token)
    splits = [None] if layers == split_layers(shape.num_layers, pp) else [None, layers]
    return [
        Way(schedule, cp, stage_layers, chunk_size)
        for (schedule, cp), stage_layers, chunk_size in product(
            options.ways_of(layout), splits, sensible_sizes(chunk_sizes, sample, layout)
        )
        if schedule not in VIRTUAL or stage_layers is None
    ]


def sensible_sizes(chunk_sizes: Sequence[int], sample: Sample, layout: GpuLayout) -> list[int]:
    """Leave out ChunkSizes above the first one that holds all that a rank has in the largest step, and any sequence."""
    of_steps = np.add.reduceat(sample.num_tokens.astype(np.int64), sample.first_of_step[:-1])
    most = max(int(sample.num_tokens.max()), -(-int(of_steps.max()) // layout.dp))
    enough = min((size for size in chunk_sizes if size >= most), default=max(chunk_sizes))
    return [size for size in chunk_sizes if size <= enough]


def _sensible_ks(ks: Sequence[int], chunk_size: int, sample: Sample) -> list[int]:
    """Leave out Ks larger than the first one that keeps all chunks of the longest sequence."""
    most_parts = -(-int(sample.num_tokens.max()) // chunk_size)
    enough = min((k for k in ks if k >= most_parts), default=max(ks))
    return [k for k in ks if k <= enough]


def mixed_again(
    choice: Choice, on_heaviest: Outcome, sample: Sample, heaviest: Sample, options: TuneOptions
) -> Choice | None:
    """A choice with levels layer by layer that do not fit the `heaviest` steps, with levels that do; None: none do."""
    moments = on_heaviest.moments[int(choice.cost.kv_offload)]
    found = fitted((sample, heaviest), choice.config, choice.cost, moments, options.gpu_memory)
    if found is None:
        return None
    memory = max((each.memory(each.cost) for each in found), key=lambda each: each.total)
    host_bytes = max(each.host_bytes(each.cost) for each in found)
    return replace(choice_of(found[0], options, sample), memory=memory, host_bytes=host_bytes)


def choice_of(outcome: Outcome, options: TuneOptions, sample: Sample) -> Choice:
    """What was tried, as a choice of what it was tried with."""
    return _choice(outcome, MemorySaving(outcome.cost.checkpointing, outcome.cost.kv_offload), options, sample)


def _choice(outcome: Outcome, memory: MemorySaving, options: TuneOptions, sample: Sample) -> Choice:
    cost = replace(outcome.cost, kv_offload=memory.kv_offload)
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


def _mixed(sample: Sample, options: TuneOptions, families: list[Ladder]) -> list[Choice]:
    """Simulate the winners of the integer program; those with one K for all lengths are among the others already."""
    rungs = [(family, *rung) for family, ladder in enumerate(families) for rung in ladder]
    candidates = [_candidate(*rung, sample) for rung in rungs]
    choices: list[Choice] = []
    if all(len(outcomes) == 1 for _, _, outcomes in rungs):
        return choices
    for index, places in choose(candidates, options.gpu_memory, _WINNERS):
        _, memory, outcomes = rungs[index]
        ks = [outcomes[place].config.k for place in places]
        if len(set(ks)) < 2:
            continue
        first = outcomes[0].config
        by_length: list[tuple[int, int]] = []
        for before, k, length_class in zip(ks, ks[1:], sample.classes[1:], strict=False):
            if k != before:
                by_length.append((length_class.over, k))
        config = replace(first, k=ks[0], k_by_length=tuple(by_length))
        outcome = try_out(sample, config, outcomes[0].cost)
        choices.append(_choice(outcome, memory, options, sample))
    return choices


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
                made = choice_of(try_out(sample, choice.config, cost), options, sample)
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
        outcome = try_out(sample, replace(choice.config, split="cost"), choice.cost)
        found += [each for each in [choice_of(outcome, options, sample)] if each.step_ns < choice.step_ns]
    return found


def _candidate(family: int, memory: MemorySaving, outcomes: list[Outcome], sample: Sample) -> Candidate:
    """Make what the integer program knows of a ChunkSize, from trials with one K for all.

    Recomputing costs a length class its share of what a step takes longer with the smallest K than with the largest.
    """
    cost = replace(outcomes[0].cost, kv_offload=memory.kv_offload)
    most, least = outcomes[-1], outcomes[0]
    more_work = sum(least.recompute_ns) - sum(most.recompute_ns)
    rate = max(0.0, least.step_ns - most.step_ns) / more_work if more_work > 0 else 0.0
    return Candidate(
        family=family,
        rung=LADDER.index(memory),
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
