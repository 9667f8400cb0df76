"""A calibration as a hardware profile in TOML, which says where each number is from, and as a document for JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.cost.attention_rates import AttentionRates
from chunkplan.cost.calibrate import FITTED, MEASURED, Calibration
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.shape_entries import entries_of_shape
from chunkplan.errors import UsageError
from chunkplan.files.writing import whole_file
from chunkplan.version import __version__

#: How a file begins that may be replaced.
_BEGINNING = "# Measured by chunkplan calibrate"


def refuse_other_profile(path: Path) -> None:
    """Before long work: refuse a path that cannot be written, or a file that no calibration wrote.

    Raises:
        UsageError: see above.
    """
    if path.suffix != ".toml" or not path.stem.isprintable():
        raise UsageError(f"{str(path)!r} is no name for a profile", hint="give --output a name that ends in .toml")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="name a file in a folder that is there")
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(_BEGINNING.encode())):
        raise UsageError(f"{path} exists and is no calibration", hint="give another --output; this one is kept")


def write_profile(calibration: Calibration, path: Path, *, torch_version: str) -> None:
    """Write the profile to `path`, whole or not at all.

    Raises:
        UsageError: `path` cannot be written, or holds something else.
    """
    refuse_other_profile(path)
    with whole_file(path) as file:
        file.write(profile_text(calibration, torch_version=torch_version, on=date.today()))


def profile_text(calibration: Calibration, *, torch_version: str, on: date) -> str:
    """The profile with comments, for `load_hardware` and for people."""
    errors = calibration.held_out_errors
    lines = [
        f"{_BEGINNING} {__version__} on {calibration.rates.device}, torch {torch_version}, {on.isoformat()}:",
        f"# {calibration.what}, {len(calibration.chunks)} chunks, of which {len(errors)} were held out of the fit:",
        f"# predictions for these are off by {np.median(errors):.1%} (median), {errors.max():.1%} at worst.",
    ]
    lines += _entries(calibration.hardware, calibration)
    for rates in calibration.hardware.attention:
        lines += ["", "[[attention]]", *_entries(rates, calibration)]
    return "\n".join(lines) + "\n"


def _entries(of: Hardware | AttentionRates, calibration: Calibration) -> list[str]:
    names = [field.name for field in fields(of) if field.name != "attention"]
    return [f"{name} = {_toml(getattr(of, name))}{_comment(calibration, name)}" for name in names]


def _toml(value: str | float | int) -> str:
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, str)
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )


def _comment(calibration: Calibration, name: str) -> str:
    other = "fp32_flops" if calibration.cost.precision == "bf16" else "flops"
    if name in ("name", "kernel", "head_size"):
        return ""
    if name in calibration.untold:
        return "  # at its bound: too fast for these chunks to tell"
    if name == other:
        return "  # fitted for the other precision, and scaled by large products in both"
    if name.endswith("_squares"):
        return "  # of the device, and scaled as blocks are"
    if name in FITTED:
        return "  # fitted to times of chunks"
    rates = calibration.rates
    if name == "peak_flops" and calibration.hardware.peak_flops in (rates.flops, rates.fp32_flops):
        return "  # no data sheet: of a large product"
    if name in MEASURED:
        return "  # of the device"
    return f"  # not measured: that of {calibration.base.name}"


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """All of it, for JSON. Times are in seconds, errors are predicted over measured time, less 1."""
    errors = calibration.held_out_errors
    return {
        "hardware": calibration.hardware.to_dict(),
        "base": calibration.base.to_dict(),
        "fitted": list(FITTED),
        "measured": list(MEASURED),
        "device": asdict(calibration.rates),
        "model": entries_of_shape(calibration.cost.shape),
        "precision": calibration.cost.precision,
        "held_out_error": {"median": float(np.median(errors)), "worst": float(errors.max())},
        "untold": list(calibration.untold),
        "spread": calibration.spread,
        "chunks": [
            {
                "segments": list(chunk.segments),
                "prefix_tokens": chunk.prefix_tokens,
                "held_out": bool(held_out),
                "spread": chunk.spread,
                "forward_kv_seconds": chunk.forward_kv_ns / 1e9,
                "train_seconds": chunk.train_ns / 1e9,
                "predicted_forward_kv_seconds": forward_kv / 1e9,
                "predicted_train_seconds": train / 1e9,
                "forward_kv_error": float(error[0]),
                "train_error": float(error[1]),
            }
            for chunk, held_out, forward_kv, train, error in zip(
                calibration.chunks,
                calibration.held_out,
                calibration.forward_kv_ns,
                calibration.train_ns,
                calibration.errors,
                strict=True,
            )
        ],
    }
