"""Saves the model that a run leaves: what `save_pretrained` of transformers writes of it, byte for byte.

Of several processes each writes what it has, and the main one puts it together: some rows of a weight at a time, and
where transformers wants weights formed otherwise in a checkpoint than in the model, such as those of experts, a layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.own_part import layer_of
from chunkplan_runtime.freed_memory import freed_memory_given_back
from chunkplan_runtime.models.merge import Read, merged
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import has_adapters
from chunkplan_runtime.tensor_file import Kind, TensorWriter, writing_tensors
from chunkplan_runtime.training.save import NO_ROOM, copy_files, save_files, shared_folder
from chunkplan_runtime.training.tensor_files import StoredRows, stored_tensors, write_tensors
from chunkplan_runtime.training.train_step import TrainStep

_STAGES = "stages"

#: transformers' own, of `save_pretrained`.
_MOST_IN_A_FILE = "50GB"


@torch.no_grad()
def save_final(
    train_step: TrainStep, whole: CausalLM, tokenizer: list[Path], target: Path, job: Job, *, merges: bool = False
) -> None:
    """Save weights and config, or adapters, and a tokenizer's files in `target`, which is not there yet.

    `whole`: the model, hollow where there are several processes. `merges`: save all weights with the adapters added to
    them; these are no longer in `whole` afterwards.

    Raises:
        ChunkplanError: it cannot be written.
        UsageError: adapters cannot be added to their weights.
    """
    if job.groups is None:
        with shared_folder(target, job) as folder:
            if merges:
                held = train_step.all_tensors(with_frozen=True)
                kinds = {name: Kind(value.dtype, tuple(value.shape)) for name, value in held.items()}
                save_model(*merged(whole.model, kinds, _reading(held)), folder=folder)
                copy_files(tokenizer, folder)
            else:
                save_files(train_step.model, tokenizer, folder)
        return
    only_adapters = has_adapters(whole.model) and not merges
    with shared_folder(target, job, _STAGES) as folder, freed_memory_given_back():
        stages = folder / _STAGES
        write_tensors(stages, train_step.all_tensors(with_frozen=not only_adapters), 0, job, target)
        if job.is_main:
            kinds = {name: Kind(*kind) for name, kind in stored_tensors(stages, 0, job.layout.world_size).items()}
            read: Read = StoredRows(stages, NO_ROOM).read
            if only_adapters:
                adapters = {name: each for name, each in whole.model.named_parameters() if each.requires_grad}
                for each in adapters.values():
                    each.data = torch.empty(each.shape, dtype=each.dtype)
                read({name: each.data for name, each in adapters.items()})
                save_files(whole, tokenizer, folder)
            else:
                model = whole.model
                if merges:
                    model, kinds, read = merged(model, kinds, read)
                save_model(model, kinds, read, folder)
                copy_files(tokenizer, folder)
            shutil.rmtree(stages)


def _reading(held: Mapping[str, Tensor]) -> Read:
    def read(tensors: dict[str, Tensor], first: int = 0) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(held[name][first : first + len(tensor)] if tensor.dim() else held[name])

    return read


def save_model(
    model: Any,
    stored: Mapping[str, Kind],
    read: Read,
    folder: Path,
    most: str = _MOST_IN_A_FILE,
) -> None:
    """Write a transformers model of hollow weights into `folder`, as `save_pretrained` does with files of `most` bytes.

    `read` fills tensors by name, of the shapes that are `stored`.
    """
    model.save_pretrained(folder, state_dict={})  # config and generation config
    kinds = _saved(model, stored)
    saved = _formed(model, _empty(kinds, "meta"))
    plain = {name for name, kind in kinds.items() if _is_saved_as_it_is(model, name, kind, saved)}
    layers: dict[str, dict[str, Kind]] = {}
    for name in kinds.keys() - plain:
        layers.setdefault(layer_of(name), {})[name] = kinds[name]
    formed = {name for each in layers.values() for name in _formed(model, _empty(each, "meta"))}
    if formed | plain != saved.keys():
        plain, layers = set(), {"": kinds}  # weights of several layers are one in a checkpoint
    split = split_torch_state_dict_into_shards(saved, filename_pattern="model{suffix}.safetensors", max_shard_size=most)
    with ExitStack() as stack:
        files: dict[str, TensorWriter] = {}
        for file, names in split.filename_to_tensors.items():
            here = {name: Kind(saved[name].dtype, tuple(saved[name].shape)) for name in names}
            writer = stack.enter_context(writing_tensors(folder / file, here, {"format": "pt"}))
            files |= dict.fromkeys(names, writer)
        _copy_rows({name: kinds[name] for name in plain}, read, files)
        for each in layers.values():
            tensors = _empty(each, "cpu")
            read(tensors)
            for name, tensor in _formed(model, tensors).items():
                files[name].write(name, tensor)
            del tensors, tensor  # before there are the next ones
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _is_saved_as_it_is(model: Any, name: str, kind: Kind, saved: Mapping[str, Tensor]) -> bool:
    """Whether a weight has its own name and numbers in a checkpoint: what is formed of it is in its memory."""
    if name not in saved:
        return False
    weight = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
    formed = _formed(model, {name: weight})
    return formed.keys() == {name} and _is_same(formed[name], weight)


def _is_same(one: Tensor, other: Tensor) -> bool:
    form, others_form = (
        (each.untyped_storage()._cdata, each.dtype, each.shape, each.stride(), each.storage_offset())
        for each in (one, other)
    )
    return form == others_form


def _copy_rows(kinds: Mapping[str, Kind], read: Read, files: Mapping[str, TensorWriter]) -> None:
    """Copy tensors into files, some rows at a time in one place: what comes and goes leaves gaps in memory."""
    room = torch.empty(max((_block_bytes(kind) for kind in kinds.values()), default=0), dtype=torch.uint8)
    for name, kind in sorted(kinds.items()):
        num_rows = kind.shape[0] if kind.shape else 1
        for first in range(0, max(1, num_rows), kind.rows_at_once):
            rows = min(kind.rows_at_once, num_rows - first)
            shape = (rows, *kind.shape[1:]) if kind.shape else ()
            block = room[: Kind(kind.dtype, shape).num_bytes].view(kind.dtype).view(shape)
            read({name: block}, first)
            files[name].write(name, block)


def _block_bytes(kind: Kind) -> int:
    num_rows = min(kind.rows_at_once, kind.shape[0]) if kind.shape else 1
    return Kind(kind.dtype, (num_rows, *kind.shape[1:])).num_bytes


def _saved(model: Any, stored: Mapping[str, Kind]) -> dict[str, Kind]:
    """What a model saves: of weights that are one the one that transformers keeps, and buffers as they are stored."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    left_out = {*(model._keys_to_ignore_on_save or ())}
    left_out |= {name for name, kept in model.all_tied_weights_keys.items() if weights[name] is weights[kept]}
    return {
        name: Kind(weights[name].dtype if name in weights else stored[name].dtype, tuple(value.shape))
        for name, value in model.state_dict().items()
        if name not in left_out
    }


def _formed(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are named and formed in a checkpoint."""
    formed: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return formed


def _empty(kinds: Mapping[str, Kind], device: str) -> dict[str, Tensor]:
    return {name: torch.empty(kind.shape, dtype=kind.dtype, device=device) for name, kind in kinds.items()}
