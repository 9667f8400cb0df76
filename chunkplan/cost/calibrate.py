"""Calibration: measured times of chunks, the hardware profile that predicts them best, and the file it is written to.

The cost model is linear in the times of a FLOP of a product, a copied byte, a FLOP of attention forward and backward,
queries and tokens of ramps, a kernel and its launch, as long as either the GPU or the host is the slower one.
Times of chunks of one model do not identify all of these, so each is regularized towards the device's own measurement,
or, without one, towards a given profile. All other entries cannot be measured on one device; they are that profile's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.arrays import BoolArray
from chunkplan.cost.durations import Float64Array, attention_pairs_of, durations
from chunkplan.cost.hardware import AttentionRates, Hardware
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import LAYER_KERNELS, CostModel, Precision
from chunkplan.cost.shape import FULL, AttentionPattern, ModelShape
from chunkplan.cost.shape_entries import entries_of_shape
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.errors import UsageError
from chunkplan.files.writing import whole_file
from chunkplan.operations import OPS
from chunkplan.version import __version__

# Measurements that calibrate the cost model: times of chunks, and rates of the device itself.


@dataclass(frozen=True, kw_only=True)
class ChunkTime:
    """Measured times of a chunk of `segments`, the first of which sees `prefix_tokens` earlier ones; in nanoseconds.

    `forward_kv_ns` is a forward without the loss that keeps no activations, `train_ns` a forward and a backward, with
    the loss. `spread` says how far repetitions of the latter are apart: their median distance from their median, as a
    share of it.
    """

    segments: tuple[int, ...]
    prefix_tokens: int
    forward_kv_ns: float
    train_ns: float
    spread: float

    @property
    def num_tokens(self) -> int:
        """The tokens of all segments."""
        return sum(self.segments)

    def attention_pairs(self, patterns: Sequence[AttentionPattern] = FULL) -> float:
        """The attention pairs of all segments, see `durations.attention_pairs_of`."""
        prefixes = np.array([self.prefix_tokens] + [0] * (len(self.segments) - 1))
        return float(attention_pairs_of(np.array(self.segments), prefixes, patterns).sum())


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a device alone, per second.

    `flops` and `fp32_flops` of a large matrix product in bf16 and in float32, `copy_bytes` read and written by a large
    copy, `host_bytes` of one to host memory or back. `layer_overhead_ns`: a forward of a layer so narrow that it has
    next to nothing to compute. `attention`: in the precision of the chunks, by size of heads, the model's own first.
    """

    device: str
    flops: float
    fp32_flops: float
    copy_bytes: float
    host_bytes: float
    layer_overhead_ns: float
    memory_bytes: int
    attention: tuple[AttentionRates, ...]


# A calibration as a hardware profile in TOML, which says where each number is from, and as a document for JSON.


#: Beginning of a file that may be replaced.
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
    lines = []
    for name in (field.name for field in fields(of) if field.name != "attention"):
        value = getattr(of, name)
        written = f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name} = {written}{_comment(calibration, name)}")
    return lines


def _comment(calibration: Calibration, name: str) -> str:
    other = "fp32_flops" if calibration.cost.precision == "bf16" else "flops"
    if name in ("name", "kernel", "head_size"):
        return ""
    if name in calibration.unidentifiable:
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
        "untold": list(calibration.unidentifiable),
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


#: One chunk in so many is left out of the fit, to check it against.
_HOLD_OUT_EVERY = 3

#: Fewer chunks than these do not tell the rates apart.
LEAST_CHUNKS = 6

#: Entries of a profile by what the fit scales: see `_hardware`.
_SCALED = (
    ("flops", "fp32_flops"),
    ("copy_bytes",),
    ("forward_blocks", "forward_squares", "attention_flops"),
    ("backward_blocks", "backward_squares"),
    ("ramp_queries",),
    ("ramp_tokens",),
    ("kernel_ns",),
    ("launch_ns",),
)

#: The least scales: products, copies and attention no faster than any device does them, the rest next to nothing.
_LEAST = np.array([0.25, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])

#: How far what a chunk takes is from the model, over how far each scale is from 1: its weight in the fit. Products and
#: attention are the same in a chunk and alone; copies are not all large, and the rest is an estimate, or was measured
#: of layers that are not like these. Where times decide, it does not matter.
_TRUST = np.array([1, 0.1, 1, 1, 0.1, 0.1, 0.1, 0.1])

#: The most steps towards the best scales, how far each looks around, and how often a step is halved that leads away.
_STEPS, _NEAR, _HALVES = 30, 1e-3, 5

#: Entries of a profile that times of chunks decide; those of products are scaled together.
FITTED = tuple(name for names in _SCALED for name in names)

