"""The longest sequence that fits, by how many ranks share it."""

from __future__ import annotations

from dataclasses import dataclass

from chunkplan.cost.held import Held
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel

#: No sequence is longer: tokens are counted in 32 bits.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LongestSequence:
    """`num_tokens`: of the longest sequence that fits where `num_ranks` ranks share it, 0 where none does, and None
    where no sequence is too long."""

    num_ranks: int
    num_tokens: int | None


def longest_sequences(
    cost: CostModel, *, dp: int, chunk_size: int, k: int, activations: int, gpu_bytes: int
) -> tuple[LongestSequence, ...]:
    """The longest sequence that fits `gpu_bytes` on one stage, for groups of 1, 2, 4 and so on of `dp` ranks.

    Of its keys, values and their gradients every rank of a group has its share, beside all else: states, logits,
    fetched pages, and the activations of `k` chunks of `chunk_size`, or `activations` bytes where a plan holds more.
    One of at most `chunk_size` tokens is not split: it needs none of that.

    There are three moments, see `schedule.holdings.fullest_moments`: `k` chunks before the first backward; after it all
    gradients of keys and values; and with these a chunk that is run again.
    """

    def fits(num_tokens: int, num_ranks: int) -> bool:
        own, chunks = -(-num_tokens // num_ranks), -(-num_tokens // (num_ranks * chunk_size))
        if num_ranks > 1:  # of a chunk a rank has two slices at most, each of which may have a token more
            own += 2 * chunks
        elif chunks > 1:  # short sequences in the last chunk of one that is split count as parts of it
            own = chunks * chunk_size
        chunk, kept, kv = min(chunk_size, own), min(k * chunk_size, own), own if num_tokens > chunk_size else 0
        moments = [Held(activations=kept, kv=kv)]
        if kv:
            moments.append(Held(activations=kept - chunk, kv=kv, kv_gradients=kv, last_layer=chunk))
            moments.append(Held(activations=chunk if own > kept else 0, kv=kv, kv_gradients=kv))
        return max(taken(held, num_ranks) for held in moments) <= gpu_bytes

    def taken(held: Held, num_ranks: int) -> int:
        layers = (cost.shape.num_layers,)
        [memory] = stage_memory(cost, dp=dp, layers=layers, held=[held], chunk_size=chunk_size, shared_by=num_ranks)
        return memory.total + (0 if held.kv_gradients else max(activations - memory.activations, 0))

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
