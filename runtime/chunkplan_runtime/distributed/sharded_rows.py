"""The rows of its stage's weights that a process has, around FSDP2, which shards shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from chunkplan_runtime.models.hollow import replace_weights
from chunkplan_runtime.models.model import CausalLM

#: A module, the name of a weight in it, and the rows of that which this process has.
Place = tuple[nn.Module, str, Tensor]


def take_rows(model: CausalLM, replicas: DeviceMesh, *, master_weights: bool) -> list[Place]:
    """Leave the shapes of a model's weights, on torch's meta device, and return of each the rows of this process.

    It is done weight by weight, so that there are never more than the rows and one weight: of a whole weight its rows
    are copied, and where these are `master_weights` it is they that become float32; those of frozen weights do not.
    """
    device = torch.device(replicas.device_type)
    rows: dict[nn.Parameter, Tensor] = {}

    def take(weight: nn.Parameter) -> nn.Parameter:
        own = model.rows.pop(weight, None)
        if own is None:
            chunks = torch.chunk(weight.data, replicas.size())
            own = next(iter(chunks[replicas.get_local_rank() :]), weight.data[:0]).clone()
        if master_weights:
            own = own.float() if weight.requires_grad else own.to(weight.dtype)
        shape = nn.Parameter(own.new_empty(weight.shape, device="meta"), requires_grad=weight.requires_grad)
        rows[shape] = own.to(device)
        return shape

    replace_weights(model.model, take)
    return [
        (module, name, rows[shape])
        for module in model.model.modules()
        for name, shape in module._parameters.items()
        if shape is not None
    ]


def give_rows(places: Sequence[Place]) -> None:
    """Put the rows of this process where FSDP2 has sharded shapes."""
    made: dict[int, nn.Parameter] = {}
    for module, name, own in places:
        if id(own) not in made:
            sharded: Any = module._parameters[name]
            how = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
            filled = DTensor.from_local(own, sharded.device_mesh, sharded.placements, **how)
            made[id(own)] = nn.Parameter(filled, requires_grad=sharded.requires_grad)
        module._parameters[name] = made[id(own)]
