"""What the ranks that share a stage send each other at the end of a step, and how many parameters that is of."""

from __future__ import annotations

from collections.abc import Sequence

from chunkplan.cost.model import GRADIENT_BYTES, CostModel
from chunkplan.layers import last_stage, stage_parts


def stage_parameters(
    cost: CostModel, pp: int, layers: Sequence[int], v_shaped: bool = False
) -> list[tuple[float, float]]:
    """Parameters on a GPU of each of `pp` stages: of its layers, and of embeddings and vocabulary head.

    `layers`: of each model stage, which lie on stages as `model_stage_of` has it (`v_shaped`). The first one has the
    embeddings, the last one the head; tied ones are on both unless that is one stage.
    """
    shape = cost.shape
    own = [sum(layer.parameters(shape.hidden_size) * count for layer, count in each) for each in shape.split(layers)]
    found, last = [], last_stage(pp, v_shaped)
    for stage, of_stage in enumerate(stage_parts(own, pp, v_shaped)):
        ends = (stage == 0) + (stage == last) - (stage == last == 0 and shape.tied_embeddings)
        parameters = sum(of_stage), ends * shape.embedding_parameters
        found.append((parameters[0] / cost.tp, parameters[1] / cost.tp))
    return found


def reduction_ns(cost: CostModel, *, dp: int, pp: int, layers: Sequence[int], v_shaped: bool = False) -> int:
    """What `dp` data-parallel ranks take at the end of a step to sum gradients and to share what was updated.

    A ring over the float32 gradients that no backward has reduced, and one over the updated weights, but for those of
    layers that every chunk fetches. Ranks that share nothing each update all weights: they share the sums instead. The
    same on every rank: it takes as long as on the stage that has most. What the runtime hides of it behind the last
    backwards of a step is not taken off.
    """
    most = 0.0
    for of_layers, of_ends in stage_parameters(cost, pp, layers, v_shaped):
        everything = of_layers + of_ends
        summed = GRADIENT_BYTES * (of_ends if cost.shares("gradients") else everything)
        updated = cost.num_bytes * (of_ends if cost.shares("weights") else everything)
        shared = updated if cost.shares("optimizer") else summed
        most = max(most, cost.ring_ns(summed + shared, dp))
    return round(most)
