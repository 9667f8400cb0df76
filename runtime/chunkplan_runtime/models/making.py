"""How transformers is asked to make a model, and what it raises if it cannot."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from huggingface_hub.errors import StrictDataclassError

from chunkplan_runtime.attention.interface import ATTENTION

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
