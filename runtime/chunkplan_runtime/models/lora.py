"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: only they are trained, and only they are saved."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace

import torch

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.models.checks import has_experts
from chunkplan_runtime.models.frozen import is_quantized
from chunkplan_runtime.models.meta_weights import meta_weight
from chunkplan_runtime.models.model import CausalLM

#: Stands for every linear layer but the head; in a model with experts, for those of them that mix tokens.
ALL_LINEAR = "all-linear"

#: What helps where a name is of no layer, or peft does not take it.
_NAMES = "name layers of the model, such as q_proj; those of experts all together, such as gate_proj,up_proj,down_proj"

#: Parts of the names of what is no attention, nor in its place.
_OF_MLPS = re.compile(r"mlp|feed_forward|ffn|moe|expert|router|gate$")

#: Models of whose mixers peft takes no adapter of the projection behind the scan, which kernels have in one with it.
_WITH_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters of `rank`, scaled by alpha / rank, on the layers whose names end with one of `targets`.

    `seed`: of the random weights they begin with.

    Raises:
        UsageError: a number is out of its range.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise _is("rank", self.rank, "a whole number from 1", "16")
        if not self.alpha > 0:
            raise _is("alpha", self.alpha, "a number above 0", "32")
        if not 0 <= self.dropout < 1:
            raise _is("dropout", self.dropout, "a number from 0 to below 1", "0.05")
        if not self.targets:
            raise UsageError("no layers for the adapters are named", hint=f"give {ALL_LINEAR}, or names such as q_proj")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise UsageError(
                f"adapters of {','.join(self.targets)}: {ALL_LINEAR} stands for all layers that get one",
                hint=f"give {ALL_LINEAR} alone, or names alone, such as q_proj,lm_head",
            )


def _is(name: str, value: float, expected: str, example: str) -> UsageError:
    return UsageError(f"the {name} of the adapters is {value}, expected {expected}", hint=f"for example {example}")


def _not_linear(model: CausalLM) -> list[str] | None:
    """Names of linear layers that are more than that, such as routers, and those that peft refuses beside Mamba."""
    linear = {name: each for name, each in model.model.named_modules() if isinstance(each, torch.nn.Linear)}
    more = {
        name.rpartition(".")[2]
        for name, each in linear.items()
        if type(each) is not torch.nn.Linear and not is_quantized(each.weight)
    }
    if model.config.model_type in _WITH_MAMBA:
        more.add("out_proj")
    return sorted(more) or None


def _targets(model: CausalLM, targets: tuple[str, ...]) -> str | list[str]:
    """What peft is to adapt.

    peft counts weights of experts as linear layers too. It would make all of them anew in each chunk, with what their
    adapters add, and keep that for the backward: as many bytes for each chunk as the experts have. It goes by the last
    part of a name, so MLPs beside experts and in their place are left out with them.
    """
    if targets != (ALL_LINEAR,) or not has_experts(model.model, model.config):
        return ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets)
    head = model.model.get_output_embeddings()
    linear = {
        name for name, each in model.model.named_modules() if isinstance(each, torch.nn.Linear) and each is not head
    }
    of_mlps = {name for name in linear if _OF_MLPS.search(name)}
    return sorted(_last_parts(linear - of_mlps) - _last_parts(of_mlps))


def _last_parts(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def add_lora(model: CausalLM, options: LoraOptions, whole: CausalLM | None = None) -> CausalLM:
    """The model with adapters, in the dtype of its weights, which are frozen; of quantized ones in that of the others.

    Args:
        whole: the model that `model` is a part of, still without adapters.

    Raises:
        UsageError: peft is not installed, or no layer has one of the names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError(f"adapters need peft ({error})", hint=pip_install("lora")) from error
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever number it is
        lora_dropout=options.dropout,
        target_modules=_targets(whole or model, options.targets),
        exclude_modules=_not_linear(whole or model) if options.targets == (ALL_LINEAR,) else None,
    )
    torch.manual_seed(options.seed)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft's, about transformers' names
            adapted = get_peft_model(model.model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageError(f"no adapters for this model: {' '.join(str(error).split())}", hint=_NAMES) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    return replace(model, model=adapted)


def without_adapters(model: CausalLM, targets: tuple[str, ...]) -> str | None:
    """What to say of layers that `targets` name and that have no adapter in `model`, which has some.

    Where the layers of experts have such names, peft takes these for the experts alone.

    Raises:
        UsageError: no layer has one of the names.
    """
    if targets == (ALL_LINEAR,):
        return None
    modules = dict(model.model.base_model.model.named_modules())
    named = {name: [path for path in modules if f".{path}".endswith(f".{name}")] for name in targets}
    of_layers = model.model.peft_config["default"].target_modules
    if unknown := [name for name in targets if name in of_layers and not named[name]]:
        raise UsageError(f"no adapters for this model: no layer of it is named {', '.join(unknown)}", hint=_NAMES)
    without = [path for paths in named.values() for path in paths if type(modules[path]) is torch.nn.Linear]
    if not without:
        return None
    more = f" and {len(without) - 1:,} more layers" if len(without) > 1 else ""
    return f"no adapters for {without[0]}{more}: peft takes these names for the experts alone"


@torch.no_grad()
def take_adapters(own: CausalLM, whole: CausalLM) -> None:
    """Give a part of a model the adapters that the whole one has: drawn there, they are the same for any layout.

    Those of the whole one have no numbers from then on.
    """
    drawn = dict(whole.model.named_parameters())
    for name, weight in own.model.named_parameters():
        if weight.requires_grad:
            weight.copy_(drawn[name])
    for weight in drawn.values():
        if weight.requires_grad:
            weight.data = meta_weight(weight).data