#: Entries that the device gives without any chunk.
MEASURED = ("host_bytes", "memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted profile and what it predicts for each chunk.

    `cost` is the model that was measured, on the fitted hardware. `held_out` [n] says which of the chunks the fit did
    not see; `forward_kv_ns` and `train_ns` [n] are the predictions of the times of `ChunkTime`. `unidentifiable` names
    entries of the profile that the fit cannot determine, as their work takes no measurable time in these chunks.
    """

    cost: CostModel
    base: Hardware
    rates: DeviceRates
    chunks: tuple[ChunkTime, ...]
    held_out: BoolArray
    unidentifiable: tuple[str, ...]
    forward_kv_ns: Float64Array
    train_ns: Float64Array

    @property
    def hardware(self) -> Hardware:
        """The fitted profile."""
        return self.cost.hardware

    @property
    def what(self) -> str:
        """A description of the measured model."""
        shape = self.cost.shape
        layers = "1 layer" if shape.num_layers == 1 else f"{shape.num_layers} layers"
        return f"{layers} and the head of {shape.name} in {self.cost.precision}"

    @property
    def errors(self) -> Float64Array:
        """Predicted over measured time, less 1: [n, 2], of forward_kv and of training."""
        measured = _measured(self.chunks)
        errors: Float64Array = np.stack([self.forward_kv_ns, self.train_ns], 1) / measured - 1
        return errors

    @property
    def held_out_errors(self) -> Float64Array:
        """Absolute relative errors of predictions for chunks that were not fitted, [m, 2]."""
        return np.abs(self.errors[self.held_out])

    @property
    def spread(self) -> float:
        """The median spread of a chunk's repetitions: no prediction can be nearer than that."""
        return float(np.median([chunk.spread for chunk in self.chunks]))


def calibrate(
    chunks: Sequence[ChunkTime],
    rates: DeviceRates,
    *,
    shape: ModelShape,
    precision: Precision,
    base: Hardware,
    name: str,
    seed: int = 0,
) -> Calibration:
    """Fit a profile called `name` to `chunks`, that ran through a model of `shape` in `precision` on one device.

    A third of the chunks, drawn with `seed`, is held out. Of the others the fit takes the squares of relative errors.

    Raises:
        UsageError: there are too few chunks to fit.
    """
    if len(chunks) < LEAST_CHUNKS:
        raise UsageError(
            f"{len(chunks)} chunks were measured, too few to fit {len(_SCALED)} rates",
            hint="give more --chunk-sizes and --prefixes that fit the memory",
        )
    held_out = np.zeros(len(chunks), bool)
    held_out[np.random.default_rng(seed).permutation(len(chunks))[::_HOLD_OUT_EVERY]] = True
    fitted = [chunk for chunk, out in zip(chunks, held_out, strict=True) if not out]

    found, unidentifiable = fit(fitted, rates, shape=shape, precision=precision, base=base, name=name)
    forward_kv, train = predicted_ns(found, chunks).T
    return Calibration(
        cost=found,
        base=base,
        rates=rates,
        chunks=tuple(chunks),
        held_out=held_out,
        unidentifiable=unidentifiable,
        forward_kv_ns=forward_kv,
        train_ns=train,
    )


def fit(
    chunks: Sequence[ChunkTime],
    rates: DeviceRates,
    *,
    shape: ModelShape,
    precision: Precision,
    base: Hardware,
    name: str,
    simplify: Callable[[Hardware], Hardware] = lambda hardware: hardware,
) -> tuple[CostModel, tuple[str, ...]]:
    """The model on the profile called `name` that is nearest to all `chunks`, and what these do not tell of it.

    `simplify`: what is left out of every profile that is tried.
    """

    def cost(scales: Float64Array) -> CostModel:
        hardware = simplify(_hardware(scales.tolist(), rates, base, name, precision))
        return CostModel(shape=shape, hardware=hardware, precision=precision)

    scales = _nearest(lambda scales: (predicted_ns(cost(scales), chunks) / _measured(chunks)).ravel())
    unidentifiable = np.flatnonzero(scales <= _LEAST * (1 + _NEAR))
    return cost(scales), tuple(name for place in unidentifiable for name in _SCALED[place])


def layers_that_fit(
    shape: ModelShape, base: Hardware, precision: Precision, *, memory_bytes: int, chunk_size: int, kv_tokens: int
) -> int:
    """The most layers of `shape` that can be measured within `memory_bytes`, one at least.

    `chunk_size` of the largest chunk, `kv_tokens` of the longest split sequence.
    """
    for num_layers in range(shape.num_layers, 1, -1):
        [memory] = stage_memory(
            CostModel(shape=shape.first(num_layers), hardware=base, precision=precision),
            dp=1,
            layers=(num_layers,),
            held=[ResidentTokens(chunk_size, kv=kv_tokens, kv_gradients=kv_tokens)],
            chunk_size=chunk_size,
        )
        if memory.total <= memory_bytes:
            return num_layers
    return 1


def _hardware(scales: Sequence[float], rates: DeviceRates, base: Hardware, name: str, precision: Precision) -> Hardware:
    """The profile in which what `_SCALED` names takes `scales` times as long as in `rates`, and, where these do not
    have it, as in `base`: in all of which times are linear.
    """
    products, copies, forward, backward, ramp_queries, ramp, kernels, launches = scales
    in_bf16 = rates.flops / rates.fp32_flops if precision == "fp32" else 1.0  # as times in float32 are made of these
    attention = tuple(
        replace(
            each,
            forward_blocks=each.forward_blocks * in_bf16 / forward,
            forward_squares=each.forward_squares * in_bf16 / forward,
            backward_blocks=each.backward_blocks * in_bf16 / backward,
            backward_squares=each.backward_squares * in_bf16 / backward,
            ramp_queries=each.ramp_queries * ramp_queries,
        )
        for each in rates.attention
    )
    return replace(
        base,
        name=name,
        flops=rates.flops / products,
        fp32_flops=rates.fp32_flops / products,
        attention_flops=attention[0].both_blocks if attention else base.attention_flops,
        copy_bytes=rates.copy_bytes / copies,
        ramp_tokens=base.ramp_tokens * ramp / products,
        kernel_ns=base.kernel_ns * kernels,
        launch_ns=rates.layer_overhead_ns / LAYER_KERNELS * launches,
        host_bytes=rates.host_bytes,
        memory_bytes=rates.memory_bytes,
        attention=attention,
    )


def _nearest(predicted: Callable[[Float64Array], Float64Array]) -> Float64Array:
    """The scales for which what is `predicted` of each time, as a share of it, is nearest to 1: by Gauss and Newton.

    Times are linear in scales between the points where another of host and device takes longer.
    """

    def distance(scales: Float64Array) -> float:
        return float(np.sum((predicted(scales) - 1) ** 2) + np.sum((_TRUST * (scales - 1)) ** 2))

    scales = np.ones(len(_SCALED))
    best = distance(scales)
    for _ in range(_STEPS):
        here = predicted(scales)
        slopes = np.stack([(predicted(scales + step) - here) / _NEAR for step in _NEAR * np.eye(scales.size)], 1)
        matrix = np.concatenate([slopes, np.diag(_TRUST)])
        values = np.concatenate([1 - here + slopes @ scales, _TRUST])
        step = _least_squares(matrix, values, _LEAST) - scales
        tried = [scales + step / 2**halves for halves in range(_HALVES)]
        distances = [distance(each) for each in tried]
        if min(distances) >= best:
            break
        best, scales = min(distances), tried[int(np.argmin(distances))]
    return scales


def predicted_ns(cost: CostModel, chunks: Sequence[ChunkTime]) -> Float64Array:
    """Times of chunks that `cost` predicts, [n, 2]: forward_kv and training."""
    tokens = np.array([chunk.num_tokens for chunk in chunks])
    pairs = np.array([chunk.attention_pairs(cost.shape.attention_patterns) for chunk in chunks])
    times = durations(tokens, pairs, cost.rates, (cost.shape.num_layers,))[:, 0].astype(np.float64)
    forward_kv, forward, backward = (times[OPS.index(op)] for op in ("forward_kv", "forward", "backward"))
    return np.stack([forward_kv, forward + backward], 1)


def _measured(chunks: Sequence[ChunkTime]) -> Float64Array:
    return np.array([(chunk.forward_kv_ns, chunk.train_ns) for chunk in chunks])


def _least_squares(matrix: Float64Array, values: Float64Array, least: Float64Array) -> Float64Array:
    """The x >= `least` for which `matrix` x is nearest to `values`.

    With few unknowns the active set is found by trying all (Lawson and Hanson, Solving Least Squares Problems, ch. 23):
    the optimum is the least-squares solution in those unknowns that are not at their bound.
    """
    num_unknowns = matrix.shape[1]
    best, best_distance = least, inf
    for flags in product((True, False), repeat=num_unknowns):
        free = np.array(flags)
        candidate = least.copy()
        if free.any():
            rest = values - matrix[:, ~free] @ candidate[~free]
            candidate[free] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
        distance = float(np.sum((matrix @ candidate - values) ** 2))
        if (candidate >= least).all() and distance < best_distance:
            best, best_distance = candidate, distance
    return best
