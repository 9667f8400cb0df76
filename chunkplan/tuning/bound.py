"""Lower bounds of a configuration's time and memory, in closed form from the cost model and sums over a step's lengths.

No sequence is split, packed, scheduled or simulated.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array, attention_pairs_of
from chunkplan.cost.memory import StageMemory, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import AttentionPattern
from chunkplan.cost.states import reduction_ns
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.layers import stage_parts
from chunkplan.schedule.forwards import extra_forwards
from chunkplan.tuning.sampling import Sample

#: Tokens whose activations take more than gradients take at the end of a step.
_NEVER_AT_END = 1 << 40


class WorkOfSteps(NamedTuple):
    """Work of some steps, all float64 [num_steps], and the lengths of their sequences, int32 [n].

    `tokens` and attention `pairs` of all sequences of a step, and of its longest one; see `attention_pairs_of`.
    `weights`: the share of all steps that each stands for. `first`: where a step's sequences begin, int64 [num_steps].
    """

    tokens: Float64Array
    pairs: Float64Array
    longest: Float64Array
    longest_pairs: Float64Array
    weights: Float64Array
    num_tokens: Int32Array
    first: Int64Array


def work_of_steps(sample: Sample, patterns: tuple[AttentionPattern, ...]) -> WorkOfSteps:
    """Sum up the steps of a sample for a model with `patterns` of attention."""
    first, lengths = sample.first_of_step[:-1], sample.num_tokens.astype(np.int64)
    pairs = attention_pairs_of(lengths, 0 * lengths, patterns)
    of_tokens, of_pairs = (
        (np.add.reduceat(each, first), np.maximum.reduceat(each, first)) for each in (lengths.astype(np.float64), pairs)
    )
    return WorkOfSteps(
        tokens=of_tokens[0],
        pairs=of_pairs[0],
        longest=of_tokens[1],
        longest_pairs=of_pairs[1],
        weights=sample.weights,
        num_tokens=sample.num_tokens,
        first=first,
    )


def step_bound_ns(work: WorkOfSteps, config: PlanConfig, cost: CostModel) -> float:
    """The least time of a step with its reduction, on average, in nanoseconds; no simulation of `cost` finds less.

    The maximum over stages of three bounds: an even share for each rank of all work, of the overhead of chunks, and of
    the recomputation that K leaves, without attention, which may be kept; the same for the ranks that may share the
    longest sequence; and the path of its chunks through the other stages and back. Forwards that the loss adds
    are work too.
    """
    rates, pp = cost.rates_on(config.dp), config.pp
    extra = extra_forwards(config.loss, cost, has_reference=True)
    layers, together = config.layers(cost.shape.num_layers), config.cp_sizes[-1]
    k = max([config.k, *(k for _, k in config.k_by_length or ())])
    kept = k * config.chunk_size * together
    of_sequences = np.maximum(work.num_tokens.astype(np.float64) - kept, 0.0)
    again = np.add.reduceat(of_sequences, work.first)  # tokens that are forwarded twice
    stops = list(accumulate(layers))
    fixed = 3 * rates.chunk - rates.frozen.chunk + rates.sums.layer
    sent, launched = 2 * rates.gather + rates.reduce, 3 * rates.launch

    def spent(stage: tuple[int, ...], tokens: Float64Array, pairs: Float64Array, again: Float64Array) -> Float64Array:
        """Nanoseconds that a stage of these model stages takes for chunks of so many tokens in all, [num_steps]."""
        num_chunks = np.ceil(tokens / config.chunk_size)
        total: Float64Array = np.zeros_like(tokens)
        for each in stage:
            count, run_again = layers[each], rates.again_within(stops[each] - layers[each], stops[each])
            forward, backward = rates.of_work(tokens, pairs)
            repeated = (run_again.token - rates.frozen.token) * tokens + run_again.pair * pairs
            own = (
                (1 + extra) * forward
                + backward
                + repeated
                + rates.token * again
                + (fixed + run_again.chunk) * num_chunks
            )
            head = (rates.trained_head + extra * rates.head) * tokens if each == len(layers) - 1 else 0.0
            own = np.maximum(count * np.maximum(own, sent * num_chunks) + head, count * launched * num_chunks)
            total = total + own
        return total

    parts = [tuple(part) for part in stage_parts(range(len(layers)), pp, config.placement)]
    everything = [spent(part, work.tokens, work.pairs, again) / config.dp for part in parts]
    of_longest = np.maximum(work.longest - kept, 0.0)
    alone = [spent(part, work.longest, work.longest_pairs, of_longest) / together for part in parts]
    slowest = np.maximum(np.max(everything, axis=0), np.max(alone, axis=0))
    reduction = reduction_ns(cost, dp=config.dp, pp=pp, layers=layers, placement=config.placement)
    return float(work.weights @ slowest) + reduction


def fewest_bytes(longest: int, config: PlanConfig, cost: CostModel) -> int:
    """The least memory of the fullest stage, in bytes, for data whose longest sequence has `longest` tokens.

    Its last K chunks and all its keys and values are held when the first backward starts, on every stage of a pipeline.
    """
    own = longest // config.cp_sizes[-1]
    k = [config.k, *(k for _, k in config.k_by_length or ())][-1]
    kept = kv = 0
    if own > config.chunk_size:
        first = max(0, -(-own // config.chunk_size) - k) * config.chunk_size  # what K leaves to be run again
        kept, kv = own - first, own
    layers = config.layers(cost.shape.num_layers)

    def stages(held: ResidentTokens) -> tuple[StageMemory, ...]:
        all_alike, chunk_size, placement = [held] * config.pp, config.chunk_size, config.placement
        return stage_memory(
            cost, dp=config.dp, layers=layers, held=all_alike, chunk_size=chunk_size, placement=placement
        )

    # If the peak is at the end of a step, gradients take the memory that activations have freed.
    now, at_end, never = (
        stages(ResidentTokens(kept, kv=kv)),
        stages(ResidentTokens()),
        stages(ResidentTokens(_NEVER_AT_END)),
    )
    return max(
        max(one.total - one.gradients + full.gradients, end.total)
        for one, end, full in zip(now, at_end, never, strict=True)
    )
