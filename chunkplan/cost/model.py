"""What chunks of a model cost on a GPU: rates from the model's shape, the hardware, and how the model is run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Literal, get_args

import numpy as np

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.cost.durations import Float64Array, Rates, squares_of, whole_ns
from chunkplan.cost.entries import from_entries
from chunkplan.cost.hardware import Hardware, load_hardware
from chunkplan.cost.shape import QWEN2_5_7B, ModelShape
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.manifest_entries import FLAG, find_mismatch, one_of, or_null, whole

Checkpointing = Literal["none", "full"]
Precision = Literal["bf16", "fp32"]

#: Bytes of a weight, an activation, a key or a value.
NUM_BYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4}

#: Kernels of a layer's forward, as Hugging Face models run them one by one: two norms of 8, seven projections, 10 of
#: rotary embedding, attention, activation, its product, two residuals.
_KERNELS = 38

#: Tensor parallelism with sequence parallelism (Korthikanti et al., arXiv 2205.05198): the forward of a layer gathers
#: and scatters the tokens around attention and around the MLP.
_COLLECTIVES = 4

#: Of a logit in the forward of a loss in float32: written and read in bf16, written and read in float32, and written.
_LOSS_BYTES = 16


#: So that what a step has of it fits 64 bits.
_MOST_OVERHEAD_NS = 2.0**40


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A model of `shape`, each pipeline stage of it on `tp` GPUs of `hardware`.

    `tp`: tensor parallelism with sequence parallelism; its collectives are not hidden behind products. `checkpointing`:
    "full" keeps the input of each layer of a chunk and recomputes the layer in its backward. `kv_offload`: keys, values
    and their gradients of split sequences live in host memory; times assume that the transfers hide behind attention,
    which `offload_chunk_size` tells. `weight_shards`: data-parallel ranks that share the weights (ZeRO-3) and fetch
    those of a layer while the layer before is at work.

    Raises:
        UsageError: `tp` does not divide the attention heads.
    """

    shape: ModelShape = QWEN2_5_7B
    hardware: Hardware = field(default_factory=cache(partial(load_hardware, "h100")))
    tp: int = 1
    precision: Precision = "bf16"
    checkpointing: Checkpointing = "none"
    kv_offload: bool = False
    weight_shards: int = 1

    def __post_init__(self) -> None:
        heads = {"query": self.shape.num_query_heads, "key and value": self.shape.num_kv_heads}
        for name, count in heads.items():
            if self.tp < 1 or count % self.tp:
                raise UsageError(
                    f"tensor parallelism {self.tp} does not divide the {count} {name} heads of {self.shape.name}",
                    hint=f"choose a divisor of {math.gcd(*heads.values())}",
                )

    @property
    def num_bytes(self) -> int:
        """Of a weight, an activation, a key or a value."""
        return NUM_BYTES[self.precision]

    @cached_property
    def rates(self) -> Rates:
        """Nanoseconds, see `Rates`.

        A token takes the products, the reading and writing of what lies between them, and its share of the collectives,
        a ring each. A chunk takes kernels, messages, and for each weight matrix, whether a token meets it or not, the
        ramp: of a mixture, small chunks leave each expert few tokens. A backward takes as many collectives as two
        forwards here, a little more than it has.
        """
        shape, hardware, tp = self.shape, self.hardware, self.tp
        slower = hardware.flops / hardware.fp32_flops if self.precision == "fp32" else 1.0
        product = 2e9 * slower / hardware.flops / tp
        ring = hardware.gpu_link_bytes if tp <= hardware.gpus_per_node else hardware.node_link_bytes
        token_bytes = shape.hidden_size * self.num_bytes
        collectives = _COLLECTIVES * token_bytes * (tp - 1) / tp / ring
        copies = (self._copied_elements() * self.num_bytes) / tp / hardware.copy_bytes
        loss = _LOSS_BYTES * shape.vocab_size / tp / hardware.copy_bytes
        return Rates(
            token=product * shape.active_layer_parameters + (collectives + copies) * 1e9,
            square=2e9 * slower * shape.query_width / tp / hardware.attention_flops,
            chunk=product * shape.layer_parameters * hardware.ramp_tokens
            + _KERNELS * hardware.kernel_ns
            + (_COLLECTIVES * hardware.link_ns if tp > 1 else 0),
            head=product * shape.embedding_parameters + loss * 1e9,
            layer_passes=3 if self.checkpointing == "full" else 2,
            link_token=token_bytes / tp / hardware.node_link_bytes * 1e9,
            link=hardware.link_ns,
            gather=0.0 if self.weight_shards == 1 else self._gather_ns(),
        )

    def _gather_ns(self) -> float:
        """Of the weights of a layer, a ring."""
        num_bytes = self.shape.layer_parameters * self.num_bytes / self.tp
        ring = self.ring_bytes(self.weight_shards)
        return num_bytes * (self.weight_shards - 1) / self.weight_shards / ring * 1e9 + self.hardware.link_ns

    def ring_bytes(self, dp: int) -> float:
        """Bytes a second of a ring of `dp` data-parallel ranks, whose GPUs lie `tp` apart."""
        in_a_node = dp * self.tp <= self.hardware.gpus_per_node
        return self.hardware.gpu_link_bytes if in_a_node else self.hardware.node_link_bytes

    def _copied_elements(self) -> int:
        """Of a token in a layer's forward, read or written by the `_KERNELS` beside products and attention.

        Two norms in float32 (18 h each), two residuals (3 h each), rotary embedding, activation and its product; of a
        mixture, the way to the experts and back.
        """
        shape = self.shape
        rotary = 10 * (shape.query_width + shape.kv_width)
        return (42 + 4 * shape.experts_per_token) * shape.hidden_size + rotary + 5 * shape.mlp_width

    @property
    def chunk_overhead_ns(self) -> int:
        """What a chunk's forward takes beside its tokens and squares, on all model parts together."""
        return round(min(self.shape.num_layers * self.rates.chunk, _MOST_OVERHEAD_NS))

    @property
    def passes(self) -> int:
        """Forward and backward of a layer take as long as this many forwards."""
        return 1 + self.rates.layer_passes

    @property
    def linear_over_square(self) -> float:
        """How many squares a token takes as long as."""
        return (self.rates.token + self.rates.head / self.shape.num_layers) / self.rates.square

    @property
    def offload_chunk_size(self) -> int:
        """From this ChunkSize on, transfers of offloaded keys and values take no longer than the attention they feed.

        Both grow with the prefix, so its length does not matter. The backward decides, which fetches gradients (in
        float32, as kept) beside keys and values, and takes two forwards.
        """
        fetched = 2 * self.shape.kv_width / self.tp * (self.num_bytes + 4) / self.hardware.host_bytes * 1e9
        return math.ceil(fetched / (2 * 2 * self.rates.square))

    def recompute_ns(self, num_tokens: IntArray, prefix_tokens: IntArray) -> Int64Array:
        """Time of what is done twice with segments whose chunks keep no activations, without overhead; both [n].

        That is a forward through all layers: the head is left out the first time, see `durations`.
        """
        return whole_ns(self._layers(num_tokens, squares_of(num_tokens, prefix_tokens)))

    def work_ns(self, num_tokens: IntArray, squares: Float64Array) -> Int64Array:
        """Time of a forward and a backward through all model parts, without overhead and recompute; both [n]."""
        head = self.rates.head * num_tokens.astype(np.float64)
        return whole_ns(self.passes * self._layers(num_tokens, squares) + 3 * head)

    def _layers(self, num_tokens: IntArray, squares: Float64Array) -> Float64Array:
        rates = self.rates
        return self.shape.num_layers * (rates.token * num_tokens.astype(np.float64) + rates.square * squares)

    def model_flops(self, num_tokens: float, squares: float) -> float:
        """FLOPs of a forward and a backward, on all GPUs together: what utilisation counts, without any recompute."""
        shape = self.shape
        per_token = shape.num_layers * shape.active_layer_parameters + shape.embedding_parameters
        return 6.0 * (per_token * num_tokens + shape.num_layers * shape.query_width * squares)

    def to_dict(self) -> dict[str, Any]:
        """Strings, flags, numbers and dicts of these, which JSON can hold; `from_dict` makes the same model of them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any, *, where: str) -> CostModel:
        """The model that `to_dict` wrote.

        Raises:
            DataError: an entry is missing, unknown, or not what it should be.
        """
        hint = "make the file again with this version"
        expected = {
            "shape": {},
            "hardware": {},
            "tp": whole(1),
            "precision": one_of(*get_args(Precision)),
            "checkpointing": one_of(*get_args(Checkpointing)),
            "kv_offload": FLAG,
            "weight_shards": whole(1),
        }
        if found := find_mismatch(values, expected, "cost_model"):
            raise DataError(found, where=where, hint=hint)
        shape = {"max_positions": None} | values["shape"]  # plans before version 5 do not have it
        tests = {"experts_per_token": whole(), "max_positions": or_null(whole(1))}
        hardware = values["hardware"]
        try:
            return cls(
                shape=from_entries(ModelShape, shape, path="shape", where=where, hint=hint, **tests),
                hardware=from_entries(Hardware, hardware, path="hardware", where=where, hint=hint),
                tp=values["tp"],
                precision=values["precision"],
                checkpointing=values["checkpointing"],
                kv_offload=values["kv_offload"],
                weight_shards=values["weight_shards"],
            )
        except UsageError as error:
            raise DataError(error.message, where=where, hint=hint) from error
