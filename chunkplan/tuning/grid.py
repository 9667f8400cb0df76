"""All configurations of a layout, tried on a sample; the integer program's choice among them, and by length."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import balance_layers
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel
from chunkplan.layers import split_layers
from chunkplan.tuning.options import LADDER, GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.plan_only import why_plan_only
from chunkplan.tuning.program import Candidate, choose
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import Outcome, reduction_ns, try_out

#: Winners of the integer program that are simulated.
_WINNERS = 4

#: Called after every configuration that was tried.
Tick = Callable[[], None]


class Way(NamedTuple):
    """What is tried with all Ks: a schedule, who may share sequences, the layers of stages, and a ChunkSize."""

    schedule: str
    cp: str | int
    stage_layers: tuple[int, ...] | None
    chunk_size: int

    def config(self, options: TuneOptions, layout: GpuLayout, k: int) -> PlanConfig:
        """Return the configuration of a plan."""
        config = options.plan_config(layout, self.chunk_size, k, self.schedule, cp=self.cp)
        return replace(config, stage_layers=self.stage_layers)


@dataclass(frozen=True)
class Choice:
    """A configuration and what it comes to; see `Outcome`.

    `memory` is that of the fullest stage in any step. `mfu`: model FLOPs without recompute, over the peak of all
    GPUs. `plan_only`: why the runtime cannot run it, or None.
    """

    config: PlanConfig
    cost: CostModel
    step_ns: float
    tokens_per_second: float
    mfu: float
    bubble: float
    recompute_share: float
    memory: StageMemory
    fits: bool
    plan_only: str | None

    @property
    def layout(self) -> GpuLayout:
        """The layout that the configuration and the cost model have."""
        return GpuLayout(self.config.dp, self.cost.tp, self.config.pp)


def try_grid(
    sample: Sample, options: TuneOptions, layout: GpuLayout, chunk_sizes: Sequence[int], ks: Sequence[int], tick: Tick
) -> list[Choice]:
    """Try one choice for each ChunkSize, K, schedule and `cp`; and winners of the integer program, which mix Ks.

    A choice is of the first rung of the ladder that fits; where none does, of the last.
    """
    runs = ways_to_try(sample, options, layout, chunk_sizes)
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def tries(memory: MemorySaving, wanted: list[Way]) -> dict[Way, list[Outcome]]:
            cost = options.cost(layout, memory)
            started = {
                run: [
                    pool.submit(try_out, sample, run.config(options, layout, k), cost)
                    for k in _sensible_ks(ks, run.chunk_size, sample)
                ]
                for run in wanted
            }
            outcomes = {}
            for run, futures in started.items():
                outcomes[run] = [future.result() for future in futures]
                tick()
            return outcomes

        plain = tries(LADDER[0], runs)
        tight = [run for run in runs if not any(_fits(each, LADDER[0], options, layout) for each in plain[run])]
        checkpointed = tries(LADDER[2], tight)
    rungs: dict[Way, list[tuple[MemorySaving, list[Outcome]]]] = {}
    for run in runs:
        rungs[run] = [(memory, plain[run]) for memory in _usable(LADDER[:2], run.chunk_size, options, layout)]
        if run in checkpointed:
            rungs[run] += [
                (memory, checkpointed[run]) for memory in _usable(LADDER[2:], run.chunk_size, options, layout)
            ]
    choices = []
    for run in runs:
        for index in range(len(plain[run])):
            ladder = [_choice(outcomes[index], memory, options, sample) for memory, outcomes in rungs[run]]
            choices.append(next((choice for choice in ladder if choice.fits), ladder[-1]))
    return choices + _mixed(sample, options, layout, list(rungs.values()))


def ways_to_try(sample: Sample, options: TuneOptions, layout: GpuLayout, chunk_sizes: Sequence[int]) -> list[Way]:
    """Return all that is tried with all Ks; layers of equal time only where they are not as even as they come."""
    shape, pp = options.shape, layout.pp
    pairs_per_token = sample.attention_pairs_per_step / sample.tokens_per_step
    layers = balance_layers(options.cost(layout, LADDER[0]), pp, pairs_per_token)
    splits = [None] if layers == split_layers(shape.num_layers, pp) else [None, layers]
    return [
        Way(schedule, cp, stage_layers, chunk_size)
        for (schedule, cp), stage_layers, chunk_size in product(
            options.ways_of(layout), splits, sensible_sizes(chunk_sizes, sample, layout)
        )
        if schedule != "interleaved" or stage_layers is None
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


def _usable(
    rungs: Sequence[MemorySaving], chunk_size: int, options: TuneOptions, layout: GpuLayout
) -> list[MemorySaving]:
    """Leave out rungs whose transfers to and from host memory would take longer than what hides them."""
    return [
        rung for rung in rungs if not rung.kv_offload or chunk_size >= options.cost(layout, rung).offload_chunk_size
    ]


def _fits(outcome: Outcome, memory: MemorySaving, options: TuneOptions, layout: GpuLayout) -> bool:
    return outcome.memory(options.cost(layout, memory), options.sharding).total <= options.gpu_memory


def _choice(outcome: Outcome, memory: MemorySaving, options: TuneOptions, sample: Sample) -> Choice:
    cost = replace(outcome.cost, kv_offload=memory.kv_offload)
    needed = outcome.memory(cost, options.sharding)
    step_ns = outcome.step_ns + reduction_ns(cost, outcome.config, options.sharding)
    seconds = step_ns / 1e9
    gpus = outcome.config.dp * cost.tp * outcome.config.pp
    flops = cost.model_flops(sample.tokens_per_step, sample.attention_pairs_per_step)
    return Choice(
        config=outcome.config,
        cost=cost,
        step_ns=step_ns,
        tokens_per_second=sample.tokens_per_step / seconds,
        mfu=flops / (seconds * gpus * cost.hardware.peak_flops),
        bubble=outcome.bubble,
        recompute_share=outcome.recompute_share,
        memory=needed,
        fits=needed.total <= options.gpu_memory,
        plan_only=why_plan_only(outcome.config, cost, options.sharding),
    )


def _mixed(
    sample: Sample, options: TuneOptions, layout: GpuLayout, families: list[list[tuple[MemorySaving, list[Outcome]]]]
) -> list[Choice]:
    """Simulate the winners of the integer program; those with one K for all lengths are among the others already."""
    rungs = [(family, *rung) for family, ladder in enumerate(families) for rung in ladder]
    candidates = [_candidate(*rung, options, layout, sample) for rung in rungs]
    choices = []
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
        outcome = try_out(sample, config, replace(options.cost(layout, memory), kv_offload=False))
        choices.append(_choice(outcome, memory, options, sample))
    return choices


def _candidate(
    family: int, memory: MemorySaving, outcomes: list[Outcome], options: TuneOptions, layout: GpuLayout, sample: Sample
) -> Candidate:
    """Make what the integer program knows of a ChunkSize, from trials with one K for all.

    Recomputing costs a length class its share of what a step takes longer with the smallest K than with the largest.
    """
    cost = options.cost(layout, memory)
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
            tuple(
                tuple(stage.total for stage in outcome.stages(cost, options.sharding, length_class.step))
                for outcome in outcomes
            )
            for length_class in sample.classes
        ),
    )
