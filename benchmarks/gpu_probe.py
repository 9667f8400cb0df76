"""Times chunks of a 7B's first layers and head on this device: the probe, and what the cost model is fitted to."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_plans import write_model
from gpu_work import work_of

from chunkplan.cost.calibrate import Calibration
from chunkplan_runtime.calibration.calibrate import (
    PACKED,
    CalibrationOptions,
    Probe,
    calibrate,
    first_layers,
    measure_device,
    time_probe,
)
from chunkplan_runtime.models.compiled import CompiledLayers
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.training.optimizer import TrainedWeights

Row = dict[str, Any]

_LAYERS = 4
_REPEATS = 5


def measure_probe(device: torch.device, *, toy: bool, add: Callable[[Row], None]) -> None:
    """Add a row for each of four chunks, not compiled and compiled: a forward for its keys, then a forward and a
    backward."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(write_model("toy" if toy else "7b", Path(folder)))
    model = new_model(first_layers(config, min(_LAYERS, config.num_hidden_layers)), torch.bfloat16, 0, device=device)
    TrainedWeights(model.model, master_weights=True)
    sizes = (128, 64) if toy else (8192, 2048)
    for is_compiled, size, number in product((False, True), sizes, (1, PACKED)):
        if is_compiled and not model.current.compiles:
            CompiledLayers(model)
        probe = Probe((size // number,) * number)
        times = [time_probe(model, probe) for _ in range(1 + _REPEATS)][1:]
        forward, train = (statistics.median(column) / 1e6 for column in zip(*times, strict=True))
        add(
            {
                "tokens": size,
                "sequences": number,
                "kernel": model.attention_kernels()["full"],
                "compiled": is_compiled,
                "forward ms": round(forward, 2),
                "train ms": round(train, 2),
                "both ms": round(forward + train, 2),
                "work": work_of(model, [(0, tokens) for tokens in probe.segments], forwards=2),
                "head_size": model.config.hidden_size // model.config.num_attention_heads,
            }
        )


def measure_rates(device: torch.device, *, toy: bool) -> Row:
    """What the device does on its own, with heads of a 7B."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(write_model("toy" if toy else "7b", Path(folder)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return asdict(measure_device(device, first_layers(config, 2), dtype, "auto"))


def measure_calibration(
    device: torch.device, *, toy: bool, add: Callable[[Row], None]
) -> tuple[Calibration, list[Row]]:
    """Calibrate the cost model. Adds a row for each chunk as it is measured; what comes back says what was fitted."""
    with tempfile.TemporaryDirectory() as folder:
        options = CalibrationOptions(
            model=write_model("toy" if toy else "7b", Path(folder)),
            name="here",
            device=str(device),
            chunk_sizes=(16, 32, 64) if toy else (1024, 2048, 4096, 8192, 16384),
            prefixes=(64,) if toy else (8192, 65536),
            layers=2 if toy else _LAYERS,
            repeats=1 if toy else 2,
        )
        calibration, _ = calibrate(options, show=lambda chunk: add(asdict(chunk)))
    times = zip(calibration.chunks, calibration.forward_kv_ns, calibration.train_ns, strict=True)
    return calibration, [
        asdict(chunk) | {"fitted_forward_kv_ns": float(forward_kv), "fitted_train_ns": float(train)}
        for chunk, forward_kv, train in times
    ]
