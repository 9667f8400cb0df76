"""Models from transformers as the executor sees them: made or loaded, checked, and put on a device."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chunkplan.cost.model_config import config_file, find_config
from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.attention.context import ChunkContext, CurrentChunk
from chunkplan_runtime.attention.interface import ATTENTION, borders_from_plan, register_attention
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.attention.latents import watch_expansion
from chunkplan_runtime.feed.stream import ChunkTensors
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.models.checkpointing import checkpoint_layers
from chunkplan_runtime.models.checks import check_config, is_bidirectional, kv_shapes, windows
from chunkplan_runtime.models.parts import AUTO_MODEL, ModelStage, decoder_of, layers_of, logits_of, seed_layers
from chunkplan_runtime.models.recurrent import StateCache, cache_of, continue_scans, is_recurrent, run_segments

#: What transformers and the hub raise for a config or a checkpoint that they cannot use.
_REFUSALS: tuple[type[Exception], ...] = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_REFUSALS += (ArithmeticError, RuntimeError, StrictDataclassError, SafetensorError)

_CONFIG_HINT = "take the config.json that came with a model"

#: Names of weights of a language model within a model of text and more -> in it alone; and which are of one at all.
_TEXT_WEIGHTS = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
_IS_TEXT_WEIGHT = re.compile(r"lm_head\.|(model\.)?(language_model|layers|embed_tokens|norm)\.")


@dataclass(frozen=True)
class Head:
    """Makes logits [n, vocab_size] of hidden states [n, hidden_size]; `compiles`: so is what is made of these."""

    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    compiles: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)


@dataclass(frozen=True)
class CausalLM:
    """A transformers model as the executor sees it: a decoder that gives hidden states, and a head.

    `model` may be one with adapters of peft around it. `stages`: those of the process, by virtual stage. `call` runs
    everything that uses weights; it gathers sharded ones. `compute_dtype`: of weights in use, if not their own.
    `current`: the chunk that it is at work on. `rows`: what this process has of a `meta_weight`.
    """

    model: Any
    kernels: Kernels = field(default_factory=Kernels)
    stages: tuple[ModelStage, ...] = (ModelStage(),)
    call: Callable[..., Any] = operator.call
    compute_dtype: torch.dtype | None = None
    current: CurrentChunk = field(default_factory=CurrentChunk)
    rows: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layers in (self.model, *(stage.layers for stage in self.stages if stage.layers is not None)):
            for module in layers.modules():
                module.chunkplan = self.current
                watch_expansion(module)
        continue_scans(self.model)

    @cached_property
    def by_stage(self) -> list[CausalLM]:
        """The model as each of its virtual stages, one of which runs in each."""
        return [self] if len(self.stages) == 1 else [replace(self, stages=(stage,)) for stage in self.stages]

    @property
    def is_first(self) -> bool:
        """True if it has the embeddings, of the first model stage."""
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        """True if it has final hidden states and the head, of the last model stage."""
        return any(stage.is_last for stage in self.stages)

    @property
    def config(self) -> Any:
        """The config of the transformers model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights when they are used, and of hidden states."""
        return self.compute_dtype or next(iter(self.model.parameters())).dtype

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.config.vocab_size)

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        """The layers that are here, or run as this part of it, by their index in the whole model."""
        stage = self.stages[0] if len(self.stages) == 1 else ModelStage()
        layers = enumerate(stage.layers or layers_of(self.model))
        return {index: layer for index, layer in layers if next(layer.parameters(), None) is not None}

    @property
    def is_causal(self) -> bool:
        """True if tokens see only those before them; others run unsplit."""
        return not is_bidirectional(self.config)

    @cached_property
    def is_recurrent(self) -> bool:
        """True if layers keep a state, which goes on from one part of a sequence to the next."""
        return is_recurrent(self.config)

    @property
    def head(self) -> Head:
        """The module that makes logits of final hidden states."""
        logits, temperature = partial(self.call, logits_of, self.model), self.current.temperature

        def compute(hidden: Tensor) -> Tensor:
            found: Tensor = logits(hidden).squeeze(0)
            return found if temperature == 1 else found / temperature

        return Head(compute, self.vocab_size, self.current.compiles)

    def hidden_states(
        self, tensors: ChunkTensors, store: KVStore, inputs: Tensor | None = None, seed: int | None = None
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of a chunk after the last layer; on the last stage the final ones.

        `inputs`: those after the stage before, on any but the first. `seed`: of dropout, see `seed_layers`. Raises
        UsageError where the model attends as something else does, which would leave out the prefix without a word.
        """
        if self.config._attn_implementation != ATTENTION:
            raise UsageError(
                f"the model's attention is {self.config._attn_implementation!r}, not {ATTENTION!r}",
                hint="a model shares its config with those made from the same one; give each a copy",
            )

        def run(own: ChunkTensors, its_inputs: Tensor | None, its_seed: int | None, cache: StateCache | None) -> Tensor:
            how = self.kernels, self.is_causal, its_seed, own.shared
            self.current.context, self.current.cache = ChunkContext(own.attended, store, *how), cache
            # Bound, and no argument: FSDP looks for tensors in all arguments, and would in every span.
            hidden: Tensor = self.call(partial(self._decode, own), its_inputs, cache)
            return hidden.squeeze(0)

        num_bytes = self.offloaded_bytes(tensors.input_ids.numel()) if torch.is_grad_enabled() else 0
        with self.current.host_inputs.of_chunk(num_bytes, self.device) if num_bytes else nullcontext():
            if not self.is_recurrent:
                return run(tensors, inputs, seed, None)
            hidden, self.current.borders = run_segments(run, self.model, tensors, store, inputs, seed)
            return hidden

    def _decode(self, tensors: ChunkTensors, inputs: Tensor | None, cache: StateCache | None = None) -> Tensor:
        device, decoder = self.device, decoder_of(self.model)
        if inputs is None:
            tokens = {"input_ids": tensors.input_ids.to(device, non_blocking=True)}
        else:
            tokens = {"inputs_embeds": inputs[None].detach().clone()}  # some models scale them in place
            self.current.inputs = inputs[None]
        kept = {"use_cache": False} if cache is None else {"use_cache": True, cache_of(decoder.__class__)[1]: cache}
        positions = tensors.position_ids.to(device, non_blocking=True)
        with self.stages[0].in_place(decoder), borders_from_plan():
            hidden: Tensor | None = decoder(**tokens, position_ids=positions, **kept).last_hidden_state
        self.current.inputs = None
        if not self.is_last:
            hidden, self.current.output = self.current.output, None
        assert hidden is not None
        return hidden

    def attention_kernels(self, device: torch.device | None = None) -> dict[str, str]:
        """The kernel of each kind of layer on a device: "full", "sliding window" -> its name; raises UsageError."""
        config, names = self.config, dict[str, dict[str, None]]()
        softcap = getattr(config, "attn_logit_softcapping", None)
        for index, window in enumerate(windows(config)):
            (_, key_dim), (_, value_dim) = kv_shapes(config, index)
            form = Form(1.0, self.is_causal, reach=window, softcap=softcap)
            kernel = self.kernels.choose(device or self.device, self.dtype, (key_dim, value_dim), form)
            names.setdefault("full" if window is None else "sliding window", {})[kernel.name] = None
        return {kind: " and ".join(names[kind]) for kind in sorted(names)}

    def set_checkpointing(self, checkpointing: str) -> None:
        """Implements `checkpoint_layers`."""
        checkpoint_layers(self.model, self.current, checkpointing)

    def offloaded_bytes(self, num_tokens: int) -> int:
        """Bytes of inputs of layers in host memory of a chunk of so many tokens."""
        offloaded = self.current.offloaded and self.current.offloaded & self.own_layers.keys()
        return len(offloaded) * num_tokens * int(self.config.hidden_size) * self.dtype.itemsize


