"""The trained weights of a model: adapters alone, or all but frozen ones; and weights in 4 bits.

Adapters (LoRA, arXiv 2106.09685) are by peft, weights in 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes. A frozen
weight has no gradient, no state of the optimizer and no fp32 master weight, and no process reduces it.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.models.checks import has_experts
from chunkplan_runtime.models.model import CausalLM, meta_weight

#: Stands for every linear layer but the head; in a model with experts, for those of them that mix tokens.
ALL_LINEAR = "all-linear"

_NAMES = "name layers of the model, such as q_proj; those of experts all together, such as gate_proj,up_proj,down_proj"

#: Parts of the names of what is no attention; and models where peft adapts no projection behind the scan.
_OF_MLPS = re.compile(r"mlp|feed_forward|ffn|moe|expert|router|gate$")
_WITH_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def add_lora(
    model: CausalLM,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: tuple[str, ...] = (ALL_LINEAR,),
    seed: int = 0,
    whole: CausalLM | None = None,
) -> CausalLM:
    """The model with adapters of `rank`, scaled by alpha / rank, on layers whose names end with one of `targets`.

    They are drawn by `seed`, in the dtype of its weights, which are frozen. `whole`: the model that it is a part of,
    without adapters. Raises UsageError where peft is not installed, no layer has one of the names, or `ALL_LINEAR` is
    not alone.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError(f"adapters need peft ({error})", hint=pip_install("lora")) from error
    if ALL_LINEAR in targets and len(targets) > 1:
        raise UsageError(
            f"adapters of {','.join(targets)}: {ALL_LINEAR} stands for all layers that get one",
            hint=f"give {ALL_LINEAR} alone, or names alone, such as q_proj,lm_head",
        )
    own, excluded = _linear_layers(whole or model) if targets == (ALL_LINEAR,) else (list(targets), None)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever number it is
        lora_dropout=dropout,
        target_modules=own,
        exclude_modules=excluded,
    )
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft's, about transformers' names
            adapted = get_peft_model(model.model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageError(f"no adapters for this model: {' '.join(str(error).split())}", hint=_NAMES) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    return replace(model, model=adapted)


def _linear_layers(model: CausalLM) -> tuple[str | list[str], list[str] | None]:
    """The layers that peft adapts of `ALL_LINEAR`, and those that it leaves, by the last parts of names.

    Not routers, nor what peft refuses beside Mamba, nor experts: peft would make their weights anew in each chunk, and
    keep them. As it goes by the last part of a name, MLPs beside experts and in their place are left out with these.
    """
    linear = {name: each for name, each in model.model.named_modules() if isinstance(each, nn.Linear)}
    more = {name for name, each in linear.items() if type(each) is not nn.Linear and not is_quantized(each.weight)}
    excluded = _last_parts(more) | ({"out_proj"} if model.config.model_type in _WITH_MAMBA else set())
    targets: str | list[str] = ALL_LINEAR
    if has_experts(model.model, model.config):
        own = {name for name, each in linear.items() if each is not model.model.get_output_embeddings()}
        of_mlps = {name for name in own if _OF_MLPS.search(name)}
        targets = sorted(_last_parts(own - of_mlps) - _last_parts(of_mlps))
    return targets, sorted(excluded) or None


def _last_parts(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def without_adapters(model: CausalLM, targets: tuple[str, ...]) -> str | None:
    """A note on layers that `targets` name and that have no adapter, as peft takes a name for experts alone.

    Raises UsageError where no layer has one of the names.
    """
    if targets == (ALL_LINEAR,):
        return None
    modules = dict(model.model.base_model.model.named_modules())
    named = {name: [path for path in modules if f".{path}".endswith(f".{name}")] for name in targets}
    of_layers = model.model.peft_config["default"].target_modules
    if unknown := [name for name in targets if name in of_layers and not named[name]]:
        raise UsageError(f"no adapters for this model: no layer of it is named {', '.join(unknown)}", hint=_NAMES)
    without = [path for paths in named.values() for path in paths if type(modules[path]) is nn.Linear]
    if not without:
        return None
    more = f" and {len(without) - 1:,} more layers" if len(without) > 1 else ""
    return f"no adapters for {without[0]}{more}: peft takes these names for the experts alone"


@torch.no_grad()
def take_adapters(own: CausalLM, whole: CausalLM) -> None:
    """Give a part of a model the adapters of the whole, the same for any layout; those have no numbers from then on."""
    drawn = {name: weight for name, weight in whole.model.named_parameters() if weight.requires_grad}
    for name, weight in own.model.named_parameters():
        if weight.requires_grad:
            weight.copy_(drawn[name])
    for weight in drawn.values():
        weight.data = meta_weight(weight).data


def frozen_names(model: Any, freeze: Sequence[str], train_only: Sequence[str]) -> set[str]:
    """The names of the weights of a whole model that are not trained.

    `freeze` and `train_only` are globs, of which one is empty: `*` stands for any letters, dots too. Weights that are
    one go by any of their names. Raises UsageError where a pattern is of no weight, or none is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    flag, patterns = ("--freeze", freeze) if freeze else ("--train-only", train_only)
    matched = set()
    for pattern in patterns:
        found = {id(weight) for name, weight in named.items() if fnmatchcase(name, pattern)}
        if not found:
            word = pattern.strip("*.")
            near = [name for name in named if word and word in name][:3] or get_close_matches(word, named, n=3)
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in named))
            shown = near or kinds[:: -(-len(kinds) // 6)]  # from all over the model
            raise UsageError(
                f"{flag} {shlex.quote(pattern)} is the name of no weight; "
                f"{'near' if near else 'there'} are {', '.join(shown)}",
                hint=f"for example {flag} {shlex.quote(f'*{word}*' if word and word in shown[0] else shown[0])}",
            )
        matched |= found
    frozen = {name for name, weight in named.items() if (id(weight) in matched) == bool(freeze)} if patterns else set()
    if len(frozen) == len(named):
        raise UsageError(
            f"{flag} {shlex.quote(','.join(patterns))} leaves nothing to train: all {len(named)} weights match",
            hint=f"name fewer, such as --freeze {shlex.quote(next(iter(named)))}",
        )
    return frozen


def freeze_weights(model: Any, names: set[str]) -> None:
    """Train none of the weights of a model, or of a stage of it, that have one of `names`."""
    for name, weight in model.named_parameters():
        if name in names:
            weight.requires_grad_(False)


def in_4bit(dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Options of `from_pretrained` that load layers in 4 bits (NF4, with quantized scales) and compute in `dtype`.

    Raises UsageError where what that takes is not installed, or cannot compute in `dtype`.
    """
    try:
        for package in ("accelerate", "bitsandbytes"):
            import_module(package)
    except ImportError as error:
        what = f"weights in 4 bits need bitsandbytes and accelerate ({error})"
        raise UsageError(what, hint=pip_install("qlora")) from error
    if dtype == torch.float64:
        raise UsageError("bitsandbytes does not compute in float64", hint="use --precision bf16 or fp32")
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def is_quantized(parameter: Any) -> bool:
    """True if it holds weights in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: Any) -> int:
    """The number of weights of a parameter, of which a quantized one has two in a byte."""
    return torch.Size(parameter.quant_state.shape).numel() if is_quantized(parameter) else int(parameter.numel())
