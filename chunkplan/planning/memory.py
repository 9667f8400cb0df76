"""Memory of a plan: peak memory of each stage, host memory of nodes, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.activations import runs_of
from chunkplan.cost.memory import StageMemory, memory_rates, split_gradient_bytes, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import KV_GRADIENT_BYTES, MemoryRates, ResidentTokens, kept_attention_bytes
from chunkplan.layers import STRAIGHT, StagePlacement, stage_parts
from chunkplan.schedule.holdings import ACTIVATIONS, ATTENTION_ON_HOST, KV

# Host memory of the GPUs of each pipeline stage: inputs of layers, keys and values, and attention, that lie there.


def stage_host_bytes(
    cost: CostModel,
    *,
    layers: Sequence[int],
    retained_tokens: Sequence[int],
    kv_tokens: Sequence[int],
    attention_tokens: Sequence[int],
    placement: StagePlacement = STRAIGHT,
) -> tuple[int, ...]:
    """Peak host memory of a GPU of each stage: inputs of layers, offloaded KV with gradients, attention.

    Torch's rounding of page-locked memory to powers of two is left out. `retained_tokens`, `kv_tokens` and
    `attention_tokens`: the most tokens of each stage with activations, with keys and values, and with attention kept on
    the host, at any time. The other arguments are those of `stage_memory`.
    """
    pp = len(retained_tokens)
    stages = []
    parts = stage_parts(runs_of(cost, layers), pp, placement)
    for own, retained, held, kept in zip(parts, retained_tokens, kv_tokens, attention_tokens, strict=True):
        most = max(sum(count for _, level, count in part if level == "offload") for part in own)
        inputs = retained * most * cost.shape.hidden_size * cost.num_bytes / cost.tp
        of_token = sum(count * layer.cached_width for part in own for layer, _, count in part) / cost.tp
        offloaded = held * of_token * (cost.num_bytes + KV_GRADIENT_BYTES) if cost.kv_offload else 0
        stages.append(ceil(inputs + offloaded + kept * max(kept_attention_bytes(cost, own))))
    return tuple(stages)


#: No sequence is longer: tokens are counted in 32 bits.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LongestSequence:
    """`num_tokens`: of the longest sequence that fits where `num_ranks` ranks share it, 0 where none does, and None
    where no sequence is too long. None is longer than the model has positions."""

    num_ranks: int
    num_tokens: int | None


def longest_sequences(
    cost: CostModel, *, dp: int, chunk_size: int, k: int, activations: int, gpu_bytes: int
) -> tuple[LongestSequence, ...]:
    """The longest sequence that fits `gpu_bytes` on one stage, for groups of 1, 2, 4 and so on of `dp` ranks.

    Every rank of a group holds its share of the keys, values and their gradients, beside states, logits, fetched pages,
    and the activations of `k` chunks of `chunk_size`, or `activations` bytes if a plan holds more. A sequence of at
    most `chunk_size` tokens is not split, and has no keys and values to keep.

    There are three candidates for the peak, see `schedule.holdings.peak_snapshots`: `k` chunks before the first
    backward; all gradients of keys and values after it; and these with a recomputed chunk.
    """

    def fits(num_tokens: int, num_ranks: int) -> bool:
        own, chunks = -(-num_tokens // num_ranks), -(-num_tokens // (num_ranks * chunk_size))
        if num_ranks > 1:  # of a chunk a rank has two slices at most, each of which may have a token more
            own += 2 * chunks
        elif chunks > 1:  # short sequences in the last chunk of one that is split count as parts of it
            own = chunks * chunk_size
        chunk, kept, kv = min(chunk_size, own), min(k * chunk_size, own), own if num_tokens > chunk_size else 0
        moments = [ResidentTokens(activations=kept, kv=kv)]
        if kv:
            moments.append(ResidentTokens(activations=kept - chunk, kv=kv, kv_gradients=kv, last_layer=chunk))
            moments.append(ResidentTokens(activations=chunk if own > kept else 0, kv=kv, kv_gradients=kv))
        return max(taken(held, num_ranks) for held in moments) <= gpu_bytes

    def taken(held: ResidentTokens, num_ranks: int) -> int:
        layers = (cost.shape.num_layers,)
        [memory] = stage_memory(cost, dp=dp, layers=layers, held=[held], chunk_size=chunk_size, shared_by=num_ranks)
        return memory.total + (0 if held.kv_gradients else max(activations - memory.activations, 0))

    found = []
    for num_ranks in (1 << power for power in range(dp.bit_length()) if dp % (1 << power) == 0):
        low, high = 0, cost.shape.max_positions or _MOST_TOKENS  # the longest is from `low` on, and below `high`
        if fits(high, num_ranks):
            found.append(LongestSequence(num_ranks=num_ranks, num_tokens=cost.shape.max_positions))
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, num_ranks) else (low, middle)
        found.append(LongestSequence(num_ranks=num_ranks, num_tokens=low))
    return tuple(found)


def memory_rates_of(config: PlanConfig, cost: CostModel) -> MemoryRates:
    """The `MemoryRates` of the stages of a configuration."""
    return memory_rates(
        cost,
        config.pp,
        config.layers(cost.shape.num_layers),
        config.chunk_size,
        shared_by=config.cp_sizes[-1],
        placement=config.placement,
    )


def memory_of_stages(config: PlanConfig, cost: CostModel, moments: Int64Array) -> tuple[StageMemory, ...]:
    """Memory of each stage that holds `moments` int64 [pp, 8], see `peak_snapshots`."""
    stages = stage_memory(
        cost,
        dp=config.dp,
        layers=config.layers(cost.shape.num_layers),
        held=[ResidentTokens(*moment) for moment in moments.tolist()],
        chunk_size=config.chunk_size,
        shared_by=config.cp_sizes[-1],
        placement=config.placement,
    )
    if not config.splits_backwards:
        return stages
    layers = config.layers(cost.shape.num_layers)
    whole = split_gradient_bytes(cost, dp=config.dp, pp=config.pp, layers=layers, placement=config.placement)
    return tuple(
        replace(each, gradients=each.gradients + gradients) for each, gradients in zip(stages, whole, strict=True)
    )


def host_bytes_of(config: PlanConfig, cost: CostModel, moments: Int64Array, retained: Int64Array | None = None) -> int:
    """Host memory of a GPU of the stage that takes most, where stages hold `moments` int64 [pp, 8], see
    `peak_snapshots`, and at most the activations of `retained` [pp] tokens; None: of those at these moments."""
    of_stages = stage_host_bytes(
        cost,
        layers=config.layers(cost.shape.num_layers),
        retained_tokens=(moments[:, ACTIVATIONS] if retained is None else retained).tolist(),
        kv_tokens=moments[:, KV].tolist(),
        attention_tokens=moments[:, ATTENTION_ON_HOST].tolist(),
        placement=config.placement,
    )
    return max(of_stages)
