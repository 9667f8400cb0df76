"""Weights, gradients and optimizer states of a stage: their bytes on a GPU, and what ranks send each other of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import GRADIENT_BYTES, moment_bytes
from chunkplan.cost.shape import Layer, Layers
from chunkplan.layers import STRAIGHT, StagePlacement, last_stage, stage_parts

#: Where weights are sharded, the layer at work and the next one are whole on every GPU; where gradients are, those of
#: the layer at work and of the one whose gradients are being reduced. Embeddings and head are whole for all of a step,
#: and copied one after the other when their gradients are reduced.
_WHOLE_LAYERS = 2

#: As a forward gathers a layer, two more are there as they came, of it and of the one before, which FSDP2 gives back
#: only when the weights of the next one have been made of what came.
_GATHERED_LAYERS = 2


class StageWeights(NamedTuple):
    """Parameters on a GPU of a stage: `layers`, and `ends`, embeddings and vocabulary head.

    Parameters, and `layer_bytes` of those of layers; `trained_layers` and `trained_ends` of them are trained.
    """

    layers: float
    ends: float
    layer_bytes: float
    trained_layers: float
    trained_ends: float


def stage_parameters(
    cost: CostModel, pp: int, layers: Sequence[int], placement: StagePlacement = STRAIGHT
) -> list[StageWeights]:
    """Parameters on a GPU of each of `pp` stages.

    `layers`: of each model stage, which lie on stages as `model_stage_of` has it (`placement`). The first one has the
    embeddings, the last one the head; tied ones are on both unless that is one stage.
    """
    shape, adapters = cost.shape, cost.adapters
    last = last_stage(pp, placement)

    def of_layers(of: Callable[[Layer], float]) -> list[float]:
        own = [sum(of(layer) * count for layer, count in each) for each in shape.split(layers)]
        return [sum(of_stage) / cost.tp for of_stage in stage_parts(own, pp, placement)]

    sums = map(
        of_layers,
        (lambda layer: layer.parameters(shape.hidden_size), adapters.weight_bytes, adapters.trained_parameters),
    )
    found = []
    for stage, (parameters, layer_bytes, trained) in enumerate(zip(*sums, strict=True)):
        num_ends = (stage == 0) + (stage == last) - (stage == last == 0 and shape.tied_embeddings)
        ends = num_ends * shape.embedding_parameters / cost.tp
        found.append(StageWeights(parameters, ends, layer_bytes, trained, 0.0 if cost.lora_rank else ends))
    return found


class States(NamedTuple):
    """Bytes on one GPU. `at_end`: of gradients when the last ones of a step are reduced, 0 unless that is a matter of
    its own, see `_bytes_at_end`."""

    weights: float
    gradients: float
    at_end: float
    optimizer: float


def held_states(cost: CostModel, dp: int, layers: Layers, weights: StageWeights, in_backward: float) -> States:
    """Bytes of weights, gradients and optimizer of a stage with `layers`, which are `weights`, on one of `dp` ranks.

    `in_backward`: bytes that the backward of a layer takes beside it and its gradients, which are not there yet when a
    forward gathers one.
    """
    num_bytes, tp, adapters = cost.num_bytes, cost.tp, cost.adapters
    trained = weights.trained_layers + weights.trained_ends
    whole, gradients, gathered = weights.layer_bytes + weights.ends * num_bytes, trained, 0.0
    # Shares of weights that stay while weights are whole: of those that have no master weights in their place.
    own_bytes = whole - (trained * num_bytes if cost.precision == "bf16" else 0)
    at_work = trained
    if dp > 1 and cost.shares("gradients"):
        reduced = min(weights.trained_ends, cost.shape.embedding_parameters / tp)
        at_work = max(_largest(layers, adapters.trained_parameters) / tp, reduced)
        gradients = trained / dp + weights.trained_ends + at_work
    if dp > 1 and cost.shares("optimizer"):
        gathered = _largest(layers, adapters.weight_bytes, _GATHERED_LAYERS) / tp
    if dp > 1 and cost.shares("weights"):
        whole = weights.ends * num_bytes + _largest(layers, adapters.weight_bytes) / tp
        gathered /= _GATHERED_LAYERS  # of three layers two are counted
    beside = max(0.0, gathered - in_backward - at_work * GRADIENT_BYTES)
    held = whole + (own_bytes / dp if dp > 1 and cost.shares("optimizer") else 0) + beside
    unpacked = max(_largest_matrix(layer) for layer, _ in layers) * cost.shape.hidden_size * num_bytes / tp
    return States(
        weights=held + (unpacked if cost.load_in_4bit else 0),
        gradients=gradients * GRADIENT_BYTES,
        at_end=_bytes_at_end(cost, dp, layers, weights),
        optimizer=trained * optimizer_bytes(cost) / (dp if cost.shares("optimizer") else 1),
    )


def optimizer_bytes(cost: CostModel) -> float:
    """Optimizer bytes of a trained weight: its moments, and in bf16 the float32 master weight."""
    return moment_bytes(cost.optimizer, cost.shape.hidden_size) + (4 if cost.precision == "bf16" else 0)


def product_gradient_bytes(cost: CostModel, dp: int, layers: Layers) -> float:
    """The gradient of the largest weight of a stage with `layers` as products write it, before it is added to its sum.

    Where gradients are shared, what is counted of them has room for it. All experts of a layer are one weight, or two
    where they are gated. Adapters are too small to count.
    """
    if cost.lora_rank or (dp > 1 and cost.shares("gradients")):
        return 0.0
    widths = (
        max(
            layer.query_width,
            (1 + layer.is_gated) * layer.all_mlp_width if layer.experts_per_token else layer.mlp_width,
        )
        for layer, _ in layers
    )
    return max(widths) * cost.shape.hidden_size * cost.num_bytes / cost.tp


def _bytes_at_end(cost: CostModel, dp: int, layers: Layers, weights: StageWeights) -> float:
    """Gradient bytes in the last backward of a step where only optimizer states are sharded.

    That backward reduces layer by layer, and does not wait for slower ranks. Until these arrive, it holds its send
    buffers, which are the whole sums, and the received shares of all layers but the current one; the sum of that layer,
    or of embeddings or head after it, is held twice as it is copied to its send buffer. Activations are gone by then,
    except those of the current layer, so the peak of the step may be earlier.
    """
    if dp == 1 or not cost.shares("optimizer") or cost.shares("gradients"):
        return 0.0
    at_work = _largest(layers, cost.adapters.trained_parameters, 1) / cost.tp * (1 - 1 / dp)
    copied = max(at_work, min(weights.trained_ends, cost.shape.embedding_parameters / cost.tp))
    sent = weights.trained_layers + weights.trained_ends
    return (sent + weights.trained_layers / dp + copied) * GRADIENT_BYTES


def _largest(layers: Layers, of: Callable[[Layer], float], number: int = _WHOLE_LAYERS) -> float:
    """The sum of what `of` says of the `number` layers of which it is most."""
    sizes = [of(layer) for layer, count in layers for _ in range(min(count, number))]
    return sum(sorted(sizes)[-number:])


def _largest_matrix(layer: Layer) -> int:
    """The width of the largest matrix of a layer, beside the hidden size: weights of 4 bits are made whole one by one.

    Of recurrent layers what they keep for a backward tells it.
    """
    return max(layer.mlp_width, layer.query_width, layer.mixed_width)


def reduction_ns(
    cost: CostModel, *, dp: int, pp: int, layers: Sequence[int], placement: StagePlacement = STRAIGHT
) -> int:
    """Time for `dp` data-parallel ranks to reduce gradients and gather updated weights at the end of a step.

    A ring over the float32 gradients that no backward has reduced, and one over the updated weights, but for those of
    layers that every chunk fetches; nothing of frozen weights. Ranks that share nothing each update all weights: they
    share the sums instead. The same on every rank: it takes as long as on the stage that has most. What the runtime
    hides of it behind the last backwards of a step is not taken off. Of what goes on within actions, the first gather
    and the last reduction of a layer have no work beside them, and are in it too.
    """
    rates = cost.rates_on(dp)
    most = 0.0
    for of_stage in stage_parameters(cost, pp, layers, placement):
        of_ends = of_stage.trained_ends
        everything = of_stage.trained_layers + of_ends
        summed = GRADIENT_BYTES * (of_ends if cost.shares("gradients") else everything)
        updated = cost.num_bytes * (of_ends if cost.shares("weights") else everything)
        shared = updated if cost.shares("optimizer") else summed
        most = max(most, cost.ring_ns(summed + shared, dp))
    return round(most + rates.gather + rates.reduce)
