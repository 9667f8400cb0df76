"""Calibrates the planner's cost model on the device at hand: from a model's config to a fitted hardware profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from chunkplan.cost.calibrate import Calibration, layers_that_fit
from chunkplan.cost.calibrate import calibrate as fit
from chunkplan.cost.hardware import Hardware, load_hardware
from chunkplan.cost.measurements import ChunkTime
from chunkplan.cost.model import Precision
from chunkplan.cost.model_config import read_model_config
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.kernel import Kernels
from chunkplan_runtime.calibration.device_rates import measure_device, memory
from chunkplan_runtime.calibration.measure import Probe, first_layers, make_probes, measure
from chunkplan_runtime.calibration.options import CalibrationOptions
from chunkplan_runtime.devices import calibrated_name, device_name, find_device, shipped_profile
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.training.optimizer import TrainedWeights


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
    `chunkplan.cost.calibration_file.write_profile` keeps, and the chunks that did not fit the memory. `report` is
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
    base, is_known = _base(options.base, device)
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
    if not is_known:
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


def _base(name: str | None, device: torch.device) -> tuple[Hardware, bool]:
    """The profile for what is not measured, and whether it was named or is that of a GPU like this one."""
    name = name or shipped_profile(device_name(device))
    return load_hardware(name or _BASE), name is not None
