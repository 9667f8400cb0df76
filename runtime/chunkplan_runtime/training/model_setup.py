"""From options to a model on a device, ready to be trained."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.devices import find_device
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.launch import local_device_index
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.lora import LoraOptions, add_lora
from chunkplan_runtime.models.model import CausalLM, load_model, new_model, read_config, read_pretrained_config
from chunkplan_runtime.training.config import SHARED, TrainConfig

_SAMPLES = 256

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


def choose_device(config: TrainConfig, *, alone: bool = True) -> TrainConfig:
    """`config` with device and precision as they will be; unless it is `alone`, each process has a GPU of its own.

    Raises:
        UsageError: there is no such device, or several processes would share it.
    """
    name = config.device
    if not alone and name.startswith("cuda:"):
        raise UsageError(f"--device is {name}, for every process", hint="leave it out: each takes a GPU of its own")
    if not alone and name != "cpu" and torch.cuda.is_available():
        name = f"cuda:{local_device_index()}"
    device = str(find_device(name))
    return replace(config, device=device, precision=config.precision or ("fp32" if device == "cpu" else "bf16"))


def read_model_config(config: TrainConfig) -> Any:
    """The transformers config of the model to train.

    Raises:
        UsageError: it is not there, or gradients are not exact for it.
        DataError: it is not the config of a model.
    """
    if config.model is not None:
        return read_pretrained_config(config.model, router_loss=True)
    assert config.model_config is not None
    return read_config(config.model_config, router_loss=True)


def build_model(config: TrainConfig, model_config: Any, job: Job) -> CausalLM:
    """The whole model, after `choose_device`, with adapters where `lora_rank` asks for them.

    It is on the device, or on the CPU where each process will have a stage or a shard of it only.

    Raises:
        UsageError: its weights cannot be loaded, or an option is not one for this model.
        DataError: some of them are missing, or transformers cannot build it.
    """
    assert config.precision is not None
    dtype, device = _DTYPES[config.precision], torch.device(config.device)
    if config.model is not None:
        model = load_model(config.model, model_config, dtype, attention=config.attention, runs_on=device)
    else:  # drawn on the CPU, where the same seed draws the same for any layout
        model = new_model(model_config, dtype, config.seed, attention=config.attention, runs_on=device)
    if job.groups is None:
        model = replace(model, model=model.model.to(device))
    if config.lora_rank:
        options = LoraOptions(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=config.lora_targets,
            seed=config.seed,
        )
        model = add_lora(model, options)
    if config.checkpointing:
        model.enable_checkpointing()
    return model


def check_layout(config: TrainConfig, layout: RankLayout) -> None:
    """Refuse options that are not for these processes.

    Raises:
        UsageError: naming the option.
    """
    if layout.pp == 1 and config.stage_layers is not None:
        raise UsageError("--stage-layers with one stage", hint="leave it out, or build the plan with --pp")
    if config.sharding in SHARED[1:] and layout.dp == 1:
        raise UsageError(
            f"--sharding {config.sharding} with one process a stage, which shares nothing with others",
            hint="leave it out, or start more data-parallel processes",
        )


def own_stage(model: CausalLM, config: TrainConfig, plan: Plan, layout: RankLayout) -> CausalLM:
    """What this process has of a whole model, on its device, where sharding would not bring it there bit by bit.

    Raises:
        UsageError: the layers cannot be split over the stages so.
    """
    if layout.pp > 1:
        given = config.stage_layers or plan.config.stage_layers
        layers = split_layers(model.config.num_hidden_layers, layout.pp, given, layout.virtual_stages)
        model = cut_stage(model, layers, layout)
    return model if layout.dp > 1 else replace(model, model=model.model.to(config.device))


@torch.no_grad()
def fingerprint(model: CausalLM, *, only_frozen: bool = False) -> str | None:
    """Identify weights by a hash of up to `_SAMPLES` numbers of each, evenly spaced: other weights differ there too.

    `only_frozen`: of those that are not trained, and so in no checkpoint. None where there are no such weights.
    """
    named = [
        (name, value) for name, value in model.model.named_parameters() if not (only_frozen and value.requires_grad)
    ]
    digest = hashlib.sha256()
    for name, value in named:
        flat = value.detach().flatten()
        samples = flat[:: max(1, len(flat) // _SAMPLES)].double().cpu().numpy()
        digest.update(f"{name} {tuple(value.shape)}".encode() + samples.tobytes())
    return digest.hexdigest() if named else None
