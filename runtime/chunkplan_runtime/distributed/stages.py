"""Cuts one pipeline stage out of an unmodified transformers model, or loads of a saved one what a process has of it.

A stage is the model itself with the layers of other stages replaced by modules that pass hidden states on, so that its
own layers keep their names and their indices, masks and rotary embeddings are made by the model's own code, and what
is done to a whole model (adapters, activation checkpointing, saving by name) is done to a stage in the same way. Where
a stage has several virtual stages, the one model has the layers of all of them; while one runs, the decoder has that
one's list of layers in place of its own.

A saved model is loaded by transformers, with all that it knows of names and forms of weights in checkpoints, but it
loads only those that this process has, one by one, and only rows of these are kept, and read where nothing is made of
them before. All other weights have no numbers (`meta_weight`) until the stage is cut from the model.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import core_model_loading

from chunkplan.errors import DataError, UsageError
from chunkplan.layers import split_layers as even_layers
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM, load_model, meta_model, meta_weight, replace_weights
from chunkplan_runtime.models.parts import ModelStage, decoder_of, layers_of, whole_of
from chunkplan_runtime.models.tiny import returned_by_layers

#: Names of the norm behind the last layer.
_FINAL_NORMS = (
    *("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm", "layer_norm"),
    "layernorm",
)

_HINT = "the checkpoint is incomplete, or its config.json is not its own"


def split_layers(num_layers: int, pp: int, given: Sequence[int] | None = None, virtual_stages: int = 1) -> list[range]:
    """The layers of each model stage: `given` many, or those that the planner counts with.

    Raises UsageError of more stages than layers, and where `given` is not what the model has.
    """
    num_stages, is_virtual = pp * virtual_stages, virtual_stages > 1
    if num_layers < num_stages:
        raise UsageError(
            f"{pp} stages" + f" of {virtual_stages} virtual stages" * is_virtual + f" for {num_layers} layers",
            hint="build the plan with fewer --virtual-stages, or less --pp"
            if is_virtual
            else f"build the plan with at most --pp {num_layers}",
        )
    counts = even_layers(num_layers, num_stages) if given is None else given
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise UsageError(
            f"--stage-layers is {','.join(map(str, counts))}: the model has {num_layers} layers, the plan {num_stages} "
            + ("model stages" if is_virtual else "stages"),
            hint=f"give {num_stages} numbers from 1 that sum to {num_layers}",
        )
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def cut_stage(model: CausalLM, layers: Sequence[range], layout: RankLayout) -> CausalLM:
    """The stage of `layout` of a model whose model stages have `layers`; what other stages have is dropped from it.

    Tied embeddings stay with the first and with the last model stage.
    """
    whole, decoder, all_layers = model.model, decoder_of(model.model), layers_of(model.model)
    own, returned = [layers[model_stage] for model_stage in layout.model_stages()], returned_by_layers(model.config)
    cuts = tuple(_cut(whole, each, returned) for each in own)
    for index in range(len(all_layers)):
        if not any(index in each for each in own):
            all_layers[index] = _Elsewhere(all_layers[index], returned)
    for name, module in cuts[0].modules.items():
        if module is not cuts[0].layers and all(name in cut.modules for cut in cuts):
            setattr(decoder, name, module)
    if not layout.is_last:
        whole.set_output_embeddings(nn.Identity())
    return replace(model, stages=cuts)


def _cut(whole: Any, own: range, returned: int | None) -> ModelStage:
    """The model stage that has the layers `own`, and of what has weights beside layers that at its end of the model.

    Norms behind the layers are the last one's, all else is the first one's.
    """
    decoder, all_layers, embeddings = decoder_of(whole), layers_of(whole), whole.get_input_embeddings()
    is_first, is_last = own.start == 0, own.stop == len(all_layers)
    is_tied = getattr(whole.get_output_embeddings(), "weight", None) is embeddings.weight
    layers = [layer if index in own else _Elsewhere(layer, returned) for index, layer in enumerate(all_layers)]
    if not is_first:
        layers[0] = _Elsewhere(all_layers[0], returned, gives_inputs=True)
    if not is_last:
        layers[own.stop] = _Elsewhere(all_layers[own.stop], returned, takes_output=True)
    own_layers, modules = nn.ModuleList(layers), dict[str, nn.Module]()
    for name, module in decoder.named_children():
        is_here = is_last if name in _FINAL_NORMS else is_first or (is_last and is_tied and module is embeddings)
        if module is all_layers:
            modules[name] = own_layers
        elif not is_here and next(module.parameters(), None) is not None:
            modules[name] = _NoEmbeddings() if isinstance(module, nn.Embedding) else nn.Identity()
    return ModelStage(is_first, is_last, own_layers, modules)


def own_head(model: Any) -> Any:
    """The vocabulary head of a process's part of a model that has embeddings of its own beside it, else None."""
    whole = whole_of(model)
    head, embeddings = whole.get_output_embeddings(), whole.get_input_embeddings()
    own, other = getattr(head, "weight", None), getattr(embeddings, "weight", None)
    return None if own is None or other is None or own is other else head


