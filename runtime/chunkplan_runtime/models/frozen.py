"""Frozen weights: which ones, by patterns of their names, and those in 4 bits.

A frozen weight has no gradient, no state of the optimizer and no fp32 master weight, and no process reduces it.
Weights in 4 bits (QLoRA, Dettmers et al., arXiv 2305.14314) are by bitsandbytes, as transformers loads them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install

#: How many names an error shows that are near, and how many kinds of names at most where none is.
_SHOWN, _KINDS = 3, 6

#: From here on two names are near, by the share of their letters that they have in common.
_NEAR = 0.6


def frozen_names(model: Any, freeze: Sequence[str], train_only: Sequence[str]) -> set[str]:
    """The names of the weights of a whole model that are not trained.

    `freeze` and `train_only` are globs, of which one is empty: `*` stands for any letters, dots too. Weights that are
    one, such as tied embeddings, are frozen, or trained, by any of their names.

    Raises:
        UsageError: a pattern is of no weight, or none is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    flag, patterns = ("--freeze", freeze) if freeze else ("--train-only", train_only)
    matched = set()
    for pattern in patterns:
        found = {id(weight) for name, weight in named if fnmatchcase(name, pattern)}
        if not found:
            raise _no_such_weight(flag, pattern, [name for name, _ in named])
        matched |= found
    frozen = {name for name, weight in named if (id(weight) in matched) == bool(freeze)} if patterns else set()
    if len(frozen) == len(named):
        raise UsageError(
            f"{flag} {shlex.quote(','.join(patterns))} leaves nothing to train: all {len(named)} weights match",
            hint=f"name fewer, such as --freeze {shlex.quote(named[0][0])}",
        )
    return frozen


def freeze_weights(model: Any, names: set[str]) -> None:
    """Train none of the weights of a model, or of a stage of it, that have one of `names`."""
    for name, weight in model.named_parameters():
        if name in names:
            weight.requires_grad_(False)


def _no_such_weight(flag: str, pattern: str, names: Sequence[str]) -> UsageError:
    word = pattern.strip("*.")
    inside = [name for name in names if word and fnmatchcase(name, f"*{word}*")]
    near = inside or get_close_matches(word, names, n=_SHOWN, cutoff=_NEAR)
    shown, are = (near[:_SHOWN], "near are") if near else (_kinds(names), "there are")
    suggested = f"*{word}*" if inside else shown[0]
    return UsageError(
        f"{flag} {shlex.quote(pattern)} is the name of no weight; {are} {', '.join(shown)}",
        hint=f"for example {flag} {shlex.quote(suggested)}",
    )


def _kinds(names: Sequence[str]) -> list[str]:
    """A few patterns that each stand for the same weight of all layers, from all over the model."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    return kinds[:: -(-len(kinds) // _KINDS)]


_NARROWEST, _WIDEST = torch.float16.itemsize, torch.float32.itemsize


def in_4bit(dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """What `from_pretrained` takes to load matrices of layers in 4 bits onto `device` that compute in `dtype`.

    They are NF4, and their scales are quantized again, as the planner counts them.

    Raises:
        UsageError: what that takes is not installed, or cannot compute in `dtype`.
    """
    try:
        for package in ("accelerate", "bitsandbytes"):
            import_module(package)
    except ImportError as error:
        raise UsageError(
            f"weights in 4 bits need bitsandbytes and accelerate ({error})", hint=pip_install("qlora")
        ) from error
    if not _NARROWEST <= dtype.itemsize <= _WIDEST:
        raise UsageError(
            f"bitsandbytes does not compute in {str(dtype).removeprefix('torch.')}", hint="use --precision bf16 or fp32"
        )
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def is_quantized(parameter: Any) -> bool:
    """Whether it holds weights in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: Any) -> int:
    """How many weights a parameter is, of which one that is quantized has two in a byte."""
    return torch.Size(parameter.quant_state.shape).numel() if is_quantized(parameter) else int(parameter.numel())
