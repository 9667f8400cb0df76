"""Time per layer of a model on a GPU, from which every prediction is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # numpy is imported where there are arrays
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]


class LayerTime(NamedTuple):
    """Nanoseconds of a layer: for each token of a chunk, and for the chunk."""

    token: float = 0.0
    chunk: float = 0.0


class RecomputeTime(NamedTuple):
    """Nanoseconds of the part of a layer's forward that a backward runs again: of a token, of a pair, and of the chunk.

    `exchange`: number of repeated waits for the ranks that share heads, and for those that share pages. `host`: time to
    send or fetch the input of a token, beside the work of the layer. `launch`: time of the host to launch the kernels.
    """

    token: float = 0.0
    pair: float = 0.0
    chunk: float = 0.0
    exchange: tuple[float, float] = (0, 0)
    host: float = 0.0
    launch: float = 0.0

    @classmethod
    def mean(cls, of_layers: Sequence[RecomputeTime]) -> RecomputeTime:
        """The mean over layers."""
        parts = ((one.token, one.pair, one.chunk, *one.exchange, one.host, one.launch) for one in of_layers)
        token, pair, chunk, heads, pages, *others = (sum(each) / len(of_layers) for each in zip(*parts, strict=True))
        return cls(token, pair, chunk, (heads, pages), *others)


class AttentionTime(NamedTuple):
    """Nanoseconds of attention in a layer, one direction: of a pair, and of a token for the mask of its own chunk."""

    pair: float = 0.0
    token: float = 0.0


class GradientSumTime(NamedTuple):
    """Nanoseconds that backwards take to add gradients to their sums, see `sums_of`.

    Of a layer and of embeddings, which the first model stage has, in each chunk; of the head for each token of a chunk,
    and for the chunk.
    """

    layer: float = 0.0
    embeddings: float = 0.0
    head: LayerTime = LayerTime()

    def of_chunk(self, num_layers: int) -> float:
        """Time per chunk, independent of its tokens, on all model stages with `num_layers` layers."""
        return num_layers * self.layer + self.embeddings + self.head.chunk


class Rates(NamedTuple):
    """Nanoseconds of a forward through one layer: per `token`, per `pair`, and the overhead of a `chunk`.

    A `pair` is a query and a key in attention without a mask: a segment of t tokens after p earlier ones has
    t (2 p + t); a causal mask leaves half of them. Attention adds `mask` per token, and a block of p earlier keys has
    as many pairs as if `ramp_queries` more tokens saw them; `packed` has the pairs per pair and per token in a chunk of
    several sequences. `head` is per token in the vocabulary head, on the last model stage only. A backward takes as
    long as two forwards of its layers, except attention where `attention_backward` is given, plus its recomputation
    `again` and the `sums`, minus the gradients of weights that are not trained, `frozen` and, per token in the head,
    `frozen_head`. `launch` is the host's time for a forward, or a backward, of a layer: a faster GPU waits for it.
    `again` is the mean of layers, and `again_of_layers` that of each, empty if all are the same. `weight_half`: the
    weight half of a backward, None: as long as a forward without attention. `link_token` and `link` are per token and
    per message between two stages. `gather` is the time to fetch the sharded weights of a layer, and `reduce` that to
    sum its sharded gradients over data-parallel ranks: both overlap with the layer before, and bound the ops that need
    them from below. `host_kv`: time to fetch offloaded keys and values per token of the prefix in a forward, and with
    gradients in a backward. They share the link with inputs of layers (`RecomputeTime.host`), and with kept attention,
    which takes `host_attention` per token in one direction.
    """

    token: float
    pair: float
    chunk: float
    head: float = 0.0
    again: RecomputeTime = RecomputeTime()
    link_token: float = 0.0
    link: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    frozen: LayerTime = LayerTime()
    frozen_head: float = 0.0
    sums: GradientSumTime = GradientSumTime()
    weight_half: LayerTime | None = None
    again_of_layers: tuple[RecomputeTime, ...] = ()
    host_kv: tuple[float, float] = (0.0, 0.0)
    host_attention: float = 0.0
    mask: float = 0.0
    ramp_queries: float = 0.0
    packed: tuple[float, float] = (1.0, 0.0)
    attention_backward: AttentionTime | None = None
    launch: float = 0.0

    @property
    def backward(self) -> AttentionTime:
        """Time of attention in a backward."""
        return self.attention_backward or AttentionTime(2 * self.pair, 2 * self.mask)

    def of_work(self, num_tokens: _Array, attention_pairs: _Array) -> tuple[_Array, _Array]:
        """A forward and a backward through a layer, of tokens and of so many pairs, without what is run again; [n]."""
        backward = self.backward
        return (
            (self.token + self.mask) * num_tokens + self.pair * attention_pairs,
            (2 * self.token + backward.token) * num_tokens + backward.pair * attention_pairs,
        )

    def again_within(self, start: int, stop: int) -> RecomputeTime:
        """The mean recompute time of the layers from `start` to before `stop`."""
        return RecomputeTime.mean(self.again_of_layers[start:stop]) if self.again_of_layers else self.again

    @property
    def hides_attention(self) -> bool:
        """True if the transfer of attention, beside keys and values in host memory, delays no layer."""
        return self.host_attention <= self.token and self.host_kv[0] <= 2 * self.pair

    @property
    def trained_head(self) -> float:
        """A token's forward and backward in the head."""
        return 3 * self.head - self.frozen_head + self.sums.head.token


#: Forward 1 and backward 2 a token on every model stage, of one layer each, and nothing for links.
UNIT = Rates(token=1.0, pair=0.0, chunk=0.0)
