"""Tries one configuration on sampled steps: planned, scheduled and simulated as a plan's are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel
from chunkplan.cost.reduction import reduction_ns
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.chunks import ChunkedBlock
from chunkplan.planning.memory import LongestSequence, held_bytes_of, host_bytes_of, longest_sequences, memory_of_stages
from chunkplan.planning.method import Dataset, chunk_block, schedule_block
from chunkplan.schedule.families import Scheduled
from chunkplan.schedule.holdings import fullest, fullest_moments
from chunkplan.tuning.sampling import Sample


@dataclass(frozen=True)
class Outcome:
    """What a configuration takes on the steps of a sample.

    `step_ns`: mean time of a step, with its reduction. `bubble`: share of the stages' time, until their rank is done,
    without a first forward or a backward. `recompute_share`: of the work. `recompute_ns` by length class: mean per
    step, over all stages. `moments` int64 [2, num_steps, pp, 8]: what each stage holds at its fullest moment on any
    rank, see `fullest_moments`; first where keys and values are on the GPU, then where they are offloaded. `retained`
    int64 [pp]: the most tokens whose activations each stage holds at once, in any step and on any rank.
    """

    config: PlanConfig
    cost: CostModel
    step_ns: float
    bubble: float
    recompute_share: float
    recompute_ns: tuple[float, ...]
    moments: Int64Array
    retained: Int64Array

    def memory(self, cost: CostModel) -> StageMemory:
        """Memory of the fullest stage in any step; `cost` may differ from the outcome's in offloading and sharding."""
        moments = self.moments[int(cost.kv_offload)]
        most, _ = fullest(moments, held_bytes_of(self.config, cost))
        return max(memory_of_stages(self.config, cost, most), key=_total)

    def host_bytes(self, cost: CostModel) -> int:
        """Host memory of a GPU of the stage that takes most; `cost` as in `memory`."""
        most = self.moments[0].max(axis=0)
        return host_bytes_of(self.config, cost, most, self.retained)

    def stages(self, cost: CostModel, step: int) -> tuple[StageMemory, ...]:
        """Memory of each stage in one step of the sample; `cost` may differ in offloading."""
        return memory_of_stages(self.config, cost, self.moments[int(cost.kv_offload), step])


def _total(memory: StageMemory) -> int:
    return memory.total


def longest_of(config: PlanConfig, cost: CostModel, memory: StageMemory, gpu_bytes: int) -> tuple[LongestSequence, ...]:
    """The longest sequence that fits beside what a plan holds, whose fullest stage takes `memory`.

    None for a pipeline, on which several sequences may be under way, and for parts of equal time, in which there may be
    room for many short ones: there what else is in a step decides.
    """
    if config.pp > 1 or config.split == "cost":
        return ()
    return longest_sequences(
        cost,
        dp=config.dp,
        chunk_size=config.chunk_size,
        k=[config.k, *(k for _, k in config.k_by_length or ())][-1],
        activations=memory.activations,
        gpu_bytes=gpu_bytes,
    )


def try_out(
    sample: Sample, config: PlanConfig, cost: CostModel, is_cancelled: Callable[[], bool] = lambda: False
) -> Outcome:
    """Plan, schedule and simulate the steps of `sample`.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
        UsageError: no schedule fits `config.memory_tokens`.
    """
    n = sample.num_tokens.size
    block = StepBlock(0, 0, np.arange(n, dtype=np.int32), sample.sizes)
    dataset = Dataset(sample.num_tokens, np.maximum(sample.num_tokens - 1, 0), None)
    chunked = chunk_block(block, dataset, config, cost, is_cancelled)
    scheduled = schedule_block(block, chunked, config, cost, is_cancelled)
    rank_end = scheduled.stage_end.reshape(-1, config.pp).max(axis=1)
    step_of_rank = np.repeat(np.arange(sample.sizes.size), config.dp)
    step_of_chunk = np.repeat(step_of_rank, np.diff(chunked.chunks.rank_chunks))
    work, recomputed = (
        sample.weights @ np.bincount(step_of_chunk, weights=values, minlength=sample.sizes.size)
        for values in (chunked.cost_ns, chunked.recompute_ns)
    )
    reduction = reduction_ns(
        cost, dp=config.dp, pp=config.pp, layers=config.layers(cost.shape.num_layers), placement=config.placement
    )
    occupied = config.pp * float(sample.weights @ rank_end.reshape(-1, config.dp).sum(axis=1))
    return Outcome(
        config=config,
        cost=cost,
        step_ns=float(sample.weights @ rank_end.reshape(-1, config.dp).max(axis=1)) + reduction,
        bubble=1 - float(work - recomputed) / occupied,
        recompute_share=float(recomputed / work),
        recompute_ns=_by_class(sample, chunked, sample.weights[step_of_chunk] * chunked.recompute_ns),
        retained=scheduled.peak_retained_tokens.reshape(-1, config.pp).max(axis=0),
        moments=np.stack([_moments(chunked, scheduled, config, cost, offloaded) for offloaded in (False, True)]),
    )


def _moments(
    chunked: ChunkedBlock, scheduled: Scheduled, config: PlanConfig, cost: CostModel, offloaded: bool
) -> Int64Array:
    """The fullest moment of each stage on any rank of each step: int64 [num_steps, pp, 8]."""
    of_held = held_bytes_of(config, replace(cost, kv_offload=offloaded))
    moments = fullest_moments(chunked.chunks, scheduled.actions, of_held)
    of_steps = moments.reshape(-1, *moments[: config.dp].shape)
    return np.stack([fullest(of_step, of_held)[0] for of_step in of_steps])


def _by_class(sample: Sample, chunked: ChunkedBlock, recompute_ns: Float64Array) -> tuple[float, ...]:
    """The sum of `recompute_ns` [num_chunks] over the chunks of each length class."""
    chunks = chunked.chunks
    recomputed = np.flatnonzero(~chunks.keeps_activations)
    lengths = sample.num_tokens[chunks.sequence_id[chunks.segments[recomputed]]]  # a chunk's part is its first segment
    overs = np.array([each.over for each in sample.classes], np.int64)
    classes = np.searchsorted(overs, lengths, side="left") - 1
    return tuple(np.bincount(classes, weights=recompute_ns[recomputed], minlength=overs.size).tolist())
