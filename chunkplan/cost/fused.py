"""Savings of fused kernels of a library or a compiler, which replace several kernels of a model.

Norms, and activation and product of a gated MLP; in compiled layers also rotary embedding, and residuals with norms.
Their cost is counted from the bytes that such a kernel reads, writes and keeps for its backward. The loss is fused if
layers are compiled: else the runtime computes loss and gradient in one place anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from chunkplan.cost.shape import Layer

#: By whose kernels: none, torch's own, or those of Liger (Hsu et al., arXiv 2410.10989).
FusedKernels = Literal["none", "torch", "liger"]
FUSED_KERNELS: tuple[FusedKernels, ...] = get_args(FusedKernels)

#: The same, or those of compiled layers.
Kernels = Literal[FusedKernels, "compiled"]

#: Of an element that is embedded by its position, read or written in a forward, in numbers of the dtype; compiled, once
#: each.
_ROTARY_COPIES, _COMPILED_ROTARY_COPIES = 10, 2

#: By how many kernels the forward of a compiled layer has fewer besides: of rotary embedding, and a residual.
_COMPILED_FEWER = 10

#: Of what the host takes for a layer, where it is compiled: guards and calls of graphs cost most of what they spare.
#: Measured on the host of an H200, of 4 and of 28 layers: 0.7 to 1.1.
COMPILED_LAUNCHES = 0.9

#: Of a logit in the forward of a loss in float32: written and read in bf16, written and read in float32, and written.
#: Compiled, as measured: 1.23 ms for what takes 3.78 otherwise.
LOSS_BYTES, COMPILED_LOSS_BYTES = 16, 5

#: Kernels of a norm one by one: to float32, squared, mean, epsilon, root, scaled, back, times the weights.
_NORM_KERNELS = 8

#: Of an element of a norm's input, read or written in a forward, in numbers of the dtype: by these, and by one.
_NORM_COPIES, _FUSED_NORM_COPIES = 18, 2

#: The same of an element of a gated MLP: activation and product, which read gate, up and what lies between; and of one
#: without a gate.
_GATED_COPIES, _FUSED_GATED_COPIES, _PLAIN_COPIES = 5, 3, 2


def compiles(layers: Sequence[Layer], levels: Sequence[str]) -> bool:
    """True if layers can be compiled: not with states or keys made of latents, nor with checkpoints of results of
    products, for which every operator has to be visible."""
    refused = any(layer.state_elements or layer.latent_width for layer in layers)
    return not refused and not {"keep-products", "keep-projections"} & {*levels}


def fuses_norms(kernels: Kernels, layer: Layer) -> bool:
    """True if the norms of a layer are one kernel each. Those of torch do not multiply by weights in float32."""
    return kernels in ("liger", "compiled") or (kernels == "torch" and not layer.wide_norms)


def fuses_gate(kernels: Kernels, layer: Layer) -> bool:
    """True if activation and product of a gated MLP are one kernel; not for experts, which have their own code."""
    return kernels in ("liger", "compiled") and layer.is_gated and not layer.experts_per_token


def copied_elements(kernels: Kernels, layer: Layer, hidden_size: int) -> int:
    """Elements per token that kernels beside products and attention read or write in a layer's forward.

    Norms in float32 (18 h each, or fused 2 h), each with a residual (3 h each), rotary embedding, activation and,
    where there is a gate, its product; of a mixture, the way to the experts and back; of a recurrent layer what it
    writes and reads again.
    """
    of_norm = _FUSED_NORM_COPIES if fuses_norms(kernels, layer) else _NORM_COPIES
    of_gate = _FUSED_GATED_COPIES if fuses_gate(kernels, layer) else _GATED_COPIES
    of_rotary = _COMPILED_ROTARY_COPIES if kernels == "compiled" else _ROTARY_COPIES
    around = ((of_norm + 3) * layer.num_norms + 4 * layer.experts_per_token) * hidden_size
    of_mlp = (of_gate if layer.is_gated else _PLAIN_COPIES) * layer.mlp_width
    return around + of_rotary * (layer.query_width + layer.key_width) + 2 * layer.mixed_width + of_mlp


def fewer_kernels(kernels: Kernels, layer: Layer) -> int:
    """Number of kernels that fusing saves in a layer's forward: in its norms, its MLP and, compiled, elsewhere."""
    of_norms = layer.num_norms * (_NORM_KERNELS - 1) if fuses_norms(kernels, layer) else 0
    return of_norms + fuses_gate(kernels, layer) + (_COMPILED_FEWER if kernels == "compiled" else 0)


def fused_words(kernels: str, compiled: bool = False) -> list[str]:
    """Notes that name fused kernels and compiled layers; none where there are none."""
    return ([] if kernels == "none" else [f"fused kernels of {kernels}"]) + ["compiled layers"] * compiled
