"""Chooses levels of activation checkpointing layer by layer: those that fit each stage with least recomputation.

Each stage has GPUs of its own, and so an integer program of its own: the number of its layers with each level. Early
stages of a pipeline hold more chunks at once than late ones, and get stronger levels. Recomputation changes the times,
and these the chunks that stages hold: so the outcome is simulated, and the program is solved again with the memory it
needs until it fits.

The stronger a level is, the more working memory the backward of a layer needs, and the last one needs buffers for
inputs of layers in transit between host and GPU. A stage without a level does not need its room: so it has a program
for the first two levels, one for the first three, and so on, and takes the solution with least recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.activations import (
    activation_bytes_per_token,
    around_of_stages,
    pending_bytes_per_token,
    working_bytes_per_token,
)
from chunkplan.cost.checkpointing import CHECKPOINTINGS, Checkpointing, shown_levels
from chunkplan.cost.durations import Float64Array
from chunkplan.cost.model import CostModel
from chunkplan.cost.states import product_gradient_bytes
from chunkplan.layers import stage_parts
from chunkplan.planning.memory import memory_of_stages, memory_rates_of
from chunkplan.schedule.holdings import ACTIVATIONS, LAST_LAYER, PENDING, highest_peak
from chunkplan.solver import deterministic_solver
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import Outcome, try_out

#: Times that a mixture is solved again if it does not fit.
_ROUNDS = 4

#: The sets of levels that a stage may choose from, in the order to try: stronger ones need more working memory.
_TRIED = tuple(CHECKPOINTINGS[: 1 + num_levels] for num_levels in range(len(CHECKPOINTINGS)))

#: Deterministic seconds of CP-SAT; a program has some ten variables.
_EFFORT = 1.0

#: Mixtures of a layout that are tried, and those that are kept, at most.
_MAX_TRIALS, _MAX_FOUND = 16, 4


class StageProgram(NamedTuple):
    """The choice of levels for the layers of one model stage, as an integer program.

    `kinds` int64 [num_layers]: of each layer. `held` int64 [num_moments, num_kinds, num_levels]: bytes that a layer of
    a kind and a level holds at a moment; `room` int64 [num_moments]: bytes for all layers together.
    """

    kinds: Int64Array
    held: Int64Array
    room: Int64Array


def fewest_ns(counts: Int64Array, held: Int64Array, room: Int64Array, again_ns: Int64Array) -> Int64Array | None:
    """Number of layers of each kind and level that recomputes least, int64 [num_kinds, num_levels].

    An integer program that CP-SAT solves to the optimum. None where nothing fits.

    Args:
        counts: [num_kinds], layers of each kind.
        held, room: see `StageProgram`.
        again_ns: [num_levels], recomputation of a layer.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    takes = [[model.new_int_var(0, int(count), "") for _ in again_ns] for count in counts]
    for of_kind, count in zip(takes, counts, strict=True):
        model.add(sum(of_kind) == int(count))
    terms = [each for of_kind in takes for each in of_kind]
    binding = np.unique(np.column_stack([held.reshape(room.size, -1), room]), axis=0)
    for *of_terms, most in binding.tolist():
        model.add(cp_model.LinearExpr.weighted_sum(terms, of_terms) <= most)
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, again_ns.tolist() * counts.size))
    solver = deterministic_solver(_EFFORT)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([[solver.value(each) for each in of_kind] for of_kind in takes])


def mixture(config: PlanConfig, cost: CostModel, moments: Int64Array, gpu_memory: int, sample: Sample) -> str | None:
    """The levels of all layers that fit `moments` int64 [n, pp, 8] with least recomputation; None if none fit.

    The first layers of a stage get the strongest levels: a backward reaches them last, when the memory of the others is
    free. `sample`: for the sizes of chunks.
    """
    again_ns = _again_ns(config, cost, sample)
    levels: list[Checkpointing] = []
    for programs in _programs(config, cost, moments, gpu_memory):
        chosen = _chosen(programs, again_ns)
        if chosen is None:
            return None
        of_kinds = [iter(np.repeat(np.arange(each.size), each)[::-1].tolist()) for each in chosen]
        levels += [CHECKPOINTINGS[next(of_kinds[kind])] for kind in programs[0].kinds]
    return shown_levels(levels)


