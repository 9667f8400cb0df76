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
from chunkplan.cost.optimizers import ELEMENTWISE
from chunkplan.cost.states import reduction_ns
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.chunks import ChunkedBlock
from chunkplan.planning.memory import (
    LongestSequence,
    host_bytes_of,
    longest_sequences,
    memory_of_stages,
    memory_rates_of,
)
from chunkplan.planning.method import Dataset, chunk_block, schedule_block
from chunkplan.schedule.forwards import extra_forwards, forwards_ns
from chunkplan.schedule.holdings import highest_peak, peak_snapshots
from chunkplan.schedule.slots import slot_ops_on
from chunkplan.tuning.sampling import Sample


@dataclass(frozen=True)
class Outcome:
    """Time and memory of a configuration on the steps of a sample.

    `step_ns`: mean time of a step, with its reduction and `extra_ns`, the forwards that its loss adds. `bubble`: share
    of the stages' time, until their rank is done, without a first forward or a backward. `recompute_share`: of the
    work. `recompute_ns` by length class: mean per step, over all stages. `peaks` int64 [2, num_steps, pp, 8]: what each
    stage holds at its fullest moment on any rank, see `peak_snapshots`; first where keys and values are on the GPU,
    then where they are offloaded. `retained` int64 [pp]: the most tokens whose activations each stage holds at once, in
    any step and on any rank.

    Its methods take a `cost` that may differ from its own in offloading and sharding.
    """

    config: PlanConfig
    cost: CostModel
    step_ns: float
    extra_ns: float
    bubble: float
    recompute_share: float
    recompute_ns: tuple[float, ...]
    peaks: Int64Array
    retained: Int64Array

    def memory(self, cost: CostModel) -> StageMemory:
        """Memory of the fullest stage in any step."""
        most, _ = highest_peak(self.peaks[int(cost.kv_offload)], memory_rates_of(self.config, cost))
        return max(memory_of_stages(self.config, cost, most), key=lambda stage: stage.total)

    def fits(self, cost: CostModel, gpu_memory: int) -> bool:
        """True if the fullest stage fits the memory of a GPU, in bytes."""
        return self.memory(cost).total <= gpu_memory

    def host_bytes(self, cost: CostModel) -> int:
        """Host memory of a GPU of the stage that takes most."""
        return host_bytes_of(self.config, cost, self.peaks[0].max(axis=0), self.retained)

    def stages(self, cost: CostModel, step: int) -> tuple[StageMemory, ...]:
        """Memory of each stage in one step of the sample."""
        return memory_of_stages(self.config, cost, self.peaks[int(cost.kv_offload), step])


def longest_of(config: PlanConfig, cost: CostModel, memory: StageMemory, gpu_bytes: int) -> tuple[LongestSequence, ...]:
    """The longest sequence that fits beside the other chunks of a plan whose fullest stage takes `memory`.

    None on a pipeline, which may run several sequences at once, and for parts of equal time, which may have room for
    many short ones: there the other chunks of a step decide.
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
    num_steps, dp, pp = sample.sizes.size, config.dp, config.pp
    block = StepBlock(0, 0, np.arange(sample.num_tokens.size, dtype=np.int32), sample.sizes)
    dataset = Dataset(sample.num_tokens, np.maximum(sample.num_tokens - 1, 0), None)
    chunked = chunk_block(block, dataset, config, cost, is_cancelled)
    scheduled = schedule_block(block, chunked, config, cost, is_cancelled)
    rank_end = scheduled.stage_end.reshape(-1, pp).max(axis=1).reshape(num_steps, dp)
    step_of_chunk = np.repeat(np.repeat(np.arange(num_steps), dp), np.diff(chunked.chunks.rank_chunks))
    work, recomputed = (
        sample.weights @ np.bincount(step_of_chunk, weights=values, minlength=num_steps)
        for values in (chunked.cost_ns, chunked.recompute_ns)
    )
    reduction = reduction_ns(
        cost, dp=dp, pp=pp, layers=config.layers(cost.shape.num_layers), placement=config.placement
    )
    extra_ns = 0.0
    if number := extra_forwards(config.loss, cost, has_reference=sample.has_reference):
        together = chunked.chunks, scheduled.actions, chunked.times, dp, pp, config.placement
        extra_ns = number * float(sample.weights @ forwards_ns(*together, slot_ops_on(cost, dp), scheduled.slots))
    moments = []  # of each stage on any rank of each step
    for offloaded in (False, True):
        of_held = memory_rates_of(config, replace(cost, kv_offload=offloaded))
        of_ranks = peak_snapshots(chunked.chunks, scheduled.actions, of_held)
        of_steps = of_ranks.reshape(-1, *of_ranks[:dp].shape)
        moments.append(np.stack([highest_peak(of_step, of_held)[0] for of_step in of_steps]))
    return Outcome(
        config=config,
        cost=cost,
        step_ns=float(sample.weights @ rank_end.max(axis=1)) + extra_ns + reduction,
        extra_ns=extra_ns,
        bubble=1 - float(work - recomputed) / (pp * float(sample.weights @ rank_end.sum(axis=1))),
        recompute_share=float(recomputed / work),
        recompute_ns=_recompute_by_class(sample, chunked, sample.weights[step_of_chunk]),
        peaks=np.stack(moments),
        retained=scheduled.peak_retained_tokens.reshape(-1, pp).max(axis=0),
    )


def _recompute_by_class(sample: Sample, chunked: ChunkedBlock, weights: Float64Array) -> tuple[float, ...]:
    """The sum of what is recomputed over the chunks of each length class, with `weights` [num_chunks]."""
    chunks = chunked.chunks
    recomputed = np.flatnonzero(~chunks.keeps_activations)
    lengths = sample.num_tokens[chunks.sequence_id[chunks.segments[recomputed]]]  # a chunk's part is its first segment
    overs = np.array([each.over for each in sample.classes], np.int64)
    classes = np.searchsorted(overs, lengths, side="left") - 1
    recompute_ns = (weights * chunked.recompute_ns)[recomputed]
    return tuple(np.bincount(classes, weights=recompute_ns, minlength=overs.size).tolist())


def why_plan_only(config: PlanConfig, cost: CostModel) -> str | None:
    """Return what of a plan, as its time and memory are predicted, the runtime cannot run; None if it runs all of it.

    One data-parallel rank has nothing to shard, and "none" runs as "optimizer", which takes less memory than predicted.
    The types of models that run at all are those of the runtime's own proof (docs/models.md). This is the one place to
    change when the runtime learns more.
    """
    reasons = ["tensor parallelism"] if cost.tp > 1 else []
    if cost.shape.is_recurrent and config.dp > 1:
        of_states = ["shared sequences"] if config.cp != "off" else []
        of_states += [f"sharded {cost.sharding}"] if cost.shares("gradients") else []
        reasons += [f"{reason} of a recurrent model" for reason in of_states]
    if cost.load_in_4bit and config.dp * config.pp > 1:
        reasons.append("weights in 4 bits on several GPUs")
    if cost.optimizer not in ELEMENTWISE and config.dp > 1:
        reasons.append(f"{cost.optimizer} on several data-parallel ranks")
    return " and ".join(reasons) or None