def read_config(source: Path | str, *, router_loss: bool = False) -> Any:
    """The config of a model: of its config.json or folder, or by its name on the Hugging Face Hub; see `check_config`.

    Raises UsageError where it is not there, the hub cannot be reached, or the model is refused, DataError where a file
    is not the config of a model.
    """
    is_file = isinstance(source, Path) or Path(source).is_dir()
    if not is_file and str(source).startswith((".", "/", "~")):
        raise UsageError(f"there is no folder {source}", hint="give the folder of a saved model, or a name on the hub")
    name = str(config_file(Path(source)) if is_file else source)
    if is_file and not Path(name).is_file():
        raise UsageError(f"there is no file {name}", hint="give the config.json of a model, or its folder")
    try:
        document, _ = PreTrainedConfig.get_config_dict(name)
        model_type = document.get("model_type")
        if not isinstance(model_type, str):
            raise DataError("`model_type` is missing", where=name, hint=_CONFIG_HINT)
        if model_type not in CONFIG_MAPPING:
            raise UsageError(
                f"transformers {transformers.__version__} has no model type {model_type!r}",
                where=name,
                hint="give the config.json of a model that it has, or install the version that brings this one",
            )
        return checked_text_config(AutoConfig.for_model(**document), name, router_loss=router_loss)
    except _REFUSALS as error:
        if is_file:
            raise DataError(f"not the config of a model: {first_line(error)}", where=name, hint=_CONFIG_HINT) from error
        hint = "give the folder of a saved model; a name needs the Hugging Face Hub or its cache"
        raise UsageError(f"cannot get model {name!r}: {first_line(error)}", hint=hint) from error


