"""Optimizers: the moments they keep of each weight, and the time to add gradients to their sums."""

from __future__ import annotations

from typing import Literal

from chunkplan.cost.adapters import Adapters
from chunkplan.cost.rates import GradientSumTime, LayerTime
from chunkplan.cost.shape import Layer, ModelShape

# What backwards take to add gradients to their sums, however few tokens a chunk has: bytes of weights, not of tokens.
#
# A GPU adds the product that is the gradient of a matrix to a sum in float32 at once: the sum is read and written where
# the gradient was written in bf16. Of a matrix that is 6 bytes; one H200 took 3 to 8, and 13 to 15 in two passes: what
# else has a gradient writes it, and it is read from there, added to its sum, and freed. Those are stacks of experts,
# and all of a model in float32. Of embeddings in bf16 only the rows of a chunk's tokens are added, which takes next to
# nothing.


#: Bytes of a weight's gradient in its sum.
GRADIENT_BYTES = 4

#: Logits that are there at once, in numbers, at most: the runtime makes them, and the gradient of the head, for a block
#: of tokens at a time.
LOGITS_AT_ONCE = 2**28


#: Bytes of a logit: itself, its softmax in float32 and its gradient in bf16; or in float32, the latter in one place.
LOGIT_BYTES = 8


def tokens_at_once(vocab_size: int, logit_bytes: int = LOGIT_BYTES) -> int:
    """Tokens of such a block, at most: more where fewer bytes are made of a logit."""
    return max(1, LOGITS_AT_ONCE * LOGIT_BYTES // (logit_bytes * vocab_size))


def sums_of(
    shape: ModelShape, adapters: Adapters, num_bytes: int, copy_bytes: float, logit_bytes: int, *, reduced: bool
) -> GradientSumTime:
    """Time to accumulate the gradients of a model that products write in `num_bytes`.

    `copy_bytes`: per second, of all GPUs that share a layer. `logit_bytes`: see `tokens_at_once`. `reduced`: gradients
    of layers are reduced over data-parallel ranks in every backward: then they are copied to a send buffer, in float32,
    and only a rank's share is accumulated, beside the work of the next layer. The head's gradient is made in whole
    blocks, on average half a block more than a chunk's tokens fill.
    """
    added = 2 * num_bytes + 2 * GRADIENT_BYTES  # written and read, read and written
    is_wide = num_bytes == GRADIENT_BYTES
    in_product = added if is_wide else 2 * GRADIENT_BYTES - num_bytes
    copied = 2 * num_bytes + GRADIENT_BYTES

    def of_layer(layer: Layer) -> float:
        trained = adapters.trained_parameters(layer)
        if reduced:
            return copied * trained
        stacked = trained - layer.mixer_parameters if layer.experts_per_token and not adapters.rank else 0
        return in_product * (trained - stacked) + added * stacked

    nanoseconds = 1e9 / copy_bytes
    ends = 0.0 if adapters.rank else nanoseconds * shape.embedding_parameters
    head = in_product * ends
    return GradientSumTime(
        layer=nanoseconds * shape.mean(of_layer),
        embeddings=added * ends if is_wide else 0.0,
        head=LayerTime(head / tokens_at_once(shape.vocab_size, logit_bytes), head / 2),
    )


Optimizer = Literal["adamw", "adamw-8bit", "sgd", "adafactor"]

#: Of moments in 8 bits as many have a scale in float32 in common (Dettmers et al., arXiv 2110.02861).
BLOCK = 256

#: Bytes of a weight: two moments in float32; two of 8 bits with their scales; nothing; two vectors of a matrix, which
#: are too little to count.
MOMENT_BYTES: dict[Optimizer, float] = {
    "adamw": 8.0,
    "adamw-8bit": 2 * (1 + 4 / BLOCK),
    "sgd": 0.0,
    "adafactor": 0.0,
}

OPTIMIZERS: tuple[Optimizer, ...] = tuple(MOMENT_BYTES)

#: Those that change each number by what is known of it alone, and so work on any part of a matrix.
ELEMENTWISE: tuple[Optimizer, ...] = ("adamw", "adamw-8bit", "sgd")


def moment_bytes(optimizer: Optimizer, hidden_size: int) -> float:
    """Optimizer bytes of a weight; rows that are no whole blocks are float32, as in the trainer."""
    return MOMENT_BYTES["adamw" if optimizer == "adamw-8bit" and hidden_size % BLOCK else optimizer]
