"""Adapters added to the weights below them, so that a model can be saved whole and loaded without peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from chunkplan.errors import UsageError
from chunkplan_runtime.devices import wide
from chunkplan_runtime.tensor_file import Kind

_HINT = "leave --merge-adapters out, or name other layers by --lora-targets"


class Read(Protocol):
    """Reads tensors that are stored somewhere."""

    def __call__(self, tensors: dict[str, Tensor], first: int = 0, /) -> None:
        """Fill each of `tensors`, by name, with the rows of it from `first` on, in whatever dtype it is."""


class Addition(NamedTuple):
    """What an adapter adds to a weight: `scale` times the product of two others, by their names.

    The weight is [out_features, in_features], or with `experts` [experts, out_features, in_features]; `transposed`: the
    last two the other way round. `down` is [experts x rank, in_features], `up` [out_features, rank x experts].
    """

    down: str
    up: str
    scale: float
    transposed: bool
    experts: int = 1


def additions(model: Any) -> dict[str, Addition]:
    """What the adapters of a peft model add to its weights, by the names that these have without adapters.

    Raises:
        UsageError: an adapter is not of a linear layer, or its weight is used by other layers too.
    """
    from peft.tuners.lora import Linear, LoraLayer, ParamWrapper

    uses: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        uses[id(weight)] = uses.get(id(weight), 0) + 1
    found = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = layer.get_base_layer()
        own = getattr(layer, "parameter_name", "weight")
        name = plain_name(f"{path}.{own}")
        if not isinstance(layer, (Linear, ParamWrapper)):
            raise UsageError(
                f"--merge-adapters: that of {name} ({type(base).__name__}) is none of a linear layer", hint=_HINT
            )
        if uses[id(getattr(base, own))] > 1:
            raise UsageError(
                f"--merge-adapters: {name} has an adapter, and another layer has the same weight without it",
                hint=_HINT,
            )
        [adapter] = layer.active_adapters
        down, up = (f"{path}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
        transposed = layer.fan_in_fan_out or getattr(base, "is_transposed", False)  # of Conv1D, and of experts
        found[name] = Addition(down, up, layer.scaling[adapter], transposed, getattr(layer, "num_experts", 1))
    return found


def plain_name(name: str) -> str:
    """The name that a weight of a peft model has without peft."""
    return ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part != "base_layer")


def merged(model: Any, stored: Mapping[str, Kind], read: Read) -> tuple[Any, dict[str, Kind], Read]:
    """A peft model as one that is whole without its adapters: the model, kinds of its weights, and what fills these.

    `stored` has the kinds of weights by their names in the peft model, adapters too, and `read` fills tensors by these
    names. Sums are in float32, of float64 weights in that, and rounded once to the dtype of the weight. `model` itself
    is left without adapters.

    Raises:
        UsageError: as `additions`.
    """
    added = additions(model)
    adapters = {name for each in added.values() for name in (each.down, each.up)}
    names = {plain_name(name): name for name in stored if name not in adapters}
    plain = model.unload()

    def read_merged(tensors: dict[str, Tensor], first: int = 0) -> None:
        parts = {part for name in tensors if name in added for part in (added[name].down, added[name].up)}
        factors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in parts}
        read(factors)
        read({names[name]: tensor for name, tensor in tensors.items()}, first)
        for name, tensor in tensors.items():
            if name in added:
                _add(tensor, first, added[name], factors)

    return plain, {name: stored[of_peft] for name, of_peft in names.items()}, read_merged


def _add(rows: Tensor, first: int, addition: Addition, factors: Mapping[str, Tensor]) -> None:
    """Add what an adapter adds to the rows of a weight from `first` on; of experts a row is one of them."""
    dtype = wide(rows.dtype)
    down = factors[addition.down].to(dtype)  # [experts x rank, in_features]
    up = factors[addition.up].to(dtype)  # [out_features, rank x experts]
    downs = down.view(addition.experts, -1, down.shape[1])
    ups = up.view(len(up), -1, addition.experts)
    own = slice(first, first + len(rows))
    if addition.experts > 1 or rows.dim() > 2:
        for expert, matrix in enumerate(rows, first):
            _add_product(matrix, ups[..., expert], downs[expert], addition)
    elif addition.transposed:
        _add_product(rows, ups[..., 0], downs[0][:, own], addition)
    else:
        _add_product(rows, ups[own, :, 0], downs[0], addition)


def _add_product(matrix: Tensor, up: Tensor, down: Tensor, addition: Addition) -> None:
    product = up @ down  # [out_features, in_features], or rows of either
    product *= addition.scale
    matrix.copy_((product.T if addition.transposed else product).add_(matrix))