def planned_config(source: Path | str, *, router_loss: bool = False) -> Any:
    """The config of the model that `find_config` finds, as `read_config` gives it."""
    document, where, _ = find_config(source)
    if Path(where).is_file():
        return read_config(Path(where), router_loss=router_loss)
    return checked_text_config(AutoConfig.for_model(**document), where, router_loss=router_loss)


def checked_text_config(config: Any, where: str, *, router_loss: bool = False) -> Any:
    """The config of the language model in a model with this config, which may be all there is; see `check_config`."""
    text = config.get_text_config(decoder=True)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if classes.get(config.model_type) != classes.get(text.model_type):  # a class of its own, which ties by its own flag
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    check_config(text, where, router_loss=router_loss)
    return text


def new_model(
    config: Any,
    dtype: torch.dtype,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    kernels: Kernels | None = None,
    runs_on: torch.device | None = None,
) -> CausalLM:
    """A model with random weights, the same for a seed and kind of device; it will run on another, `runs_on`.

    Raises DataError where transformers cannot build it, UsageError where no attention kernel can run it.
    """
    torch.manual_seed(seed)
    return for_chunks(_build(config, dtype, device), kernels, runs_on)


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """A whole model without numbers; what it computes of its config is on torch's meta device."""
    model = _build(config, dtype, "meta")
    replace_weights(model, meta_weight)
    return model


def _build(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    register_attention()
    try:
        with torch.device(device):
            return AUTO_MODEL.from_config(copy.deepcopy(config), **_options(dtype)).train()
    except _REFUSALS as error:
        what = f"a {config.model_type} model cannot be built from its config: {error}"
        raise DataError(what, hint=_CONFIG_HINT) from error


def _options(dtype: torch.dtype) -> dict[str, object]:
    """Options of transformers for a model whose weights are of `dtype` and whose attention is that of chunks."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # torch groups no such products
    return {"dtype": dtype, "attn_implementation": ATTENTION, **experts}


def meta_weight(weight: Tensor, shape: torch.Size | None = None) -> nn.Parameter:
    """A weight like another, or of another `shape`, without numbers or memory, on the CPU as what is beside it."""
    number = torch.zeros((), dtype=weight.dtype).expand(weight.shape if shape is None else shape)
    return nn.Parameter(number, requires_grad=weight.requires_grad)


def replace_weights(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put `make(weight)` in place of every weight of a model; one that modules share stays shared."""
    made = {weight: make(weight) for weight in model.parameters()}
    for module in model.modules():
        module._parameters.update({name: made[each] for name, each in module._parameters.items() if each is not None})


def load_model(
    name: str,
    config: Any,
    dtype: torch.dtype,
    *,
    kernels: Kernels | None = None,
    runs_on: torch.device | None = None,
    loader: Any = AUTO_MODEL,
    **quantized: object,
) -> CausalLM:
    """A model with its saved weights, on the CPU; it will run there, or on `runs_on`.

    `loader`: the class to load; `quantized`: see `in_4bit`. Raises UsageError where the weights are not there, torn, or
    of other shapes, or no attention kernel can run them; DataError where some are missing.
    """
    register_attention()
    try:
        model, report = loader.from_pretrained(
            name,
            config=copy.deepcopy(config),
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,  # other files of weights are pickles
            key_mapping=_TEXT_WEIGHTS,
            **quantized,
            **_options(dtype),
        )
    except _REFUSALS as error:
        hint = "give a saved model whose weights are whole and belong to its config.json"
        raise UsageError(f"cannot load model {name!r}: {first_line(error)}", hint=hint) from error
    # To save it under names of a model of text and more cannot be done.
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        model._weight_conversions = [each for each in used if not _TEXT_WEIGHTS.keys() & set(each.source_patterns)]
    problems = {
        "weights are missing": sorted(report["missing_keys"]),
        "weights have no place in the model": sorted(filter(_IS_TEXT_WEIGHT.match, report["unexpected_keys"])),
    }
    for problem, names in problems.items():
        if names:
            hint = "the checkpoint is incomplete, or its config.json is not its own"
            raise DataError(f"{len(names)} {problem}, the first is {names[0]}", where=name, hint=hint)
    return for_chunks(model.train(), kernels, runs_on)


def for_chunks(model: Any, kernels: Kernels | None = None, device: torch.device | None = None) -> CausalLM:
    """A model of transformers as the executor sees it, to run on `device` or where it is; it stays an ordinary one too.

    Twice is as good as once. Raises UsageError where no kernel of `kernels` can run its attention.
    """
    found = CausalLM(model, kernels or Kernels(), current=getattr(model, "chunkplan", None) or CurrentChunk())
    found.attention_kernels(device)
    found.set_checkpointing("none")
    seed_layers(model)
    return found


def first_line(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {error!s}".splitlines()[0]
