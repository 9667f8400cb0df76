"""Models that chunked execution is exact for, from transformers; everything else is refused by name.

A model is on the list when nothing in it but attention looks from one token at another, attention is plain causal, and
rotary embeddings depend on positions alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.attention.interface import ATTENTION, register_attention
from chunkplan_runtime.state import ChunkContext

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

#: `dynamic` and `longrope` choose their frequencies by the longest position of a call, so that a part of a sequence
#: would be rotated otherwise than the whole.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: What transformers raises for a config or a checkpoint that it cannot use.
_REFUSALS = (
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

#: Sizes of which a model has at least one, or none of its own (head_dim).
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

_CONFIG_HINT = "take the config.json that came with a model"

_AUTO_MODEL: Any = AutoModelForCausalLM  # its own types promise less than it does


@dataclass(frozen=True)
class CausalLM:
    """A transformers model as the executor sees it: a decoder that gives hidden states, and a head."""

    model: Any

    @property
    def head(self) -> nn.Module:
        """Hidden states [n, hidden_size] -> logits [n, vocab_size]."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, context: ChunkContext) -> Tensor:
        """Final hidden states [num_tokens, hidden_size] of a chunk [1, num_tokens]."""
        device = self.model.device
        hidden: Tensor = self.model.get_decoder()(
            input_ids=input_ids.to(device),
            position_ids=position_ids.to(device),
            use_cache=False,
            chunk_context=context,
        ).last_hidden_state
        return hidden[0]


def read_config(path: Path) -> Any:
    """The transformers config in a file like a model's config.json, checked for what chunked execution needs.

    Raises:
        UsageError: there is no such file, or the model is not one that gradients are exact for.
        DataError: it is not the config of a model.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="give the config.json of a model")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"not JSON: {error}", where=str(path), hint="give the config.json of a model") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise DataError("`model_type` is missing", where=str(path), hint="give the config.json of a model")
    _check_model_type(document["model_type"], str(path))
    try:
        config = AutoConfig.for_model(**document)
    except _REFUSALS as error:
        raise DataError(
            f"not the config of a {document['model_type']} model: {error}", where=str(path), hint=_CONFIG_HINT
        ) from error
    check_config(config, str(path))
    return config


def read_pretrained_config(name: str) -> Any:
    """The config of a pretrained model: a folder, or a name on the Hugging Face Hub.

    Raises:
        UsageError: it is not there, the hub cannot be reached, or gradients are not exact for it.
        DataError: the folder's config.json is not the config of a model.
    """
    if Path(name).is_dir():
        return read_config(Path(name) / "config.json")
    if name.startswith((".", "/", "~")):
        raise UsageError(f"there is no folder {name}", hint="give the folder of a saved model, or a name on the hub")
    try:
        config = AutoConfig.from_pretrained(name)
    except _REFUSALS as error:
        raise UsageError(
            f"cannot get model {name!r}: {_first_line(error)}",
            hint="give the folder of a saved model; a name needs the Hugging Face Hub or its cache",
        ) from error
    check_config(config, name)
    return config


def check_config(config: Any, where: str) -> None:
    """Refuse a model that chunked execution would get wrong.

    Raises:
        UsageError: naming what, and what to do about it.
    """
    _check_model_type(config.model_type, where)
    for name in _SIZES:
        size = getattr(config, name, 1)
        if size is not None and (type(size) is not int or size < 1):
            raise UsageError(f"{name} is {size!r}", where=where, hint="give a whole number from 1")
    rope_type = (config.rope_parameters or {}).get("rope_type")
    layers = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if rope_type not in _ROPE_TYPES:
        raise UsageError(
            f"rope type {rope_type!r} depends on more than positions, or is not known",
            where=where,
            hint=f"exact for: {', '.join(_ROPE_TYPES)}; choose one of them for training",
        )
    if layers or (config.model_type == "mistral" and config.sliding_window):
        raise UsageError(
            f"attention other than full causal attention ({', '.join(sorted(layers)) or 'sliding_window'})",
            where=where,
            hint='where the model allows it, set "sliding_window": null and "use_sliding_window": false',
        )
    if not getattr(config, "return_dict", True):
        raise UsageError("return_dict is false", where=where, hint="leave it out; transformers needs it itself")
    if config.attention_dropout:
        raise UsageError(f"attention_dropout is {config.attention_dropout}", where=where, hint="set it to 0")
    if not getattr(config, "is_causal", True):
        raise UsageError("the model is not causal", where=where, hint="chunks need causal attention")
    if getattr(config, "quantization_config", None):
        raise UsageError("the model is quantized", where=where, hint="train from weights that are not quantized")
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding < config.vocab_size:
        raise UsageError(
            f"pad_token_id is {padding}, the vocabulary has {config.vocab_size:,}",
            where=where,
            hint="set it to null, or to a token of the vocabulary",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UsageError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} KV heads",
            where=where,
            hint="num_attention_heads has to be a multiple of num_key_value_heads",
        )


def new_model(config: Any, dtype: torch.dtype, seed: int) -> CausalLM:
    """A model with random weights, the same for the same seed.

    Raises:
        DataError: transformers cannot build it.
    """
    register_attention()
    torch.manual_seed(seed)
    try:
        model = _AUTO_MODEL.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    except _REFUSALS as error:
        raise DataError(
            f"a {config.model_type} model cannot be built from its config: {error}", hint=_CONFIG_HINT
        ) from error
    return CausalLM(model.train())


def load_model(name: str, config: Any, dtype: torch.dtype) -> CausalLM:
    """A model with its saved weights.

    Raises:
        UsageError: the weights are not there, torn, or of other shapes.
        DataError: some of them are missing; transformers would have made them up.
    """
    register_attention()
    try:
        model, report = _AUTO_MODEL.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
        )
    except (*_REFUSALS, SafetensorError) as error:
        raise UsageError(
            f"cannot load model {name!r}: {_first_line(error)}",
            hint="give a saved model whose weights are whole and belong to its config.json",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"{len(missing)} weights are missing, the first is {missing[0]}",
            where=name,
            hint="the checkpoint is incomplete, or its config.json is not its own",
        )
    return CausalLM(model.train())


def _check_model_type(model_type: str, where: str) -> None:
    if model_type not in MODEL_TYPES:
        raise UsageError(
            f"model type {model_type!r} is not one that chunked gradients are known to be exact for",
            where=where,
            hint=f"exact for: {', '.join(MODEL_TYPES)}",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
