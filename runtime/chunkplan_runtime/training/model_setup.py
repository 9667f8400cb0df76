"""From options to a model on a device, ready to be trained."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from chunkplan_runtime.devices import find_device
from chunkplan_runtime.lora import LoraOptions, add_lora
from chunkplan_runtime.models import CausalLM, load_model, new_model, read_config, read_pretrained_config
from chunkplan_runtime.training.config import TrainConfig

_SAMPLES = 256

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


def choose_device(config: TrainConfig) -> TrainConfig:
    """`config` with device and precision as they will be.

    Raises:
        UsageError: there is no such device.
    """
    device = str(find_device(config.device))
    return replace(config, device=device, precision=config.precision or ("fp32" if device == "cpu" else "bf16"))


def read_its_config(config: TrainConfig) -> Any:
    """The transformers config of the model to train.

    Raises:
        UsageError: it is not there, or gradients are not exact for it.
        DataError: it is not the config of a model.
    """
    if config.model is not None:
        return read_pretrained_config(config.model)
    assert config.model_config is not None
    return read_config(config.model_config)


def build_model(config: TrainConfig, model_config: Any) -> CausalLM:
    """The model with its weights on the device, after `choose_device`; with adapters where there is a rank.

    Raises:
        UsageError: its weights cannot be loaded, or an option is not one for this model.
        DataError: some of them are missing, or transformers cannot build it.
    """
    assert config.precision is not None
    dtype, place = _DTYPES[config.precision], {"device": config.device, "attention": config.attention}
    if config.model is not None:
        model = load_model(config.model, model_config, dtype, **place)
    else:
        model = new_model(model_config, dtype, config.seed, **place)
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


@torch.no_grad()
def fingerprint_of_frozen(model: CausalLM) -> str | None:
    """Tells weights that are not trained, and so in no checkpoint, from others; None where all are trained.

    A hash of up to `_SAMPLES` numbers of each, evenly spread: other weights differ there too.
    """
    frozen = [(name, value) for name, value in model.model.named_parameters() if not value.requires_grad]
    digest = hashlib.sha256()
    for name, value in frozen:
        flat = value.detach().flatten()
        samples = flat[:: max(1, len(flat) // _SAMPLES)].double().cpu().numpy()
        digest.update(f"{name} {tuple(value.shape)}".encode() + samples.tobytes())
    return digest.hexdigest() if frozen else None
