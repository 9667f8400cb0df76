"""The longest sequence that fits, by how many ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    def fits(num_tokens: int, num_ranks: int) -> bool:
        own, kept = -(-num_tokens // num_ranks), k * chunk_size
        if num_ranks > 1:  # of a chunk a rank has two slices at most, each of which may have a token more
            own += 2 * -(-num_tokens // (num_ranks * chunk_size))
        stages = stage_memory(
            cost,
            dp=dp,
            layers=layers,
            retained_tokens=[min(kept, own)] * pp,
            stage_input_tokens=[
                max(own - kept, 0) * sum(model_stage > 0 for model_stage in of_stage)
                for of_stage in stage_parts(range(len(layers)), pp, v_shaped)
            ],
            kv_tokens=[own if num_tokens > chunk_size else 0] * pp,
            chunk_size=chunk_size,
            shared_by=num_ranks,
            v_shaped=v_shaped,
        )
        return max(each.total + max(activations - each.activations, 0) for each in stages) <= gpu_bytes

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
