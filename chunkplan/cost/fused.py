"""Fused kernels: what models compute by several kernels, computed by one of a library, and what that spares.

Norms, and activation and product of a gated MLP. What each takes is counted from what such a kernel reads, writes and
keeps for its backward; no rate was measured. The loss is not among them: the runtime computes loss and gradient in one
place as it is.
"""

from __future__ import annotations

from typing import Literal, get_args

from chunkplan.cost.shape import Layer

#: By whose kernels: none, torch's own, or those of Liger (Hsu et al., arXiv 2410.10989).
FusedKernels = Literal["none", "torch", "liger"]
FUSED_KERNELS: tuple[FusedKernels, ...] = get_args(FusedKernels)

#: Kernels of a norm one by one: to float32, squared, mean, epsilon, root, scaled, back, times the weights.
_NORM_KERNELS = 8

#: Of an element of a norm's input, read or written in a forward, in numbers of the dtype: by these, and by one.
_NORM_COPIES, _FUSED_NORM_COPIES = 18, 2

#: The same of an element of a gated MLP: activation and product, which read gate, up and what lies between; and of one
#: without a gate.
_GATED_COPIES, _FUSED_GATED_COPIES, _PLAIN_COPIES = 5, 3, 2


def fuses_norms(kernels: FusedKernels, layer: Layer) -> bool:
    """Whether norms of a layer are one kernel each. Those of torch do not multiply by weights in float32."""
    return kernels == "liger" or (kernels == "torch" and not layer.wide_norms)


def fuses_gate(kernels: FusedKernels, layer: Layer) -> bool:
    """Whether activation and product of a gated MLP are one kernel; not of experts, which have code of their own."""
    return kernels == "liger" and layer.is_gated and not layer.experts_per_token


def norm_copies(kernels: FusedKernels, layer: Layer) -> int:
    """What a norm's forward reads and writes of each element, in numbers of the dtype."""
    return _FUSED_NORM_COPIES if fuses_norms(kernels, layer) else _NORM_COPIES


def mlp_copies(kernels: FusedKernels, layer: Layer) -> int:
    """What lies between the products of an MLP: the same of each element of its width."""
    if not layer.is_gated:
        return _PLAIN_COPIES
    return _FUSED_GATED_COPIES if fuses_gate(kernels, layer) else _GATED_COPIES


def fewer_kernels(kernels: FusedKernels, layer: Layer) -> int:
    """By how many a layer's forward has fewer: of its norms, and of its MLP."""
    of_norms = layer.num_norms * (_NORM_KERNELS - 1) if fuses_norms(kernels, layer) else 0
    return of_norms + fuses_gate(kernels, layer)


def fused_words(kernels: str) -> list[str]:
    """How fused kernels are named among notes: not at all where there are none."""
    return [] if kernels == "none" else [f"fused kernels of {kernels}"]
