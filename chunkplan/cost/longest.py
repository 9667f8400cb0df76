"""The longest sequence that fits, by how many ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkplan.cost.held import Held
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.layers import stage_parts

#: No sequence is longer: tokens are counted in 32 bits.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LongestSequence:
    """`num_tokens`: of the longest sequence that fits where `num_ranks` ranks share it, 0 where none does, and None
    where no sequence is too long."""

    num_ranks: int
    num_tokens: int | None


def longest_sequences(
    cost: CostModel,
    *,
    dp: int,
    pp: int,
    layers: Sequence[int],
    chunk_size: int,
    k: int,
    activations: int,
    gpu_bytes: int,
    v_shaped: bool = False,
) -> tuple[LongestSequence, ...]:
    """The longest sequence that fits `gpu_bytes` on every stage, for groups of 1, 2, 4 and so on of `dp` ranks.

    Of its keys, values, their gradients and saved inputs every rank of a group has its share, beside all else: states,
    logits, fetched pages, and the activations of `k` chunks of `chunk_size`, or `activations` bytes where a plan holds
    more. One of at most `chunk_size` tokens is not split: it needs none of that.

    There are three moments, see `schedule.holdings.fullest_moments`: `k` chunks before the first backward; after it all
    gradients of keys and values; and with these a chunk that is run again.
    """

    def fits(num_tokens: int, num_ranks: int) -> bool:
        own, kept = -(-num_tokens // num_ranks), k * chunk_size
        if num_ranks > 1:  # of a chunk a rank has two slices at most, each of which may have a token more
            own += 2 * -(-num_tokens // (num_ranks * chunk_size))
        chunk, kept, kv = min(chunk_size, own), min(kept, own), own if num_tokens > chunk_size else 0
        moments = [Held(activations=kept, kv=kv)]
        if kv:
            moments.append(Held(activations=kept - chunk, kv=kv, kv_gradients=kv, last_layer=chunk))
            moments.append(Held(activations=chunk if own > kept else 0, kv=kv, kv_gradients=kv))
        return max(taken(held, own - kept, num_ranks) for held in moments) <= gpu_bytes

    def taken(held: Held, saved: int, num_ranks: int) -> int:
        """By the fullest stage, of those that hold the same, and inputs of `saved` tokens for each virtual stage."""
        stages = stage_memory(
            cost,
            dp=dp,
            layers=layers,
            held=[
                held._replace(inputs=saved * sum(model_stage > 0 for model_stage in of_stage))
                for of_stage in stage_parts(range(len(layers)), pp, v_shaped)
            ],
            chunk_size=chunk_size,
            shared_by=num_ranks,
            v_shaped=v_shaped,
        )
        at_least = activations if pp > 1 or not held.kv_gradients else 0  # a pipeline holds other chunks at any moment
        return max(each.total + max(at_least - each.activations, 0) for each in stages)

    found = []
    for num_ranks in (1 << power for power in range(dp.bit_length()) if dp % (1 << power) == 0):
        low, high = 0, _MOST_TOKENS  # the longest is from `low` on, and below `high`
        if fits(high, num_ranks):
            found.append(LongestSequence(num_ranks=num_ranks, num_tokens=None))
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, num_ranks) else (low, middle)
        found.append(LongestSequence(num_ranks=num_ranks, num_tokens=low))
    return tuple(found)
