"""Calibrates the planner's cost model on the device at hand: from a model's config to a fitted hardware profile.

Beside chunks it times what the device does on its own: products, copies, attention alone, and layers that have next to
nothing to do.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import torch

from chunkplan.cost.attention_rates import MEASURED_QUERIES, AttentionRates
from chunkplan.cost.calibrate import Calibration, ChunkTime, DeviceRates, layers_that_fit
from chunkplan.cost.calibrate import calibrate as fit
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import Precision
from chunkplan.cost.model_config import read_model_config
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.calibration.measure import Probe, first_layers, make_probes, measure, time_probe, wait
from chunkplan_runtime.calibration.options import CalibrationOptions
from chunkplan_runtime.devices import calibrated_name, device_name, find_device, shipped_profile
from chunkplan_runtime.models.checks import entry_of, kv_shapes
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.training.optimizer import TrainedWeights

#: Queries that are many on a device of the type, and few; a block has four times as many keys as the many.
_QUERIES = {"cuda": (MEASURED_QUERIES, 2048), "cpu": (256, 64)}
_KEYS = 4

#: Sizes of heads that are measured beside the model's own.
_HEAD_SIZES = {"cuda": (128, 64), "cpu": ()}

#: The least part of a time that is counted, so that times of a noisy device make rates.
_LEAST = 0.01

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


@dataclass(frozen=True)
class _Defaults:
    precision: Precision
    chunk_sizes: Sequence[int]
    prefixes: Sequence[int]
    most_layers: float


#: By type of device: measured in minutes on one GPU with a model of 7B, and on a CPU with a small one.
_DEFAULTS = {
    "cuda": _Defaults("bf16", (1024, 2048, 4096, 8192, 16384, 32768), (8192, 65536, 262144), math.inf),
    "cpu": _Defaults("fp32", (256, 512, 1024, 2048), (2048, 8192), 2),
}

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

#: Of the memory that is free, what layers are chosen to fill: the estimate knows nothing of gaps.
_SHARE_OF_MEMORY = 0.85

#: The base where neither an option nor the device's name gives one.
_BASE = "h100"


def calibrate(
    options: CalibrationOptions,
    report: Callable[[int, int], None] = lambda done, total: None,
    show: Callable[[ChunkTime], None] = lambda chunk: None,
) -> tuple[Calibration, list[Probe]]:
    """Measure chunks on the device and fit a profile to them: the twin of `chunkplan calibrate`.

    Returns the calibration, whose `hardware` a `CostModel` or `TuneOptions` takes as it is and
    `chunkplan.cost.calibrate.write_profile` keeps, and the chunks that did not fit the memory. `report` is
    called with the number of chunks measured and of those to measure, `show` with each one's times as soon as they are
    there.

    Raises:
        UsageError: the device or a file is not there, the model is not one that can be run or predicted, or too few
            chunks could be measured.
        DataError: a file is damaged.
    """
    device = find_device(options.device)
    defaults = _DEFAULTS[device.type]
    precision = options.precision or defaults.precision
    probes = make_probes(
        options.chunk_sizes or defaults.chunk_sizes,
        defaults.prefixes if options.prefixes is None else options.prefixes,
    )
    base_name = options.base or shipped_profile(device_name(device))
    base = load_hardware(base_name or _BASE)
    shape = read_model_config(options.model_config)
    config = read_config(options.model_config)
    num_layers = options.layers
    if num_layers is None:
        fitting = layers_that_fit(
            shape,
            base,
            precision,
            memory_bytes=int(_SHARE_OF_MEMORY * memory(device)[0]),
            chunk_size=max(sum(probe.segments) for probe in probes),
            kv_tokens=max(probe.prefix_tokens + 2 * sum(probe.segments) for probe in probes),
        )
        num_layers = int(min(fitting, defaults.most_layers))
    if num_layers > shape.num_layers:
        raise UsageError(
            f"--layers is {num_layers}, {shape.name} has {shape.num_layers}", hint="give no more than it has"
        )
    config = first_layers(config, num_layers)
    dtype = _DTYPES[precision]
    try:
        rates = measure_device(device, config, dtype, options.attention)
        kernels = Kernels(options.attention, rates.attention)
        model = new_model(config, dtype, options.seed, device=device, kernels=kernels)
        TrainedWeights(model.model, master_weights=precision == "bf16")  # gradients are added up as in training
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{num_layers} layers do not fit the free memory of {device_name(device)}",
            hint="give fewer --layers, and let nothing else run on the device",
        ) from error
    if base_name is None:  # neither named nor that of a GPU like this one
        base = replace(base, peak_flops=rates.flops if precision == "bf16" else rates.fp32_flops)
    measured = measure(model, probes, repeats=options.repeats, seed=options.seed, report=report, show=show)
    calibration = fit(
        measured.chunks,
        rates,
        shape=shape.first(num_layers),
        precision=precision,
        base=base,
        name=calibrated_name(options.name, rates.device),
        seed=options.seed,
    )
    return calibration, measured.left_out


def _measure_attention(
    device: torch.device, config: Any, dtype: torch.dtype, attention: str
) -> tuple[AttentionRates, ...]:
    """Measure the kernels that layers of `config`, a transformers config, can run with: the fastest first.

    Of each the layers' own heads come first. Nothing of a model without attention.
    """
    (kv_heads, key_dim), (_, value_dim) = kv_shapes(config)
    heads, softcap = (entry_of(config, name) for name in ("num_attention_heads", "attn_logit_softcapping"))
    others = [(size, size) for size in _HEAD_SIZES[device.type] if size != (key_dim + value_dim) // 2]
    found = []
    for dims in [(key_dim, value_dim), *others] if heads else ():
        serving = [*Kernels(attention).serving(device, dtype, dims, Form(1.0, causal=True, softcap=softcap), [])]
        for kernel in serving[:-1] or serving:  # the last one is plain attention, which is for want of others
            found.append(_of_heads(kernel, device, dtype, (heads, kv_heads), dims))
    own = {each.kernel: each.both_blocks for each in reversed(found)}
    return tuple(sorted(found, key=lambda each: own[each.kernel], reverse=True))


def _of_heads(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> AttentionRates:
    many, few = _QUERIES[device.type]
    num_keys = _KEYS * many

    def times(num_queries: int, num_keys: int, causal: bool) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        form = Form(dims[0] ** -0.5, causal)
        made = ((heads[0], num_queries, dims[0]), (heads[1], num_keys, dims[0]), (heads[1], num_keys, dims[1]))
        query, key, value = (torch.randn(1, *shape, device=device).to(dtype) for shape in made)
        out, lse = kernel.forward(query, key, value, form)
        gradient = torch.randn_like(out)
        forward = _seconds(lambda: kernel.forward(query, key, value, form), device)
        return forward, _seconds(lambda: kernel.backward(gradient, query, key, value, out, lse, form), device)

    blocks, short, squares = times(many, num_keys, False), times(few, num_keys, False), times(many, many, True)
    of_query = max(blocks[0] - short[0], _LEAST * blocks[0]) / (many - few)
    ramp = max(blocks[0] / of_query - many, _LEAST * few)
    flops = 2.0 * heads[0] * (dims[0] + dims[1])  # of a query and a key that it sees, forward
    rates = []
    for share, block, square in zip((1.0, 2.5), blocks, squares, strict=True):
        of_pair = block / num_keys / (many + ramp)
        mask = max(square - of_pair * many * many / 2, 0.0) / many  # of a query, what no block takes
        in_block = of_pair * (1 + ramp / MEASURED_QUERIES)
        in_square = of_pair + mask * 2 / MEASURED_QUERIES
        rates.append((share * flops / in_block, share * flops / in_square))
    (forward_blocks, forward_squares), (backward_blocks, backward_squares) = rates
    return AttentionRates(
        kernel=kernel.name,
        head_size=(dims[0] + dims[1]) // 2,
        forward_blocks=forward_blocks,
        forward_squares=forward_squares,
        backward_blocks=backward_blocks,
        backward_squares=backward_squares,
        ramp_queries=ramp,
    )


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
        attention=_measure_attention(device, config, dtype, attention),
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
