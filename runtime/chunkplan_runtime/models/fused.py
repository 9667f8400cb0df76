"""Fused kernels in place of what a model computes by several: norms, and activation and product of gated MLPs.

Nothing is known of a model's classes. Each module that may be a norm or a gated MLP is tried: one of its own code
with random weights, in float64, is compared with what the kernel is to compute, and so are the gradients. Where all are
equal, the module calls the kernel from then on; any other stays as it is. Kernels round less often than what they stand
for.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkplan.cost.fused import FusedKernels
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.models.modes import evaluate_in_float64

#: How near a module has to be to a formula, in float64; how large what goes in is; and how wide matrices are then.
_EQUAL, _SIZES, _WIDTH = 1e-12, (1e-4, 1.0, 1e2, 1e4), 16

#: Names of the matrices of gated MLPs: of gate and up, or of both in one, and the last one.
_MATRICES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
)

#: Of a module and what goes into it, what comes out.
_Formula = Callable[[Any, Tensor], Tensor]


class _Kernel(NamedTuple):
    """What a kernel computes of a module and its input, in any dtype; and what calls the kernel."""

    formula: _Formula
    run: _Formula


class Fused(NamedTuple):
    """How many norms and gated MLPs of a model call a kernel, and classes of those that do not, with their number."""

    num_norms: int
    num_mlps: int
    left: Counter[str]

    def __str__(self) -> str:
        words = [f"{self.num_norms} norms", f"{self.num_mlps} gated MLPs"]
        said = " and ".join(word for word, count in zip(words, self[:2], strict=True) if count) or "nothing"
        left = ", ".join(f"{count} {name}" for name, count in sorted(self.left.items()))
        return said + (f"; as they are: {left}" if left else "")


def fuse(modules: Iterable[nn.Module], kernels: FusedKernels, device: torch.device) -> Fused:
    """Let `modules` call fused kernels where they compute the same, on `device`.

    Raises:
        UsageError: the kernels are not there, or not for this device.
    """
    if kernels == "none":
        return Fused(0, 0, Counter())
    norms, mlps = _liger(device) if kernels == "liger" else (_TORCH_NORMS, ())
    found: dict[object, _Kernel | None] = {}
    forwards: dict[object, Callable[..., Tensor]] = {}  # one for all alike, which a compiler takes for the same
    fused, left = [0, 0], Counter[str]()
    for module in modules:
        for place, (is_one, candidates) in enumerate(((_is_norm, norms), (_is_gated_mlp, mlps))):
            if not candidates or not is_one(module):
                continue
            kind = _kind(module)
            if kind not in found:
                found[kind] = next((each for each in candidates if _computes(module, each.formula)), None)
            kernel = found[kind]
            if kernel is None:
                left[type(module).__name__] += 1
            else:
                fused[place] += 1
                own: Any = module
                by_kind = forwards.setdefault((type(module), kernel), _forward_of(type(module), kernel))
                own.forward = MethodType(by_kind, module)
    return Fused(fused[0], fused[1], left)


def _forward_of(kind: Any, kernel: _Kernel) -> Callable[..., Tensor]:
    """The forward of modules of a class that call a kernel.

    That has one dtype and one input; what comes in another dtype, or otherwise, is for the module's own code.
    """

    def forward(module: Any, *given: Any, **how: Any) -> Tensor:
        if len(given) != 1 or how or getattr(module, "weight", given[0]).dtype != given[0].dtype:
            return cast(Tensor, kind.forward(module, *given, **how))
        return kernel.run(module, given[0])

    return forward


def _is_norm(module: nn.Module) -> bool:
    """Whether it may be a norm of the last dimension; those of torch's own classes are one kernel already."""
    is_own = not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and "norm" in type(module).__name__.lower()
    weights = dict(module.named_parameters())
    return is_own and set(weights) <= {"weight", "bias"} and "weight" in weights and _eps(module) is not None


def _is_gated_mlp(module: nn.Module) -> bool:
    return any(all(isinstance(getattr(module, name, None), nn.Linear) for name in names) for names in _MATRICES)


