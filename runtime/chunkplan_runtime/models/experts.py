"""By which names configs of transformers say how many experts a mixture has, and how many a token goes to."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

#: How many experts there are, by what configs call it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

#: To how many of them a token goes.
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def has_experts(model: nn.Module, config: Any) -> bool:
    """Whether layers of a model of this config may have experts: the config names some, or weights are called so."""
    named = all(any(getattr(config, name, None) for name in names) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    return named or any(".experts." in name for name, _ in model.named_parameters())


def share_of_tokens(config: Any, name: str, weight: nn.Parameter, module: nn.Module) -> float:
    """The share of tokens that meet a weight of `module`: all of them, or of experts those that go there.

    The weights of all experts are one, [num_experts, ...], or those of each expert are by themselves.
    """
    num_experts, chosen = (_first(config, names, _layer_of(name)) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    if not num_experts or not chosen:
        return 1.0
    if re.search(r"\bexperts\.\d+\.", name):
        return min(chosen / num_experts, 1.0)
    is_stack = weight.ndim == 3 and not isinstance(module, _CONVOLUTIONS)
    if is_stack and (weight.shape[0] == num_experts or ".experts." in name):
        return min(chosen / weight.shape[0], 1.0)
    return 1.0


def _first(config: Any, names: tuple[str, ...], layer: int) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):  # of some models an entry a layer
            value = value[layer] if 0 <= layer < len(value) else None
        if type(value) is int and value > 0:
            return value
    return None


def _layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1
