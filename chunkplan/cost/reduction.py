"""What the ranks that share a stage send each other at the end of a step, and how many parameters that is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import GRADIENT_BYTES
from chunkplan.cost.shape import Layer
from chunkplan.layers import STRAIGHT, StagePlacement, last_stage, stage_parts


class StageWeights(NamedTuple):
    """What a GPU of a stage has of the model: `layers` of it, and `ends`, embeddings and vocabulary head.

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


def reduction_ns(
    cost: CostModel, *, dp: int, pp: int, layers: Sequence[int], placement: StagePlacement = STRAIGHT
) -> int:
    """What `dp` data-parallel ranks take at the end of a step to sum gradients and to share what was updated.

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
