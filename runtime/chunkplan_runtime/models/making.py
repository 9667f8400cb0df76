"""How transformers is asked to make a model, and what it raises if it cannot."""

from __future__ import annotations

import copy
from typing import Any, NotRequired, TypedDict

import torch
from huggingface_hub.errors import StrictDataclassError

from chunkplan.errors import DataError
from chunkplan_runtime.attention.interface import ATTENTION, register_attention
from chunkplan_runtime.models.parts import AUTO_MODEL

CONFIG_HINT = "take the config.json that came with a model"

#: What transformers raises for a config or a checkpoint that it cannot use.
REFUSALS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)


class ModelArguments(TypedDict):
    """How transformers is to make a model."""

    dtype: torch.dtype
    attn_implementation: str
    experts_implementation: NotRequired[str]


def how_to_make(dtype: torch.dtype) -> ModelArguments:
    """The arguments for a model whose weights are of `dtype`, and whose attention is that of chunks."""
    arguments: ModelArguments = {"dtype": dtype, "attn_implementation": ATTENTION}
    if dtype == torch.float64:
        arguments["experts_implementation"] = "eager"  # the grouped products of torch take no float64
    return arguments


def make(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A new transformers model, drawn on `device`.

    Raises:
        DataError: transformers cannot build it.
    """
    register_attention()
    try:
        with torch.device(device):
            return AUTO_MODEL.from_config(copy.deepcopy(config), **how_to_make(dtype))
    except REFUSALS as error:
        raise DataError(
            f"a {config.model_type} model cannot be built from its config: {error}", hint=CONFIG_HINT
        ) from error
