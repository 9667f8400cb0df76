"""The attention kernels there are, which of them serves a layer, and a trial of it on the device it is to run on."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Iterator

import torch

from chunkplan.cost import hardware
from chunkplan.cost.hardware import MAKES_PLANS, AttentionRates
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.kernel import AttentionKernel, Form

#: By name, the preferred one first.
KERNELS: dict[str, AttentionKernel] = {
    name: pkgutil.resolve_name(f"chunkplan_runtime.attention.{place.replace('.', ':')}")()
    for name, place in hardware.KERNELS.items()
}

AUTO = "auto"

#: Those that no device has a say in. All others are tried where they are to run.
_SURE = ("torch-cpu", "reference")

#: A plan is code that is loaded. CUDA loads it when all is done that the device was given, sends to other stages too.
_PLANS = "it makes plans in a step, for which one of several stages might deadlock"

#: Of a trial: keys, queries where there are fewer, where sequences side by side begin and end, and what keys elsewhere
#: add to an LSE: gradients are by that of all keys.
_KEYS, _QUERIES = 512, 300
_BORDERS = (0, 40, 41, _KEYS)
_ELSEWHERE = 0.7

#: How far results may be from those in float32, as a share. Rounding to bfloat16 makes it 0.005.
_TOLERANCE = 0.03


class Kernels:
    """The kernels a model runs with: the one that was named, or for each layer the first that can serve it.

    `rates`: of the device, in the order of which those kernels come that it has. `has_links`: whether stages wait for
    each other. `left_out`: why kernels that could serve a layer are not right on its device, or there, by name.
    """

    def __init__(self, name: str = AUTO, rates: Iterable[AttentionRates] = (), *, has_links: bool = False) -> None:
        if name not in (AUTO, *KERNELS):
            raise UsageError(
                f"there is no attention kernel {name!r}", hint=f"choose one of: {', '.join((AUTO, *KERNELS))}"
            )
        blocks: dict[str, float] = {}  # of kernels that there are rates of: they come by these in each other's places
        for each in rates:
            blocks.setdefault(each.kernel, each.both_blocks)
        ranked = iter(sorted(blocks, key=blocks.__getitem__, reverse=True))
        ordered = [next(ranked) if each in blocks else each for each in KERNELS] if name == AUTO else [name]
        self._candidates = [KERNELS[each] for each in ordered]
        self._has_links = has_links
        self.left_out: dict[str, str] = {}
        self._chosen: dict[tuple[torch.device, torch.dtype, tuple[int, int], bool, bool], AttentionKernel] = {}

    def choose(
        self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form
    ) -> AttentionKernel:
        """The kernel for a layer; `head_dims`: of queries and keys, and of values. Raises UsageError if none can."""
        case = device, dtype, head_dims, form.reach is not None, form.softcap is not None
        if case not in self._chosen:
            refusals: list[str] = []
            kernel = next(self.serving(device, dtype, head_dims, form, refusals), None)
            if kernel is None:
                raise UsageError(
                    f"no attention kernel can run this model ({'; '.join(refusals)})", hint="--attention auto"
                )
            self._chosen[case] = kernel
        return self._chosen[case]

    def serving(
        self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form, refusals: list[str]
    ) -> Iterator[AttentionKernel]:
        """All that can serve a layer, one after another; `refusals` gets the reasons of the others."""
        for kernel in self._candidates:
            reason = kernel.why_not(device, dtype, head_dims, form)
            if reason is None and kernel.name not in _SURE:
                plans = self._has_links and kernel.name in MAKES_PLANS
                reason = _PLANS if plans else why_wrong(kernel, device, dtype, head_dims, form)
                if reason is not None:
                    self.left_out[kernel.name] = reason
            if reason is None:
                yield kernel
            else:
                refusals.append(f"{kernel.name}: {reason}")


def why_wrong(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form
) -> str | None:
    """The reason why a kernel must not run layers of `form`: it fails, or differs from plain attention.

    Tried are a part with itself and with keys before it, and sequences side by side, forward and backward. Where torch
    sees no such device there is nothing to try.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return None

    def errors(num_queries: int, form: Form) -> list[float]:
        """The relative error of each result against plain attention."""
        random = torch.Generator(device).manual_seed(0)
        sizes = ((num_queries, 4, 0), (_KEYS, 2, 0), (_KEYS, 2, 1), (num_queries, 4, 1))
        query, key, value, grad_out = (
            torch.randn(1, tokens, heads, head_dims[which], device=device, generator=random).to(dtype).transpose(1, 2)
            for tokens, heads, which in sizes
        )
        plain, exact = KERNELS["reference"], (query.float(), key.float(), value.float())
        wanted = list(plain.forward(*exact, form))
        out, lse = wanted[0].to(dtype), wanted[1] + _ELSEWHERE
        wanted += plain.backward(grad_out.float(), *exact, out.float(), lse, form)
        found = *kernel.forward(query, key, value, form), *kernel.backward(grad_out, query, key, value, out, lse, form)
        return [float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]

    reach = None if form.reach is None else min(form.reach, _QUERIES // 2)
    own = Form(head_dims[0] ** -0.5, True, reach, form.softcap)
    queries = _KEYS if kernel.squares_only else _QUERIES
    cases = [(queries, own), (queries, own._replace(causal=False)), (_KEYS, own._replace(borders=_BORDERS))]
    try:
        found = [error for case in cases for error in errors(*case)]
    except Exception as error:  # of a library, a compiler, a driver
        return f"it fails on this device ({(str(error).splitlines() or [type(error).__name__])[0]})"
    worst = max(error if math.isfinite(error) else math.inf for error in found)
    return None if worst <= _TOLERANCE else f"it is wrong on this device, by {worst:.2g} of the result"
