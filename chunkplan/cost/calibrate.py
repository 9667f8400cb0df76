"""A hardware profile from times of chunks: the one whose predictions are nearest to what was measured.

The cost model is linear in the time that a FLOP of a product, a FLOP of attention, a copied byte, a token of ramp and
a kernel take. Times of chunks of one model tell four sums of them apart (what a token, a pair, a chunk and a token in
the head take), so two of the five lean on what the device does on its own: copies and the overhead of a layer. All
else in a profile one device cannot show; it comes from a profile that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from chunkplan.arrays import BoolArray
from chunkplan.cost.durations import Float64Array, durations
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.held import Held
from chunkplan.cost.measurements import ChunkTime, DeviceRates
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel, Precision
from chunkplan.cost.shape import ModelShape
from chunkplan.errors import UsageError
from chunkplan.operations import OPS

#: One chunk in so many is left out of the fit, to check it against.
_HOLD_OUT_EVERY = 3

#: Fewer chunks than these do not tell the rates apart.
LEAST_CHUNKS = 6

#: Entries of a profile by what the fit scales, times of products, copies, attention, ramp and kernels: see `_hardware`.
_SCALED = (("flops", "fp32_flops"), ("copy_bytes",), ("attention_flops",), ("ramp_tokens",), ("kernel_ns",))
_COPY, _KERNEL = 1, 4

#: The least scales: products, copies and attention no faster than any device does them, ramp and kernels next to none.
_LEAST = np.array([0.25, 0.1, 0.1, 0.01, 0.001])

#: How far the device's own rate of copies and overhead of a layer are from those within chunks, over how far times of
#: chunks are from the model: the weight of the former in the fit. Where times decide, it does not matter.
_TRUST = 0.1

#: Entries of a profile that times of chunks decide; those of products are scaled together.
FITTED = tuple(name for names in _SCALED for name in names)

#: Entries that the device gives without any chunk.
MEASURED = ("host_bytes", "memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted profile and what it predicts for each chunk.

    `cost` is the model that was measured, on the fitted hardware. `held_out` [n] says which of the chunks the fit did
    not see; `forward_kv_ns` and `train_ns` [n] are predicted, of what `ChunkTime` calls so. `untold` names entries of
    the profile that would be beyond any device, as what they stand for takes no time in these chunks.
    """

    cost: CostModel
    base: Hardware
    rates: DeviceRates
    chunks: tuple[ChunkTime, ...]
    held_out: BoolArray
    untold: tuple[str, ...]
    forward_kv_ns: Float64Array
    train_ns: Float64Array

    @property
    def hardware(self) -> Hardware:
        """The fitted profile."""
        return self.cost.hardware

    @property
    def what(self) -> str:
        """What was measured, in words."""
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
        """How far predictions are off for the chunks that the fit did not see, [m, 2]."""
        return np.abs(self.errors[self.held_out])

    @property
    def spread(self) -> float:
        """The median spread of a chunk's repetitions: no prediction can be nearer than that."""
        return float(np.median([chunk.spread for chunk in self.chunks]))

    @property
    def backward_forwards(self) -> float:
        """How many forwards of its layers a backward takes, by the times measured; the cost model has it at 2.

        What the head and sums of gradients take is left out, at the rate of copies that was measured: the fitted one
        makes up for a backward that takes more.
        """
        tokens = np.array([chunk.num_tokens for chunk in self.chunks])
        forward_kv, train = _measured(self.chunks).T
        hardware = replace(self.cost.hardware, copy_bytes=self.rates.copy_bytes)
        rates, num_layers = replace(self.cost, hardware=hardware).rates, self.cost.shape.num_layers
        beside = rates.trained_head * tokens + rates.sums.of_chunk(num_layers)
        return float(np.median((train - beside) / forward_kv - 1))


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

    def cost(scales: Sequence[float]) -> CostModel:
        return CostModel(shape=shape, hardware=_hardware(scales, rates, base, name), precision=precision)

    alone = [cost(row) for row in np.maximum(np.eye(len(_SCALED)), 1e-12)]  # only one of them takes any time
    matrix = np.stack([(_predicted(one, fitted) / _measured(fitted)).ravel() for one in alone], 1)
    leaning = np.zeros((2, len(_SCALED)))
    leaning[0, _COPY] = 1
    leaning[1, _KERNEL] = alone[_KERNEL].rates.chunk / rates.layer_overhead_ns
    values = np.append(np.ones(len(matrix)), [_TRUST, _TRUST])
    scales = _least_squares(np.concatenate([matrix, _TRUST * leaning]), values, _LEAST)
    found = cost(scales.tolist())
    forward_kv, train = _predicted(found, chunks).T
    return Calibration(
        cost=found,
        base=base,
        rates=rates,
        chunks=tuple(chunks),
        held_out=held_out,
        untold=tuple(name for place in np.flatnonzero(scales == _LEAST) for name in _SCALED[place]),
        forward_kv_ns=forward_kv,
        train_ns=train,
    )


def layers_that_fit(
    shape: ModelShape, base: Hardware, precision: Precision, *, memory_bytes: int, chunk_size: int, kv_tokens: int
) -> int:
    """How many layers of `shape` can be measured within `memory_bytes`, one at least.

    `chunk_size` of the largest chunk, `kv_tokens` of the longest split sequence.
    """
    for num_layers in range(shape.num_layers, 1, -1):
        [memory] = stage_memory(
            CostModel(shape=shape.first(num_layers), hardware=base, precision=precision),
            dp=1,
            layers=(num_layers,),
            held=[Held(chunk_size, kv=kv_tokens, kv_gradients=kv_tokens)],
            chunk_size=chunk_size,
        )
        if memory.total <= memory_bytes:
            return num_layers
    return 1


def _hardware(scales: Sequence[float], rates: DeviceRates, base: Hardware, name: str) -> Hardware:
    """The profile in which products, copies, attention, the ramp and kernels take `scales` times as long as the first
    three do in `rates` (attention as long as products), and the last two in `base`: in all of which times are linear.
    """
    products, copies, attention, ramp, kernels = scales
    return replace(
        base,
        name=name,
        flops=rates.flops / products,
        fp32_flops=rates.fp32_flops / products,
        attention_flops=rates.flops / attention,
        copy_bytes=rates.copy_bytes / copies,
        ramp_tokens=base.ramp_tokens * ramp / products,
        kernel_ns=base.kernel_ns * kernels,
        host_bytes=rates.host_bytes,
        memory_bytes=rates.memory_bytes,
    )


def _predicted(cost: CostModel, chunks: Sequence[ChunkTime]) -> Float64Array:
    """Nanoseconds [n, 2], of forward_kv and of training."""
    tokens = np.array([chunk.num_tokens for chunk in chunks])
    pairs = np.array([chunk.attention_pairs(cost.shape.sights) for chunk in chunks])
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