def _multiplied(module: Any, hidden: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What a gated MLP makes whose gate and up are multiplied by `product`."""
    *into, last = next(names for names in _MATRICES if all(hasattr(module, name) for name in names))
    made = [getattr(module, name)(hidden) for name in into]
    gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
    result: Tensor = getattr(module, last)(product(gate, up))
    return result


def _eps(module: nn.Module) -> float | None:
    """What a norm adds to the mean of squares."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(found := getattr(module, name, None), float):
            return found
    return None


def _kind(module: nn.Module) -> object:
    """What is the same of modules that compute the same with other weights."""
    plain = (bool, int, float, str, type(None))
    own = [
        (name, repr(value) if isinstance(value, plain) else id(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    ]
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    buffers = tuple((name, repr(buffer)) for name, buffer in module.named_buffers())
    children = tuple((name, repr(child)) for name, child in module.named_children())
    return type(module), tuple(own), shapes, buffers, children


def _computes(module: nn.Module, formula: _Formula) -> bool:
    """Whether a module of the same code computes `formula`, in float64, forward and backward, and gives its dtype.

    It has other weights, the norm as many as its own has. It is tried in training and evaluation, on inputs of three
    and four dimensions, which are tiny and large too.
    """
    generator = torch.Generator().manual_seed(0)
    small = _small(module, generator)
    width = small.weight.shape[-1] if "weight" in small._parameters else _WIDTH
    modes = [(each, each.training) for each in small.modules()]
    try:
        for is_training in (True, False):
            small.train(is_training)
            for shape in ((2, len(_SIZES), width), (1, 2, len(_SIZES), width)):
                hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
                hidden *= torch.tensor(_SIZES, dtype=torch.float64)[:, None]
                if not _are_equal(small, formula, hidden):
                    return False
        return _has_the_dtype(module, small, width)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes something else, or makes it otherwise
        return False
    finally:
        for each, before in modes:
            each.training = before


def _are_equal(small: Any, formula: _Formula, hidden: Tensor) -> bool:
    """Whether results, and gradients of the input and of all weights, are the same."""
    found = []
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for compute in (small, partial(formula, small)):
        given = hidden.clone().requires_grad_()
        with torch.enable_grad(), evaluate_in_float64(small):
            made = compute(given)
            if not torch.is_tensor(made) or made.shape != hidden.shape or made.dtype != hidden.dtype:
                return False
            found.append([made, *torch.autograd.grad(made, [given, *small.parameters()], upstream)])
    return all(
        bool(((one - other).norm(dim=-1) <= _EQUAL * other.norm(dim=-1)).all())
        for one, other in zip(*found, strict=True)
    )


def _has_the_dtype(module: nn.Module, small: Any, width: int) -> bool:
    """Whether what it makes has the dtype of its input where that is the one of its weights."""
    dtype = next(module.parameters()).dtype
    for each in small.parameters():
        each.data = each.data.to(dtype)
    with torch.no_grad():
        return bool(small(torch.ones(1, 2, width, dtype=dtype)).dtype == dtype)


def _small(module: nn.Module, generator: torch.Generator) -> Any:
    """A module of the same code with random weights on the CPU, in small matrices; what else it has is shared."""
    small = copy.copy(module)
    small._forward_hooks, small._forward_pre_hooks = type(module._forward_hooks)(), type(module._forward_hooks)()
    vars(small).pop("forward", None)
    small._parameters = {
        name: nn.Parameter(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        for name, weight in module.named_parameters(recurse=False)
    }
    small._modules = dict(module._modules)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            width = 2 * _WIDTH if name in ("gate_up_proj", "input_linear") else _WIDTH
            linear = nn.Linear(_WIDTH, width, bias=child.bias is not None, dtype=torch.float64)
            for weight in linear.parameters():
                weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            small._modules[name] = linear
    return small


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], module.weight, _eps(module))


def _offset_rms_norm(module: Any, hidden: Tensor) -> Tensor:
    """With weights that are differences from 1."""
    return F.rms_norm(hidden, hidden.shape[-1:], 1 + module.weight, _eps(module))


def _layer_norm(module: Any, hidden: Tensor) -> Tensor:
    bias = getattr(module, "bias", None)
    return F.layer_norm(hidden, hidden.shape[-1:], module.weight, bias, _eps(module) or 0.0)


def _gated(activation: Callable[[Tensor], Tensor], module: Any, hidden: Tensor) -> Tensor:
    return _multiplied(module, hidden, lambda gate, up: activation(gate) * up)


_TORCH_NORMS = (_Kernel(_rms_norm, _rms_norm), _Kernel(_layer_norm, _layer_norm))


def _liger(device: torch.device) -> tuple[tuple[_Kernel, ...], tuple[_Kernel, ...]]:
    """Kernels of Liger (Hsu et al., arXiv 2410.10989) of norms and of gated MLPs.

    Raises:
        UsageError: they are not installed, or the device is no GPU.
    """
    try:
        norms, silu, gelu = (
            getattr(import_module(f"liger_kernel.ops.{file}"), name)
            for file, name in (
                ("rms_norm", "LigerRMSNormFunction"),
                ("swiglu", "LigerSiLUMulFunction"),
                ("geglu", "LigerGELUMulFunction"),
            )
        )
        is_interpreted = bool(import_module("triton").knobs.runtime.interpret)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--fused-kernels liger needs liger-kernel ({error})", hint=pip_install("liger")) from error
    if device.type != "cuda" and not is_interpreted:
        raise UsageError("kernels of liger run on a GPU only", hint="--fused-kernels torch")

    def norm(offset: float, module: Any, hidden: Tensor) -> Tensor:
        # Weights are multiplied in float32, and what comes back is not written over what others may hold.
        made: Tensor = norms.apply(hidden, module.weight, _eps(module), offset, "gemma", False)
        return made

    def gated(product: Any, module: Any, hidden: Tensor) -> Tensor:
        return _multiplied(module, hidden, product.apply)

    return (
        (
            _Kernel(_rms_norm, partial(norm, 0.0)),
            _Kernel(_offset_rms_norm, partial(norm, 1.0)),
            _Kernel(_layer_norm, _layer_norm),
        ),
        (
            _Kernel(partial(_gated, F.silu), partial(gated, silu)),
            _Kernel(partial(_gated, partial(F.gelu, approximate="tanh")), partial(gated, gelu)),
        ),
    )