def _chosen(programs: Iterable[StageProgram], again_ns: Int64Array) -> Int64Array | None:
    """Number of layers of each kind and level that recomputes least with any of `programs`."""
    best, best_ns = None, np.inf
    for stage in programs:
        num_kinds, num_levels = stage.held.shape[1:]
        counts = np.bincount(stage.kinds, minlength=num_kinds)
        chosen = fewest_ns(counts, stage.held, stage.room, again_ns[:num_levels])
        if chosen is not None and (chosen @ again_ns[:num_levels]).sum() < best_ns:
            best, best_ns = chosen, (chosen @ again_ns[:num_levels]).sum()
        if best_ns == 0:
            break
    return best


def _again_ns(config: PlanConfig, cost: CostModel, sample: Sample) -> Int64Array:
    """Time that each level recomputes of a layer in a step, in nanoseconds, int64 [num_levels].

    Includes the time by which the host link exceeds a layer, and one nanosecond where it does not: of two levels with
    equal recomputation the first is to be taken.
    """
    tokens, pairs = sample.tokens_per_step, sample.attention_pairs_per_step(cost)
    num_chunks = tokens / config.chunk_size
    rates = cost.rates
    forward = (rates.token + rates.mask) * tokens + rates.pair * pairs + rates.chunk * num_chunks
    found = []
    for level in CHECKPOINTINGS:
        again = replace(cost, checkpointing=level).rates.again
        again_ns, on_link = again.token * tokens + again.pair * pairs + again.chunk * num_chunks, again.host * tokens
        waits = max(0.0, on_link - forward) + max(0.0, on_link - 2 * forward - again_ns) + bool(on_link)
        found.append(round(again_ns + waits))
    return np.array(found)


def _programs(
    config: PlanConfig, cost: CostModel, moments: Int64Array, gpu_memory: int
) -> Iterator[tuple[StageProgram, ...]]:
    """The programs of all model stages in order, once for each of the sets of levels in `_TRIED`."""
    rest = np.array(
        [[each.total - each.activations for each in memory_of_stages(config, cost, moment)] for moment in moments]
    )
    return zip(*(_programs_of(config, cost, moments, gpu_memory - rest, levels) for levels in _TRIED), strict=True)


def _programs_of(
    config: PlanConfig, cost: CostModel, moments: Int64Array, room_on: Int64Array, levels: Sequence[Checkpointing]
) -> Iterator[StageProgram]:
    """The program of each model stage for `levels`; `room_on` int64 [n, pp]: bytes left for activations on each stage.

    Memory of a virtual stage is counted as if its whole stage held as much per token, as in `token_bytes`.
    """
    shape, layers = cost.shape, config.layers(cost.shape.num_layers)
    # The strongest level comes first, and says whether the first layer keeps what comes from the stage before.
    around, of_weakest = (around_of_stages(replace(cost, checkpointing=levels[end]), layers) for end in (-1, 0))
    of_layer = np.array([[activation_bytes_per_token(cost, kind, level) for level in levels] for kind in shape.kinds])
    waiting = np.array([[pending_bytes_per_token(cost, kind)] for kind in shape.kinds])
    working = np.array([max(working_bytes_per_token(cost, kind, level) for level in levels) for kind in shape.kinds])
    order, stops = np.array(shape.order), list(accumulate(layers))
    parts = stage_parts(range(len(layers)), config.pp, config.placement)
    stage_of = {model_stage: stage for stage, own in enumerate(parts) for model_stage in own}
    for model_stage, stop in enumerate(stops):
        stage = stage_of[model_stage]
        kinds = order[stop - layers[model_stage] : stop]
        on_stage = np.concatenate([order[stops[each] - layers[each] : stops[each]] for each in parts[stage]])
        tokens = moments[:, stage]
        # What the first layer has left is no more than the mean, as the strongest level comes first.
        retained = tokens[:, ACTIVATIONS] + tokens[:, LAST_LAYER] / kinds.size  # [n]
        held = retained[:, None, None] * of_layer + tokens[:, PENDING, None, None] * np.maximum(waiting - of_layer, 0.0)
        product = product_gradient_bytes(cost, config.dp, [(shape.kinds[kind], 1) for kind in np.unique(on_stage)])
        room = room_on[:, stage] - int(np.ceil(config.chunk_size * working[on_stage].max() + product)) - 2
        room = room - np.ceil(tokens[:, ACTIVATIONS] * max(around[each] for each in parts[stage])).astype(np.int64)
        if of_weakest[model_stage] > around[model_stage]:  # then the first layer has another level than the weakest
            weakest = np.zeros((1, *of_layer.shape))
            weakest[0, kinds[0], 0] = 1
            held, room = np.concatenate([held, weakest]), np.append(room, np.sum(kinds == kinds[0]) - 1)
        yield StageProgram(kinds, np.ceil(held).astype(np.int64), room)


