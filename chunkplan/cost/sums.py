"""What backwards take to add gradients to their sums, however few tokens a chunk has: bytes of weights, not of tokens.

A product writes the gradient of a weight, from where it is read, added to a sum in float32, and freed.
"""

from __future__ import annotations

from chunkplan.cost.adapters import Adapters
from chunkplan.cost.rates import LayerTime, Sums
from chunkplan.cost.shape import ModelShape

#: Bytes of a weight's gradient in its sum.
GRADIENT_BYTES = 4

#: Logits that are there at once, in numbers, at most: the runtime makes them, and the gradient of the head, for a block
#: of tokens at a time.
LOGITS_AT_ONCE = 2**28


def tokens_at_once(vocab_size: int) -> int:
    """Tokens of such a block, at most: those whose logits are there at once."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


def sums_of(shape: ModelShape, adapters: Adapters, num_bytes: int, copy_bytes: float, *, reduced: bool) -> Sums:
    """What they take of a model whose gradients have `num_bytes` as products write them.

    `copy_bytes`: a second, of all GPUs that share a layer. `reduced`: gradients of layers are reduced over
    data-parallel ranks in every backward: then they are copied to what is sent, in float32, and what is added to a sum
    is a rank's share, beside the work of the next layer. What a chunk makes of the head is a number of whole blocks, on
    average half a block more than its tokens fill.
    """
    added = 2 * num_bytes + 2 * GRADIENT_BYTES  # written and read, read and written
    copied = 2 * num_bytes + GRADIENT_BYTES
    nanoseconds = 1e9 / copy_bytes
    ends = 0.0 if adapters.rank else added * nanoseconds * shape.embedding_parameters
    return Sums(
        layer=(copied if reduced else added) * nanoseconds * shape.mean(adapters.trained_parameters),
        embeddings=ends,
        head=LayerTime(ends / tokens_at_once(shape.vocab_size), ends / 2),
    )
