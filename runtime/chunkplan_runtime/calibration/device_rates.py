"""What a device does on its own, without any chunk: products, copies, attention, and a layer that has next to nothing
to do.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from chunkplan.cost.measurements import DeviceRates
from chunkplan_runtime.attention.kernel import Kernels
from chunkplan_runtime.calibration.attention import measure_attention
from chunkplan_runtime.calibration.measure import Probe, time_probe, wait
from chunkplan_runtime.devices import device_name
from chunkplan_runtime.models.model import new_model

#: Of each time the median of so many is taken, after one that does not count.
_REPEATS = 5

#: Rows and columns of a product, and bytes of a copy, that are large on a device of the type.
_PRODUCT = {"cuda": 8192, "cpu": 384}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}

#: Of layers without work: tokens and widths.
_NARROW_TOKENS = 16
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "pad_token_id": None,
}


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and bytes in all: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def measure_device(device: torch.device, config: Any, dtype: torch.dtype, attention: str) -> DeviceRates:
    """Measure it; layers without work are those of `config`, a transformers config, in all but their widths."""
    copied = _COPY_BYTES[device.type]
    source, target = (torch.ones(copied, dtype=torch.uint8, device=device) for _ in range(2))
    copy_seconds = _seconds(lambda: target.copy_(source), device)
    if device.type == "cuda":
        del target
        there = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
        ways = (lambda: there.copy_(source, non_blocking=True), lambda: source.copy_(there, non_blocking=True))
        host_seconds = max(_seconds(way, device) for way in ways)
    else:
        host_seconds = copy_seconds
    rates = DeviceRates(
        device=device_name(device),
        flops=_product_flops(device, torch.bfloat16),
        fp32_flops=_product_flops(device, torch.float32),
        copy_bytes=2 * copied / copy_seconds,
        host_bytes=copied / host_seconds,
        layer_overhead_ns=_layer_overhead_ns(device, config, dtype, attention),
        memory_bytes=memory(device)[1],
        attention=measure_attention(device, config, dtype, attention, lambda run: _seconds(run, device)),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    size = _PRODUCT[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: one @ other, device)


def _layer_overhead_ns(device: torch.device, config: Any, dtype: torch.dtype, attention: str) -> float:
    narrow = copy.deepcopy(config)
    for name, value in _NARROW.items():
        setattr(narrow, name, value)
    model = new_model(narrow, dtype, seed=0, device=device, kernels=Kernels(attention))
    times = [time_probe(model, Probe((_NARROW_TOKENS,)))[0] for _ in range(1 + _REPEATS)]
    num_layers: int = config.num_hidden_layers
    return sorted(times[1:])[_REPEATS // 2] / num_layers


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        wait(device)
        started = perf_counter_ns()
        run()
        wait(device)
        times.append((perf_counter_ns() - started) / 1e9)
    return sorted(times[1:])[_REPEATS // 2]
