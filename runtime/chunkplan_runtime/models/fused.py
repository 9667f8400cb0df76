"""Fused kernels that replace several kernels of a model: norms, and activation and product of gated MLPs.

Those of Liger (Hsu et al., arXiv 2410.10989) are put in by its own patcher. Those of torch are norms: each module that
may be one is compared in float64 with the kernel's formula. Fused kernels round less often than those they replace.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkplan.cost.fused import FusedKernels
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.models.parts import ModelStage, decoder_of, evaluate_in_float64, layers_of, whole_of

#: How near a norm has to be to a formula, in float64, and how large what goes in is.
_EQUAL, _SIZES = 1e-12, torch.tensor([1e-4, 1.0, 1e2, 1e4], dtype=torch.float64)

#: Of a norm and what goes into it, what comes out.
_Formula = Callable[[Any, Tensor], Tensor]


class Fused(NamedTuple):
    """The numbers of norms and gated MLPs that call a kernel, and of norms that do not, by class."""

    num_norms: int
    num_mlps: int
    left: Counter[str]

    def __str__(self) -> str:
        numbers = {"norms": self.num_norms, "gated MLPs": self.num_mlps}
        said = " and ".join(f"{number} {name}" for name, number in numbers.items() if number) or "nothing"
        left = ", ".join(f"{count} {name}" for name, count in sorted(self.left.items()))
        return said + (f"; as they are: {left}" if left else "")


#: Formulas of torch's kernels.
_FORMULAS: tuple[_Formula, ...] = (
    lambda norm, x: F.rms_norm(x, x.shape[-1:], norm.weight, _eps(norm)),
    lambda norm, x: F.layer_norm(x, x.shape[-1:], norm.weight, getattr(norm, "bias", None), _eps(norm) or 0.0),
)


def fuse(model: nn.Module, kernels: FusedKernels, device: torch.device) -> Fused:
    """Patch modules of a model, or of a stage of it, to call fused kernels where these compute the same, on `device`.

    Raises UsageError where the kernels are not there, or not for this device.
    """
    if kernels == "none":
        return Fused(0, 0, Counter())
    modules: list[Any] = list(model.modules())
    if kernels == "liger":
        _patch_by_liger(model, device)
    else:
        for module in filter(_is_norm, modules):
            if formula := next((each for each in _FORMULAS if _computes(module, each)), None):
                kind: Any = type(module)
                module.forward = MethodType(_forward_of(kind, formula), module)
    fused = [name for name in map(_kernel_of, modules) if name]
    num_norms = sum("Norm" in name for name in fused)
    left = Counter(type(module).__name__ for module in modules if _is_norm(module) and not _kernel_of(module))
    return Fused(num_norms, len(fused) - num_norms, left)


def _kernel_of(module: nn.Module) -> str:
    """Name of the fused kernel in the place of a module's `forward`, "" without one."""
    function: Any = getattr(vars(module).get("forward"), "__func__", None)
    is_fused = getattr(function, "__module__", "").startswith(("liger_kernel.", __name__))
    return str(function.__qualname__) if is_fused else ""


def _is_norm(module: nn.Module) -> bool:
    """True if it may be a norm of the last dimension; those of torch's own classes are one kernel already."""
    is_own = not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and "norm" in type(module).__name__.lower()
    weights = dict(module.named_parameters())
    return is_own and "weight" in weights and set(weights) <= {"weight", "bias"} and _eps(module) is not None


def _eps(module: nn.Module) -> float | None:
    """The epsilon that a norm adds to the mean of squares."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((each for each in found if isinstance(each, float)), None)


def _patch_by_liger(model: nn.Module, device: torch.device) -> None:
    """Patch the modules of a model by Liger: its norms, and its gated MLPs that are no experts."""
    try:
        patch = import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
        is_interpreted = bool(import_module("triton").knobs.runtime.interpret)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--fused-kernels liger needs liger-kernel ({error})", hint=pip_install("liger")) from error
    if device.type != "cuda" and not is_interpreted:
        raise UsageError("kernels of liger run on a GPU only", hint="--fused-kernels torch")
    whole, decoder = whole_of(model), decoder_of(model)
    # Liger takes it for granted that all layers and the final norm are here, which a stage of several does not have.
    here: dict[str, nn.Module] = {}
    for name, module in decoder.named_children():
        if isinstance(module, nn.Identity):
            here[name] = nn.Module()
        elif module is layers_of(whole):
            here[name] = nn.ModuleList(layer for layer in module if next(layer.parameters(), None) is not None)
    code = vars(sys.modules[type(whole).__module__])
    classes = dict(code)  # which it would replace for models to come
    with ModelStage(modules=here).in_place(decoder):
        patch(whole, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    code.update(classes)
    modules: list[Any] = list(model.modules())
    for module in modules:
        kernel = _kernel_of(module)
        if "Norm" in kernel:
            module.in_place = False  # what comes back is not written over what others may hold
        elif kernel and not _has_activation_of(module, kernel):
            del module.forward


def _has_activation_of(mlp: nn.Module, kernel: str) -> bool:
    """True if the activation of a gated MLP is that of a kernel of Liger, which does not look at it."""
    activation = next((child for name, child in mlp.named_children() if name.startswith("act")), None)
    expected = partial(F.gelu, approximate="tanh") if "GEGLU" in kernel else F.silu
    values = torch.linspace(-4, 4, 65, dtype=torch.float64)
    if activation is None or "Experts" in kernel:
        return False
    return bool((activation(values) - expected(values)).abs().max() <= _EQUAL)


@cache
def _forward_of(kind: Any, formula: _Formula) -> Callable[..., Tensor]:
    """The forward of norms of a class that call a kernel: one, which a compiler takes for the same.

    What comes in another dtype than the weight, or otherwise, is for the module's own code.
    """

    def norm(module: Any, *given: Any, **how: Any) -> Tensor:
        if len(given) != 1 or how or module.weight.dtype != given[0].dtype:
            return cast(Tensor, kind.forward(module, *given, **how))
        return formula(module, given[0])

    norm.__qualname__ = "Norm"
    return norm


def _computes(module: nn.Module, formula: _Formula) -> bool:
    """True if a norm with other weights computes `formula`, in float64, forward and backward, and gives its dtype.

    It is tried in training and evaluation, on inputs of three and four dimensions, which are tiny and large too.
    """
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    tried: Any = copy.deepcopy(module).to("cpu", torch.float64)
    vars(tried).pop("forward", None)
    for weight in tried.parameters():
        weight.data.normal_(generator=generator)
    width = tried.weight.shape[-1]

    def results(compute: Callable[[Tensor], Tensor], hidden: Tensor, upstream: Tensor) -> list[Tensor]:
        given = hidden.clone().requires_grad_()
        with torch.enable_grad(), evaluate_in_float64(tried):
            made = compute(given)
            return [made, *torch.autograd.grad(made, [given, *tried.parameters()], upstream)]

    try:
        for is_training, num_before in ((True, 0), (True, 1), (False, 0), (False, 1)):
            tried.train(is_training)
            shape = (*[1] * num_before, 2, len(_SIZES), width)
            hidden, upstream = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
            hidden *= _SIZES[:, None]
            found, expected = (results(each, hidden, upstream) for each in (tried, partial(formula, tried)))
            for one, other in zip(found, expected, strict=True):
                if not bool(((one - other).norm(dim=-1) <= _EQUAL * other.norm(dim=-1)).all()):
                    return False
        with torch.no_grad():
            return bool(tried.to(dtype)(torch.ones(1, 2, width, dtype=dtype)).dtype == dtype)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes something else, or makes it otherwise
        return False