def fitted(
    samples: Sequence[Sample], config: PlanConfig, cost: CostModel, moments: Int64Array, gpu_memory: int
) -> list[Outcome] | None:
    """Try levels layer by layer on `samples` until they fit all of these; None where none is found.

    `moments` int64 [n, pp, 8]: peak snapshots of stages in trials with other levels. `cost` has all but the levels.
    """
    for _ in range(_ROUNDS):
        levels = mixture(config, cost, moments, gpu_memory, samples[0])
        if levels is None:
            return None
        cost = replace(cost, checkpointing=levels)
        outcomes = [try_out(sample, config, cost) for sample in samples]
        if all(outcome.fits(cost, gpu_memory) for outcome in outcomes):
            return outcomes
        moments = np.concatenate([moments, *(outcome.peaks[int(cost.kv_offload)] for outcome in outcomes)])
    return None


def fastest_fitting(sample: Sample, config: PlanConfig, cost: CostModel, gpu_memory: int) -> CostModel:
    """`cost` with the levels that run least again and fit; the last level where none is found."""
    for level in CHECKPOINTINGS:
        outcome = try_out(sample, config, replace(cost, checkpointing=level))
        if outcome.fits(outcome.cost, gpu_memory):
            break
    if outcome.cost.checkpointing == CHECKPOINTINGS[0]:
        return outcome.cost
    found = fitted([sample], config, cost, outcome.peaks[int(cost.kv_offload)], gpu_memory) or []
    return min([outcome, *found], key=lambda each: each.step_ns).cost


def mixed(sample: Sample, options: TuneOptions, tried: Iterable[Outcome], fastest_ns: float) -> list[Outcome]:
    """Try levels layer by layer where they may be faster than `fastest_ns`, the fastest of one level for all.

    `tried`: what was tried, with any one level.
    """
    last = {(outcome.config, outcome.cost.sharding): outcome for outcome in tried}
    hopeful: list[tuple[float, int, Outcome, CostModel]] = []
    for outcome, kv_offload in product(last.values(), (False, True)):
        cost = replace(outcome.cost, checkpointing=CHECKPOINTINGS[0], kv_offload=kv_offload)
        if kv_offload and outcome.config.chunk_size < cost.offload_chunk_size:
            continue
        if not outcome.fits(cost, options.gpu_memory):
            hopeful.append((_estimate(outcome, cost, options.gpu_memory, sample), len(hopeful), outcome, cost))
    found: list[Outcome] = []
    for estimate, _, outcome, cost in sorted(hopeful, key=lambda each: each[:2])[:_MAX_TRIALS]:
        if estimate < fastest_ns and len(found) < _MAX_FOUND:
            moments = outcome.peaks[int(cost.kv_offload)]
            found += fitted([sample], outcome.config, cost, moments, options.gpu_memory) or []
            fastest_ns = min([fastest_ns, *(each.step_ns for each in found)])
    return found


def _estimate(outcome: Outcome, cost: CostModel, gpu_memory: int, sample: Sample) -> float:
    """Estimated nanoseconds of a step if parts of layers could have a level, at the peak memory; inf: none fit."""
    config, rates = outcome.config, cost.rates
    most, _ = highest_peak(outcome.peaks[int(cost.kv_offload)], memory_rates_of(config, outcome.cost))
    again_ns = _again_ns(config, cost, sample)
    tokens, pairs = sample.tokens_per_step, sample.attention_pairs_per_step(cost)
    of_attention = (rates.pair + rates.backward.pair) * pairs + (rates.mask + rates.backward.token) * tokens
    layer_ns = 3 * (rates.token + rates.chunk / config.chunk_size) * tokens + of_attention
    slowest = 0.0
    for programs in _programs(config, cost, most[None], gpu_memory):
        estimates = (_estimated_ns(stage, again_ns) for stage in programs)
        slowest = max(slowest, min(estimates))
    of_tried = again_ns[CHECKPOINTINGS.index(outcome.cost.levels[0])]
    return outcome.step_ns * float((layer_ns + slowest) / (layer_ns + of_tried))


def _estimated_ns(stage: StageProgram, again_ns: Int64Array) -> float:
    """Nanoseconds a stage recomputes at its first snapshot if parts of layers could have a level; inf: none fit."""
    num_bytes: Float64Array = stage.held[0][stage.kinds].sum(axis=0).astype(np.float64)  # [num_levels]
    if num_bytes[-1] > stage.room[0]:
        return float("inf")
    return float(np.interp(stage.room[0], num_bytes[::-1], again_ns[: num_bytes.size][::-1]))