def trains_before_layers(model: Any) -> bool:
    """True if a weight is trained that makes the inputs of the first layer."""
    children = decoder_of(model).named_children()
    before = [module for name, module in children if module is not layers_of(model) and name not in _FINAL_NORMS]
    return any(map(is_trained, before))


def is_trained(module: nn.Module) -> bool:
    """True if any of its weights is trained."""
    return any(weight.requires_grad for weight in module.parameters())


class _NoEmbeddings(nn.Module):
    """Stands for embeddings that another stage adds."""

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=tokens.device)


class _Elsewhere(nn.Module):
    """Stands for a layer that another stage has, of which the decoder may ask what kind it is, and passes its input on.

    `returned`: of how many values the first is the hidden states, where layers return more than these. The first layer
    `gives_inputs` of the stage: what code before it made of these is not what they are. The one behind the stage
    `takes_output`, which the next stage gets.
    """

    chunkplan: Any

    def __init__(
        self, layer: nn.Module, returned: int | None, *, gives_inputs: bool = False, takes_output: bool = False
    ) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._returned, self._gives_inputs, self._takes_output = returned, gives_inputs, takes_output

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        if self._gives_inputs:
            inputs: Tensor = self.chunkplan.inputs
            hidden_states = inputs.clone() if inputs.requires_grad else inputs  # some layers work in place
        if self._takes_output:
            self.chunkplan.output = hidden_states
        return hidden_states if self._returned is None else (hidden_states, *[None] * (self._returned - 1))


class WholeOnlyError(Exception):
    """Raised when no stage of a model can be loaded by itself: the reason, as the end of a sentence."""


