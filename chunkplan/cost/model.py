"""The cost model of a GPU: rates from the model's shape, the hardware, and the options of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

from chunkplan.cost import fused
from chunkplan.cost.adapters import ADAPTER_KERNELS, Adapters
from chunkplan.cost.checkpointing import CHECKPOINTING, Checkpointing, host_link, levels_of, with_again
from chunkplan.cost.fused import FUSED_KERNELS, FusedKernels, Kernels, copied_elements, fewer_kernels
from chunkplan.cost.hardware import (
    MAKES_PLANS,
    MEASURED_QUERIES,
    SHIPPED,
    WHOLE_ONLY,
    AttentionRates,
    Hardware,
    hardware_of,
    load_hardware,
)
from chunkplan.cost.model_config import read_model_config
from chunkplan.cost.optimizers import GRADIENT_BYTES, LOGIT_BYTES, OPTIMIZERS, Optimizer, sums_of
from chunkplan.cost.rates import AttentionTime, GradientSumTime, Rates
from chunkplan.cost.shape import QWEN2_5_7B, Layer, ModelShape
from chunkplan.cost.shape_entries import entries_of_shape, shape_of_entries
from chunkplan.domains import FLAG, MOST, Domain, find_mismatch, one_of, whole
from chunkplan.errors import DataError, UsageError
from chunkplan.options import Advanced, Options, option, options_of


def with_attention(rates: Rates, shape: ModelShape, hardware: Hardware, slower: float, tp: int) -> Rates:
    """`rates` with what they say of attention, which takes `slower` times as long as in bf16, on `tp` GPUs.

    A pair without a mask has half of the 4 FLOPs of one that is seen. A square takes as long as a block with as many
    pairs, and what its mask costs each of its queries. Chunks of several sequences count as many pairs as take as long.
    """
    if not hardware.attention:
        pair = 2e9 * slower * shape.mean(lambda layer: layer.attention_width) / tp / hardware.attention_flops
        return rates._replace(pair=pair)

    def mean(flops: float, of: Callable[[AttentionRates], float], several: bool = False) -> float:
        return 1e9 * slower * flops * shape.mean(partial(_of_layer, hardware, several, of)) / tp

    def of_direction(flops: float, blocks: str, squares: str, several: bool = False) -> AttentionTime:
        pair = mean(flops, lambda rates: 1 / rates.of_many(getattr(rates, blocks)), several)
        mask = mean(flops, lambda rates: 1 / getattr(rates, squares), several) - pair
        return AttentionTime(pair, max(0.0, MEASURED_QUERIES * mask))

    forward, packed = (of_direction(2, "forward_blocks", "forward_squares", several) for several in (False, True))
    ramp = mean(2, lambda rates: rates.ramp_queries / rates.of_many(rates.forward_blocks))
    return rates._replace(
        pair=forward.pair,
        mask=forward.token,
        ramp_queries=ramp / forward.pair if forward.pair else 0.0,
        packed=(packed.pair / forward.pair, (packed.token - forward.token) / forward.pair) if forward.pair else (1, 0),
        attention_backward=of_direction(5, "backward_blocks", "backward_squares"),
    )


def _of_layer(hardware: Hardware, several: bool, of: Callable[[AttentionRates], float], layer: Layer) -> float:
    """`of` applied to the attention rates of a layer, for each element of its width."""
    if not layer.attention_width:
        return 0.0
    return layer.attention_width * of(
        _rates_of(hardware, layer.attention_width / layer.num_query_heads, several or layer.window is not None)
    )


def _rates_of(hardware: Hardware, head_size: float, is_hard: bool) -> AttentionRates:
    """The rates with heads of the size nearest to `head_size`, of the first kernel of a profile that serves them.

    `is_hard`: there are several sequences, or a window. Where no other is known, any kernel counts.
    """

    def serves(kernel: str) -> bool:
        return kernel not in WHOLE_ONLY or (not is_hard and head_size <= WHOLE_ONLY[kernel])

    serving = [each for each in hardware.attention if serves(each.kernel)] or hardware.attention
    of_kernel = [rates for rates in serving if rates.kernel == serving[0].kernel]
    return min(of_kernel, key=lambda rates: abs(rates.head_size - head_size))


Precision = Literal["bf16", "fp32"]

#: Which of optimizer states, gradients and weights are sharded over data-parallel ranks, each with those before it
#: (ZeRO 1, 2 and 3; Rajbhandari et al., arXiv 1910.02054).
Sharding = Literal["none", "optimizer", "gradients", "weights"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "weights")

#: Bytes of a weight, an activation, a key or a value.
NUM_BYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4}

#: Kernels of a layer's forward, as Hugging Face models run them one by one: two norms of 8, seven projections, 10 of
#: rotary embedding, attention, activation, its product, two residuals.
LAYER_KERNELS = 38

#: Tensor parallelism with sequence parallelism (Korthikanti et al., arXiv 2205.05198): the forward of a layer gathers
#: and scatters the tokens around attention and around the MLP.
_COLLECTIVES = 4

#: Entries of a cost model that a file has only where they say something: earlier versions did not have them.
_IF_SET = ("lora_rank", "load_in_4bit", "optimizer", "fused_kernels", "compile")

#: So that what a step has of it fits 64 bits.
_MOST_OVERHEAD_NS = 2.0**40

MODEL = Domain(
    lambda value: isinstance(value, ModelShape),
    "a model's name, its config.json or the folder of it",
    read=read_model_config,
    load=lambda value: read_model_config(value) if isinstance(value, str | Path) else value,
    metavar="NAME|FILE",
    example=f"Qwen/{QWEN2_5_7B.name}",
    is_written_too=True,
)
MODEL_SOURCE = replace(MODEL, holds=lambda value: isinstance(value, str | Path), read=str, load=lambda value: value)
HARDWARE = Domain(
    lambda value: isinstance(value, Hardware),
    "a hardware profile",
    read=load_hardware,
    load=lambda value: load_hardware(value) if isinstance(value, str | Path) else value,
    metavar="NAME|FILE",
    completed=SHIPPED,
    is_written_too=True,
)
MACHINE = "Model and GPUs"

_h100 = cache(partial(load_hardware, "h100"))


@dataclass(frozen=True, kw_only=True)
class CostModel(Options):
    """A model of `shape`, each pipeline stage of it on `tp` GPUs of `hardware`.

    Example: `chunkplan.CostModel(hardware="h200", tp=2)`

    Times are those of a layer on average, wherever it is: stages with as many layers take as long. Memory is that of
    the layers that a stage has (`memory.stage_memory`).

    `tp`: tensor parallelism with sequence parallelism; its collectives are not hidden behind products. `checkpointing`:
    what a chunk in flight holds of each layer (`levels_of`); the rest is run again in its backward. `kv_offload`: keys,
    values and their gradients of split sequences live in host memory; times assume that attention hides the transfers,
    which `offload_chunk_size` gives. `sharding`: what data-parallel ranks share; times with several are `rates_on`.
    `lora_rank`: adapters of matrices of the layers (`adapters.adapted`) are trained in place of all weights.
    `load_in_4bit`: the layers are kept in 4 bits, and made whole for each forward and each backward. `optimizer`:
    memory alone goes by it. `fused_kernels`, `compile`: see `cost.fused`.

    Raises:
        UsageError: `tp` does not divide the attention heads; levels of other layers; 4 bits without adapters, or of
            experts.
    """

    shape: ModelShape = option(
        MODEL,
        "The model: its name on the Hugging Face Hub, or its config.json or folder.",
        group=MACHINE,
        default=QWEN2_5_7B,
        default_words=QWEN2_5_7B.name,
        called="model",
    )
    hardware: Hardware = option(
        HARDWARE,
        f"{', '.join(SHIPPED[:-1])} or {SHIPPED[-1]}, or a profile.",
        group=MACHINE,
        depends=lambda cost: _h100(),
        default_words="h100",
    )
    tp: int = option(whole(1, MOST), "GPUs that share each layer.", group=Advanced(MACHINE), default=1)
    precision: Precision = option(
        one_of("bf16", "fp32"),
        "Precision of weights and activations: bf16 or fp32.",
        group=Advanced(MACHINE),
        default="bf16",
    )
    checkpointing: str = option(
        CHECKPOINTING,
        "Activation checkpointing: none, keep-products, keep-projections, keep-attention, full, or offload (full, with "
        "the inputs of layers in host memory); for runs of layers: full:8,none:20.",
        group=MACHINE,
        default="none",
    )
    kv_offload: bool = option(
        FLAG, "Keep keys and values of split sequences in host memory.", group=MACHINE, default=False, flag=""
    )
    sharding: Sharding = option(
        one_of(*SHARDINGS, metavar="WHAT"),
        "What data-parallel ranks share: none, optimizer (ZeRO-1), gradients (2) or weights (3).",
        group=Advanced(MACHINE),
        default="optimizer",
        default_words="optimizer; with --auto the fastest that fits",
    )
    lora_rank: int = option(
        whole(0, MOST),
        "Train adapters (LoRA) of this rank; 0: all weights.",
        group=MACHINE,
        default=0,
    )
    load_in_4bit: bool = option(
        FLAG,
        "Keep the weights below the adapters in 4 bits (QLoRA).",
        group=Advanced(MACHINE),
        default=False,
    )
    optimizer: Optimizer = option(
        one_of(*OPTIMIZERS, metavar="NAME"),
        "The optimizer: adamw, adamw-8bit, sgd (without momentum) or adafactor.",
        group=Advanced(MACHINE),
        default="adamw",
    )
    fused_kernels: FusedKernels = option(
        one_of(*FUSED_KERNELS, metavar="NAME"),
        "Fused kernels: none, torch (norms) or liger (norms, and gates of MLPs).",
        group=Advanced(MACHINE),
        default="none",
    )
    compile: bool = option(FLAG, "Compile the layers once, by torch.compile.", group=Advanced(MACHINE), default=False)

    def check_together(self) -> None:
        """Refuse more GPUs for a layer than its heads can be divided among, and what is not known of layers here."""
        heads = {"query": self.shape.num_query_heads, "key and value": self.shape.num_kv_heads}
        for name, count in heads.items():
            if count % self.tp:
                raise UsageError(
                    f"tensor parallelism {self.tp} does not divide the {count} {name} heads of {self.shape.name}",
                    hint=f"choose a divisor of {math.gcd(*heads.values())}",
                )
        levels_of(self.checkpointing, self.shape.num_layers)
        if self.load_in_4bit and not self.lora_rank:
            raise UsageError(
                "weights in 4 bits cannot be trained, only adapters on them can", hint="give --lora-rank too"
            )
        if self.load_in_4bit and self.shape.has_experts:
            raise UsageError(
                f"the experts of {self.shape.name} cannot be kept in 4 bits", hint="leave --load-in-4bit out"
            )

    def on_stages(self, pp: int) -> CostModel:
        """This model as the runtime runs it on `pp` pipeline stages: of several none compiles, nor makes plans of
        attention in a step, for which the others might wait."""
        if pp == 1:
            return self
        attention = self.hardware.attention
        others = tuple(each for each in attention if each.kernel not in MAKES_PLANS) or attention
        return replace(self, compile=False, hardware=replace(self.hardware, attention=others))

    @property
    def levels(self) -> tuple[Checkpointing, ...]:
        """The level of activation checkpointing of each layer, first to last."""
        return levels_of(self.checkpointing, self.shape.num_layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of a weight, an activation, a key or a value."""
        return NUM_BYTES[self.precision]

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit and its intermediates; of a compiled loss only those of its gradient."""
        return 2 * self.num_bytes if self.compile else LOGIT_BYTES

    @cached_property
    def kernels(self) -> Kernels:
        """Whose kernels compute what several may: those of compiled layers where these can be."""
        is_compiled = self.compile and fused.compiles(self.shape.kinds, self.levels)
        return "compiled" if is_compiled else self.fused_kernels

    @cached_property
    def adapters(self) -> Adapters:
        """Trained parameters of layers, and bytes of their weights."""
        return Adapters(self.shape, self.lora_rank, self.load_in_4bit, self.num_bytes, self.kernels)

    @cached_property
    def rates(self) -> Rates:
        """Nanoseconds, see `Rates`.

        A token takes the products, the reading and writing of what lies between them, and its share of the collectives,
        a ring each. A chunk takes kernels, messages, and for each weight matrix, whether a token meets it or not, the
        ramp: of a mixture, small chunks leave each expert few tokens. A backward takes as many collectives as two
        forwards here, a little more than it has; what it takes besides to add up gradients is `sums_of`.
        """
        shape, hardware, tp = self.shape, self.hardware, self.tp
        slower = hardware.flops / hardware.fp32_flops if self.precision == "fp32" else 1.0
        product = 2e9 * slower / hardware.flops / tp
        token_bytes = shape.hidden_size * self.num_bytes
        collectives = _COLLECTIVES * token_bytes * (tp - 1) / tp / hardware.ring_bytes(tp, 1)
        copied = (
            shape.mean(lambda layer: copied_elements(self.kernels, layer, shape.hidden_size)) + self.adapters.copied
        )
        copies = (copied * self.num_bytes) / tp / hardware.copy_bytes
        separate = LAYER_KERNELS + ADAPTER_KERNELS * self.adapters.number
        kernels = separate - shape.mean(partial(fewer_kernels, self.kernels))
        launched = fused.COMPILED_LAUNCHES * separate if self.kernels == "compiled" else kernels
        ramp = product * shape.layer_parameters * hardware.ramp_tokens
        unpacking = self.adapters.unpacked_bytes / tp / hardware.copy_bytes * 1e9
        of_logit = fused.COMPILED_LOSS_BYTES if self.compile else fused.LOSS_BYTES
        loss = of_logit * shape.vocab_size / tp / hardware.copy_bytes
        rates = Rates(
            token=product * self._products + (collectives + copies) * 1e9,
            pair=0.0,
            launch=launched * hardware.launch_ns,
            chunk=ramp + kernels * hardware.kernel_ns + (_COLLECTIVES * hardware.link_ns if tp > 1 else 0) + unpacking,
            head=product * shape.embedding_parameters + loss * 1e9,
            link_token=token_bytes / tp / hardware.node_link_bytes * 1e9,
            link=hardware.link_ns,
            sums=self._sums(reduced=self.shares("gradients")),
        )
        rates = with_attention(rates, shape, hardware, slower, tp)
        link = host_link(shape, tp * hardware.host_bytes, self.num_bytes)
        rates = with_again(rates, self.levels, shape, product, ramp, copies * 1e9, link, self.kv_offload)
        return self.adapters.with_frozen(rates, product, ramp + unpacking, hardware.copy_bytes * tp, hardware.kernel_ns)

    def rates_on(self, dp: int) -> Rates:
        """`rates` on `dp` data-parallel ranks, with what they send each other of a layer in every chunk: its gradients
        where these are sharded, its weights too where those are."""
        if not self.shares("gradients"):
            return self.rates
        if dp == 1:
            return self.rates._replace(sums=self._sums(reduced=False))
        link_ns = self.hardware.link_ns
        held, trained = (
            self.shape.mean(of) / self.tp for of in (self.adapters.weight_bytes, self.adapters.trained_parameters)
        )
        gather = self.ring_ns(held, dp) + link_ns if self.shares("weights") else 0.0
        return self.rates._replace(gather=gather, reduce=self.ring_ns(trained * GRADIENT_BYTES, dp) + link_ns)

    def _sums(self, *, reduced: bool) -> GradientSumTime:
        rates = self.hardware.copy_bytes * self.tp, self.logit_bytes
        return sums_of(self.shape, self.adapters, self.num_bytes, *rates, reduced=reduced)

    def shares(self, what: Sharding) -> bool:
        """True if data-parallel ranks shard `what`; each of `SHARDINGS` includes those before it."""
        return SHARDINGS.index(self.sharding) >= SHARDINGS.index(what)

    def ring_ns(self, num_bytes: float, dp: int) -> float:
        """Time for `dp` data-parallel ranks to gather, or reduce and scatter, `num_bytes` in a ring."""
        return num_bytes * (dp - 1) / dp / self.hardware.ring_bytes(dp, self.tp) * 1e9

    @cached_property
    def _products(self) -> float:
        """Multiply-adds of a token in a layer beside attention: with weights, adapters, and with states."""
        states = self.shape.mean(lambda layer: layer.state_elements * layer.state_products)
        return self.shape.active_layer_parameters + states + self.lora_rank * self.adapters.width

    @property
    def chunk_overhead_ns(self) -> int:
        """Fixed time of a chunk's forward, beside tokens and attention pairs, on all model stages together."""
        return round(min(self.shape.num_layers * self.rates.chunk, _MOST_OVERHEAD_NS))

    @property
    def forward_equivalents(self) -> int:
        """Forward and backward of a layer take about as long as this many forwards, less what `Rates.frozen` says."""
        return 3 + round(self.rates.again.token / self.rates.token)

    @property
    def chunk_ns(self) -> int:
        """Fixed time of a chunk's forward and backward, beside tokens and attention pairs, on all model stages."""
        rates, num_layers = self.rates, self.shape.num_layers
        more = round(num_layers * (rates.again.chunk - rates.frozen.chunk) + rates.sums.of_chunk(num_layers))
        return 3 * self.chunk_overhead_ns + min(more, round(_MOST_OVERHEAD_NS))

    @property
    def linear_to_attention_ratio(self) -> float:
        """Attention pairs that take as long as the rest of a token; infinite without attention."""
        rates, num_layers = self.rates, self.shape.num_layers
        frozen = rates.frozen.token + (rates.frozen_head - rates.sums.head.token) / num_layers
        if not rates.pair:
            return math.inf
        pair = rates.pair + rates.backward.pair + rates.again.pair
        heads = (3 * rates.pair + rates.again.pair) / rates.pair * rates.head / num_layers
        token = 3 * rates.token + rates.mask + rates.backward.token + rates.again.token
        return (token + heads - frozen) / pair

    @property
    def offload_chunk_size(self) -> int:
        """Smallest ChunkSize whose transfers of offloaded keys and values take no longer than the attention they feed.

        Both grow with the prefix, so its length does not matter. The backward decides, which fetches gradients (in
        float32, as kept) beside keys and values. 1 where nothing is kept.
        """
        fetched = host_link(self.shape, self.tp * self.hardware.host_bytes, self.num_bytes).with_gradients
        return math.ceil(fetched / (2 * self.rates.backward.pair)) if fetched else 1

    def model_flops(self, num_tokens: float, attention_pairs: float) -> float:
        """FLOPs of a forward and a backward, on all GPUs together: what utilisation counts, without any recompute.

        Frozen weights have no gradients, which are a third of it.
        """
        shape = self.shape
        per_token = shape.num_layers * self._products + shape.embedding_parameters
        frozen = shape.num_layers * shape.active_layer_parameters + shape.embedding_parameters if self.lora_rank else 0
        width = shape.total(lambda layer: layer.attention_width)
        return 6.0 * (per_token * num_tokens + width * attention_pairs) - 2.0 * frozen * num_tokens

    def to_dict(self) -> dict[str, Any]:
        """Strings, flags, numbers and dicts of these, which JSON can hold; `from_dict` makes the same model of them."""
        entries = asdict(self) | {"shape": entries_of_shape(self.shape), "hardware": self.hardware.to_dict()}
        return {
            name: value for name, value in entries.items() if name not in _IF_SET or value != getattr(CostModel, name)
        }

    @classmethod
    def from_dict(cls, values: Any, *, where: str) -> CostModel:
        """The model that `to_dict` wrote.

        Raises:
            DataError: an entry is missing, unknown, or not what it should be.
        """
        hint = "make the file again with this version"
        plain = {name: one.domain for name, one in options_of(cls).items() if name not in ("shape", "hardware")}
        entries = {f"{name}?" if name in _IF_SET else name: domain for name, domain in plain.items()}
        if found := find_mismatch(values, {"shape": {}, "hardware": {}, **entries}, "cost_model"):
            raise DataError(found, where=where, hint=hint)
        try:
            return cls(
                shape=shape_of_entries(values["shape"], where=where, hint=hint),
                hardware=hardware_of(values["hardware"], path="hardware", where=where, hint=hint),
                **{name: values[name] for name in plain if name in values},
            )
        except UsageError as error:
            raise DataError(error.message, where=where, hint=hint) from error
