"""The sizes of a decoder that its FLOPs and its memory depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths count elements per token.

    `mlp_width` is what a token passes through (of a mixture of experts: its experts and the shared ones together),
    `all_mlp_width` what there is of it in weights, `experts_per_token` how many experts a token is sent to (0: dense).
    `tied_embeddings`: the vocabulary head has no weights of its own. `max_positions`: tokens of a sequence at most,
    None where no config says it; neither time nor memory depends on it.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    query_width: int
    kv_width: int
    mlp_width: int
    all_mlp_width: int
    vocab_size: int
    experts_per_token: int = 0
    tied_embeddings: bool = False
    max_positions: int | None = None

    @property
    def layer_parameters(self) -> int:
        """Of one layer's matrices: queries and output, keys and values, gated MLP. What else there is, is under 1%."""
        return self.hidden_size * (2 * self.query_width + 2 * self.kv_width + 3 * self.all_mlp_width)

    @property
    def active_layer_parameters(self) -> int:
        """Of one layer, those that a token passes through."""
        return self.layer_parameters - 3 * self.hidden_size * (self.all_mlp_width - self.mlp_width)

    @property
    def embedding_parameters(self) -> int:
        """Of the embeddings; the vocabulary head has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model; tied embeddings count once."""
        return self.num_layers * self.layer_parameters + (2 - self.tied_embeddings) * self.embedding_parameters

    @property
    def num_active_parameters(self) -> int:
        """Of the whole model, those that a token passes through, with all embeddings as is customary."""
        return self.num_parameters - self.num_layers * (self.layer_parameters - self.active_layer_parameters)


QWEN2_5_7B = ModelShape(
    name="Qwen2.5-7B",
    num_layers=28,
    hidden_size=3584,
    num_query_heads=28,
    num_kv_heads=4,
    query_width=3584,
    kv_width=512,
    mlp_width=18944,
    all_mlp_width=18944,
    vocab_size=152064,
)
