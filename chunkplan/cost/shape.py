"""The sizes of a decoder that its FLOPs and its memory depend on: of each kind of layers, and around them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple


class AttentionPattern(NamedTuple):
    """The earlier tokens that queries see: all, or the `window` that ends with them.

    `restarts`: windows lie side by side instead, and a query sees the part of its own before it (chunked attention).
    `share`: how much of a model's attention sees that, of 1.
    """

    window: int | None = None
    restarts: bool = False
    share: float = 1.0


#: Patterns of a model with full attention in all of its attention layers.
FULL = (AttentionPattern(),)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. Widths count elements of a token, and what a layer does not have is 0.

    Attention: `query_width`, `key_width`, `value_width` and `output_width` over all heads; `latent_width` of the
    latents that replace keys and values in multi-head latent attention. `window` and `window_restarts`: see
    `AttentionPattern`.

    A recurrent layer (linear attention, state space, convolution) has states of `state_elements` for a sequence, and
    goes through them `state_products` times with each token. A layer may have both.

    `normed_width`: queries, keys and latents with norms of their own. `wide_norms`: all norms multiply by their weights
    in float32. `router_width`: input of a router in float32.

    `mixer_parameters` are those of the matrices of attention or its replacement, and `mixed_width` the elements that
    its backward reads beside queries, keys, values and outputs.

    `mlp_width` is that of a token's path (its experts and the shared ones together), `all_mlp_width` that of all
    experts, `experts_per_token` the number of experts of a token (0: dense).
    `is_gated`: an MLP has three matrices, else two.
    """

    num_norms: int = 2
    num_query_heads: int = 0
    num_kv_heads: int = 0
    query_width: int = 0
    key_width: int = 0
    value_width: int = 0
    output_width: int = 0
    latent_width: int = 0
    window: int | None = None
    window_restarts: bool = False
    state_elements: int = 0
    state_products: int = 0
    mixer_parameters: int = 0
    mixed_width: int = 0
    normed_width: int = 0
    wide_norms: bool = False
    router_width: int = 0
    mlp_width: int = 0
    all_mlp_width: int = 0
    experts_per_token: int = 0
    is_gated: bool = True

    @property
    def key_value_width(self) -> int:
        """Keys and values of a token, of all heads."""
        return self.key_width + self.value_width

    @property
    def cached_width(self) -> int:
        """Width per token in the pages of the runtime: that of latents where at most half of keys and values."""
        return self.latent_width if 0 < 2 * self.latent_width <= self.key_value_width else self.key_value_width

    @property
    def expanded_width(self) -> int:
        """Keys and values that are made of latents, for one ChunkSize at a time."""
        return self.key_value_width if self.cached_width < self.key_value_width else 0

    @property
    def attention_width(self) -> float:
        """Multiply-adds of half an attention pair: of its score and of its output."""
        return (self.query_width + self.output_width) / 2

    @property
    def num_experts(self) -> int:
        """The most experts there can be by the widths, a shared one included; 0 in a dense layer."""
        sent = self.experts_per_token
        return -(-self.all_mlp_width * (sent + 1) // self.mlp_width) if sent else 0

    def parameters(self, hidden_size: int) -> int:
        """Parameters of the layer's matrices; all others are under 1%."""
        return self.mixer_parameters + (2 + self.is_gated) * hidden_size * self.all_mlp_width

    def active_parameters(self, hidden_size: int) -> int:
        """Parameters that a token passes through."""
        return self.mixer_parameters + (2 + self.is_gated) * hidden_size * self.mlp_width


#: Layers of some kinds, and how many of each.
Layers = Sequence[tuple[Layer, int]]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of layers of some `kinds`; `order` has the place in `kinds` of each layer, first to last.

    `tied_embeddings`: the vocabulary head has no weights of its own. `max_positions`: tokens of a sequence at most,
    None where no config says it; neither time nor memory depends on it.
    """

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    tied_embeddings: bool = False
    max_positions: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.order)

    @cached_property
    def has_experts(self) -> bool:
        """True if any layer is a mixture of experts."""
        return any(kind.experts_per_token for kind in self.kinds)

    @cached_property
    def num_query_heads(self) -> int:
        """The most that query heads can be divided among in every layer with attention; 0 if none has any."""
        return math.gcd(*(kind.num_query_heads for kind in self.kinds))

    @cached_property
    def num_kv_heads(self) -> int:
        """The most that key and value heads can be divided among in every layer with attention; 0 if none has any."""
        return math.gcd(*(kind.num_kv_heads for kind in self.kinds))

    @property
    def is_recurrent(self) -> bool:
        """True if states pass from one part of a sequence to the next."""
        return any(kind.state_elements for kind in self.kinds)

    @property
    def keeps_latents(self) -> bool:
        """True if pages keep latents, whose heads cannot be sharded."""
        return any(kind.expanded_width for kind in self.kinds)

    @cached_property
    def attention_patterns(self) -> tuple[AttentionPattern, ...]:
        """Patterns of attention with the share of each in all attention; empty if no layer has attention."""
        widths: Counter[AttentionPattern] = Counter()
        for place, count in Counter(self.order).items():
            kind = self.kinds[place]
            widths[AttentionPattern(kind.window, kind.window_restarts)] += round(2 * kind.attention_width) * count
        total = widths.total()
        return tuple(pattern._replace(share=width / total) for pattern, width in widths.items() if width)

    def total(self, of: Callable[[Layer], float]) -> float:
        """The sum over all layers; whole where each is."""
        return sum(of(self.kinds[place]) * count for place, count in Counter(self.order).items())

    def mean(self, of: Callable[[Layer], float]) -> float:
        """The mean over all layers: what a layer takes where which one it is does not matter."""
        return self.total(of) / self.num_layers

    def split(self, layers: Sequence[int]) -> list[list[tuple[Layer, int]]]:
        """Kinds of layers, and the number of each, of consecutive model stages with so many `layers`."""
        bounds = pairwise(accumulate(layers, initial=0))
        counts = (Counter(self.order[start:stop]) for start, stop in bounds)
        return [[(self.kinds[place], count) for place, count in each.items()] for each in counts]

    def first(self, num_layers: int) -> ModelShape:
        """The same model with its first layers only."""
        kinds, order = kinds_and_order(self.kinds[place] for place in self.order[:num_layers])
        return replace(self, kinds=kinds, order=order)

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of a layer's matrices, on average."""
        return self._of_layers(Layer.parameters) / self.num_layers

    @cached_property
    def active_layer_parameters(self) -> float:
        """Parameters of a layer that a token passes through, on average."""
        return self._of_layers(Layer.active_parameters) / self.num_layers

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings; the vocabulary head has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return self._of_layers(Layer.parameters) + (2 - self.tied_embeddings) * self.embedding_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters of the whole model that a token passes through, with all embeddings as is customary."""
        idle = self._of_layers(Layer.parameters) - self._of_layers(Layer.active_parameters)
        return self.num_parameters - idle

    def _of_layers(self, parameters: Callable[[Layer, int], int]) -> int:
        return round(self.total(lambda layer: parameters(layer, self.hidden_size)))


def kinds_and_order(layers: Iterable[Layer]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The `kinds` and the `order` of a model of these layers, first to last."""
    layers = tuple(layers)
    kinds = tuple(dict.fromkeys(layers))
    place = {kind: place for place, kind in enumerate(kinds)}
    return kinds, tuple(place[layer] for layer in layers)


def plain_layer(
    hidden_size: int,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    query_width: int,
    kv_width: int,
    mlp_width: int,
    all_mlp_width: int,
    experts_per_token: int = 0,
) -> Layer:
    """A layer of grouped queries that see everything before them, and a gated MLP, dense or of experts."""
    return Layer(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        query_width=query_width,
        key_width=kv_width,
        value_width=kv_width,
        output_width=query_width,
        mixer_parameters=2 * hidden_size * (query_width + kv_width),
        mlp_width=mlp_width,
        all_mlp_width=all_mlp_width,
        experts_per_token=experts_per_token,
    )


QWEN2_5_7B = ModelShape(
    name="Qwen2.5-7B",
    hidden_size=3584,
    vocab_size=152064,
    kinds=(
        plain_layer(
            3584,
            num_query_heads=28,
            num_kv_heads=4,
            query_width=3584,
            kv_width=512,
            mlp_width=18944,
            all_mlp_width=18944,
        ),
    ),
    order=(0,) * 28,
)