def rows_of(num_rows: int, layout: RankLayout) -> slice:
    """The rows of a weight that a process has of its stage's, as torch shards it."""
    each = -(-num_rows // layout.dp)
    return slice(min(each * layout.replica, num_rows), min(each * (layout.replica + 1), num_rows))


def load_shard(
    name: str,
    config: Any,
    dtype: torch.dtype,
    layers: Sequence[range],
    layout: RankLayout,
    *,
    kernels: Kernels,
    device: torch.device,
    held: torch.dtype | None = None,
) -> tuple[CausalLM, str]:
    """Load the process's shard of a saved model whose model stages have `layers`; also its hash.

    Its weights are on `device`; with data-parallel processes they have no numbers, and their rows are in `rows`, on the
    CPU, as `held` if they are kept in another dtype than they are loaded in. Raises WholeOnlyError if it can be loaded
    as a whole only, otherwise what `load_model` does.
    """
    whole = CausalLM(meta_model(config, dtype))
    kind = type(whole.model)
    stage = cut_stage(whole, layers, layout) if layout.pp > 1 else whole
    part = _Part(name, {*stage.model.state_dict()}, layout, held)
    load = staticmethod(partial(part.load, kind._load_pretrained_model))
    loader: Any = type(kind.__name__, (kind,), {"_load_pretrained_model": load, "__module__": kind.__module__})
    model = load_model(name, config, dtype, kernels=kernels, runs_on=device, loader=loader)
    model.model.__class__ = kind
    model = replace(model, rows=part.rows)
    if layout.pp > 1:
        model = cut_stage(model, layers, layout)
    if layout.dp == 1:
        model.model.to(device)
    return model, part.identity


class StoredTensor:
    """A tensor in a safetensors file, read when it is indexed, and no further than what is then used of it.

    The file is mapped no longer than the tensor is there: what was read of it would count as memory of the process.
    """

    def __init__(self, path: Path, name: str, stored: Any) -> None:
        self.path, self.name = path, name
        self.shape: list[int] = stored.get_shape()
        self.dtype: str = stored.get_dtype()

    def __getitem__(self, where: Any) -> Tensor:
        with safe_open(self.path, "pt") as file:
            found: Tensor = file.get_slice(self.name)[where]
            return found


def open_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of several safetensors files, by name; DataError: one is torn."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                found |= {name: StoredTensor(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    return found


class _Part:
    """Loads the weights `names` of a model, of each the rows that the process of `layout` has: see `load_shard`."""

    def __init__(self, model: str, names: set[str], layout: RankLayout, held: torch.dtype | None) -> None:
        self.rows: dict[nn.Parameter, Tensor] = {}
        self.identity = ""
        self._model, self._names, self._layout, self._held = model, names, layout, held

    def load(self, load_tensors: Any, model: Any, _: Any, files: Sequence[str], how: Any, *__: Any) -> Any:
        """Load in the place of `load_tensors` of transformers, and by it, which sees the weights of this part alone."""
        whole, tied, prefix = model.state_dict(), model.all_tied_weights_keys, f"{model.base_model_prefix}."
        own = self._names | {each for pair in tied.items() if self._names & {*pair} for each in pair}
        stored = open_files(map(Path, files))
        self.identity = _identity(stored)
        model.state_dict = lambda: {name: value for name, value in whole.items() if name in own}
        with self._keeping_rows(whole if self._layout.dp > 1 else {}, own):
            report, rest = load_tensors(model, stored, None, how)
        del model.state_dict
        elsewhere = {
            key: next((name for name in (key, prefix + key, key.removeprefix(prefix)) if name in whole), None)
            for key in report.unexpected_keys
        }
        present = (own - report.missing_keys) | {*elsewhere.values()}
        for name, other in tied.items():
            if {name, other} <= present:
                raise WholeOnlyError(f"its checkpoint has both {name} and {other}, which its config says are one")
        report.unexpected_keys = {key for key, name in elsewhere.items() if name is None}
        report.missing_keys |= {each for pair in tied.items() for each in pair} - present
        for name in whole.keys() - own:
            module, last = _place(model, name)
            if (weight := module._parameters.get(last)) is not None:
                _leave_shape(module, last, weight)
        return report, rest

    @contextmanager
    def _keeping_rows(self, whole: Mapping[str, Tensor], own: set[str]) -> Iterator[None]:
        """Within the block rows are kept of weights that transformers has loaded, and weights without numbers left.

        Room for all rows is taken first: between the weights that are read and freed it would break memory up.
        """
        rooms: dict[str, Tensor] = {}
        for name, weight in whole.items():
            if name in own:
                rows = weight[rows_of(len(weight), self._layout) if weight.ndim else ...]
                rooms[name] = torch.empty(rows.shape, dtype=self._held or rows.dtype)
        loading: Any = core_model_loading
        set_tensor = loading.set_param_for_module

        def keep_rows(model: Any, name: str, value: Tensor, report: Any, *more: Any) -> None:
            module, last = _place(model, name)
            weight = module._parameters.get(last)
            if weight is not None and value.shape != weight.shape:
                told = f"{name} has the shape {[*value.shape]}, the model has {[*weight.shape]}"
                raise DataError(told, where=self._model, hint=_HINT)
            if weight is None or self._layout.dp == 1:
                set_tensor(model, name, value, report, *more)
                return
            rows = value[rows_of(len(weight), self._layout) if weight.ndim else ...]
            room = rooms.pop(name).to(self._held or value.dtype)
            self.rows[_leave_shape(module, last, weight.to(value.dtype))] = room.copy_(rows)
            report.missing_keys.discard(name)

        loading.set_param_for_module = keep_rows
        ahead = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD", "0")
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # else threads of transformers read all tensors ahead
        try:
            yield
        finally:
            loading.set_param_for_module = set_tensor
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = ahead


def _place(model: Any, name: str) -> tuple[nn.Module, str]:
    """The module that a weight or a buffer is in, and its name there."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _leave_shape(module: nn.Module, name: str, weight: Tensor) -> nn.Parameter:
    """Put a weight without numbers in the place of one, which transformers does not draw."""
    module._parameters[name] = shape = meta_weight(weight)
    shape._is_hf_initialized = True  # type: ignore[attr-defined]
    return shape


def _identity(stored: Mapping[str, StoredTensor]) -> str:
    """A hash of names, kinds and a piece from the middle of all tensors of a checkpoint, however it is split."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        middle = tensor.shape[0] // 2 if tensor.shape else 0
        sample = tensor[middle : middle + 1] if tensor.shape else tensor[...]
        sample = sample.reshape(-1)[:1024].view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def layer_of(name: str) -> str:
    """The unit that is saved at once: a layer, or a weight beside the layers."""
    layer = re.match(r".*?\.\d+\.", name)
    return layer[0] if layer else name


@contextmanager
def rows_kept(model: CausalLM, replicas: DeviceMesh, *, master_weights: bool) -> Iterator[None]:
    """Within the block a model has the shapes of its weights alone, on torch's meta device, for FSDP2 to shard.

    After it the weights are the rows of this process, on its device; trained ones that are `master_weights` are
    float32. It is done weight by weight, so that there are never more than the rows and one weight.
    """
    layout = RankLayout(dp=replicas.size(), process=replicas.get_local_rank())
    rows: dict[nn.Parameter, Tensor] = {}

    def take(weight: nn.Parameter) -> nn.Parameter:
        own = model.rows.pop(weight, None)
        if own is None:
            own = weight.data[rows_of(len(weight), layout)].clone()
        if master_weights:  # as which frozen ones may be held
            own = own.float() if weight.requires_grad else own.to(weight.dtype)
        shape = nn.Parameter(own.new_empty(weight.shape, device="meta"), requires_grad=weight.requires_grad)
        rows[shape] = own.to(replicas.device_type)
        return shape

    replace_weights(model.model, take)
    parameters = [(module, *each) for module in model.model.modules() for each in module._parameters.items()]
    places = [(module, name, rows[shape]) for module, name, shape in parameters if shape is not None]
    yield
    made: dict[int, nn.Parameter] = {}  # one that modules share stays shared
    for module, name, own in places:
        if id(own) not in made:
            sharded: Any = module._parameters[name]
            how = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
            filled = DTensor.from_local(own, sharded.device_mesh, sharded.placements, **how)
            made[id(own)] = nn.Parameter(filled, requires_grad=sharded.requires_grad)
        module._parameters[name] = made[id(own)]
