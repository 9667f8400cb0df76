"""Times attention: every kernel that can run, by form and size, forward and backward, and its first call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import KERNELS
from chunkplan_runtime.devices import synchronize

Row = dict[str, Any]

#: Query heads, KV heads, size of a head: those of 7B, 8B, 1.5B and 0.5B models.
_HEADS = ((28, 4, 128), (32, 8, 128), (12, 2, 128), (14, 2, 64))

#: Queries, keys, whether causal: causal squares, and blocks of earlier keys; the last one for the first heads alone.
_SHAPES = ((8192, 8192, True), (8192, 32768, False), (2048, 2048, True), (2048, 8192, False), (8192, 131072, False))

#: Packed sequences of one length in as many tokens as the first shape has queries.
_PACKED = 512

Way = tuple[Callable[[], Any], Callable[[Any], Any]]


def measure_kernels(device: torch.device, *, toy: bool, add: Callable[[Row], None]) -> None:
    """Add a row of TFLOP/s for each shape: the FLOPs of what is seen, which is half of a causal square."""
    for number, (heads, kv_heads, head_dim) in enumerate(((4, 2, 16),) if toy else _HEADS):
        shapes = [tuple(size // 64 if toy else size for size in shape[:2]) for shape in _SHAPES]
        for (queries, keys), (*_, causal) in list(zip(shapes, _SHAPES, strict=True))[: None if number == 0 else -1]:
            add(_row(device, (heads, kv_heads, head_dim), queries, keys, Form(head_dim**-0.5, causal=causal)))
        queries, packed = shapes[0][0], _PACKED // 64 if toy else _PACKED
        borders = tuple(range(0, queries + 1, packed))
        add(_row(device, (heads, kv_heads, head_dim), queries, queries, Form(head_dim**-0.5, True, borders=borders)))


def _row(device: torch.device, sizes: tuple[int, int, int], queries: int, keys: int, form: Form) -> Row:
    heads, kv_heads, head_dim = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, grad_out = torch.randn(2, 1, queries, heads, head_dim, device=device, dtype=dtype).transpose(2, 3)
    key, value = torch.randn(2, 1, keys, kv_heads, head_dim, device=device, dtype=dtype).transpose(2, 3)
    longest = queries if form.borders is None else form.borders[1]
    flops = 4 * queries * (keys if form.borders is None else longest) * heads * head_dim / (2 if form.causal else 1)
    row: Row = {"H": f"{heads}/{kv_heads}x{head_dim}"}
    if form.borders is None:
        row |= {"q": queries, "k": keys, "causal": form.causal}
    else:
        row |= {"packed": f"{queries // longest} x {longest}"}
    first: Tensor | None = None
    for name, (forward, backward) in _ways(device, dtype, query, key, value, grad_out, form).items():
        try:
            synchronize(device)
            started = time.perf_counter()
            result = forward()
            synchronize(device)
            row[f"{name} first s"] = round(time.perf_counter() - started, 3)  # with what is compiled or planned
            out = result[0].reshape(heads, queries, head_dim).float()
            seconds, back_seconds = (_seconds(run, device) for run in (forward, partial(backward, result)))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                backward(result)
                row[f"{name} bwd MiB"] = (torch.cuda.max_memory_allocated() - before) >> 20
        except Exception as error:
            row[f"{name} error"] = repr(error)[:150]
            continue
        row[f"{name} fwd"] = _tera(flops / seconds)
        row[f"{name} bwd"] = _tera(2.5 * flops / back_seconds)
        if first is not None:  # how far it is from the first
            row[f"{name} err"] = float(f"{(out - first).norm() / first.norm():.2g}")
        first = out if first is None else first
    return row


def _ways(
    device: torch.device, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, form: Form
) -> dict[str, Way]:
    head_dims = (query.shape[-1], value.shape[-1])
    return {
        name: (
            lambda kernel=kernel: kernel.forward(query, key, value, form),
            lambda result, kernel=kernel: kernel.backward(grad_out, query, key, value, *result, form),
        )
        for name, kernel in KERNELS.items()
        if name != "reference" and kernel.why_not(device, dtype, head_dims, form) is None
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of several measurements, each of a few runs that nothing waits between."""
    found = []
    for runs in (2, 4, 4, 4):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(runs):
            run()
        synchronize(device)
        found.append((time.perf_counter() - started) / runs)
    return statistics.median(found[1:])


def _tera(rate: float) -> float:
    return round(rate / 1e12) if rate >= 1e13 else float(f"{rate / 1e12:.2g}")
