"""A trial of a kernel on the device that it is to run on: whether it gives what plain attention gives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.reference import ReferenceKernel

if TYPE_CHECKING:
    from chunkplan_runtime.attention.kernel import AttentionKernel

#: Keys, queries where there are fewer, and where sequences side by side begin and end.
_KEYS, _QUERIES = 512, 300
_BORDERS = (0, 40, 41, _KEYS)

#: What keys elsewhere add to an LSE: gradients are by that of all keys.
_ELSEWHERE = 0.7

#: How far results may be from those in float32, as a share. Rounding to bfloat16 makes it 0.005.
_TOLERANCE = 0.03


def why_wrong(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form
) -> str | None:
    """Why a kernel must not run layers of `form`: it fails, or gives something else. None if it is right.

    Tried are a part of a sequence with itself and with keys before it, and sequences side by side, forward and
    backward. Where torch sees no such device there is nothing to try.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    reach = None if form.reach is None else min(form.reach, _QUERIES // 2)
    own = Form(head_dims[0] ** -0.5, True, reach, form.softcap)
    queries = _KEYS if kernel.squares_only else _QUERIES
    asked = [(queries, own), (queries, own._replace(causal=False)), (_KEYS, own._replace(borders=_BORDERS))]
    try:
        errors = [_error(kernel, device, dtype, head_dims, *each) for each in asked]
    except Exception as error:  # of a library, a compiler, a driver
        return f"it fails on this device ({(str(error).splitlines() or [type(error).__name__])[0]})"
    worst = max(errors)
    return None if worst <= _TOLERANCE else f"it is wrong on this device, by {worst:.2g} of the result"


def _error(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    num_queries: int,
    form: Form,
) -> float:
    """How far a forward and a backward are from plain attention's, as a share; infinitely far if that is no number."""
    random = torch.Generator(device).manual_seed(0)
    sizes = ((num_queries, 4, 0), (_KEYS, 2, 0), (_KEYS, 2, 1), (num_queries, 4, 1))
    query, key, value, grad_out = (
        torch.randn(1, tokens, heads, head_dims[which], device=device, generator=random).to(dtype).transpose(1, 2)
        for tokens, heads, which in sizes
    )
    plain, exact = ReferenceKernel(), (query.float(), key.float(), value.float())
    wanted = list(plain.forward(*exact, form))
    out, lse = wanted[0].to(dtype), wanted[1] + _ELSEWHERE
    wanted += plain.backward(grad_out.float(), *exact, out.float(), lse, form)
    found = [*kernel.forward(query, key, value, form), *kernel.backward(grad_out, query, key, value, out, lse, form)]
    errors = [float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)
