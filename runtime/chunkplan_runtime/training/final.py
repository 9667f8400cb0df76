"""Saves the model that a run leaves, as `save_pretrained` of transformers does, and the tokenizer that goes with it.

Of several processes each has a part of the model. They gather it weight by weight, a layer at a time where a checkpoint
has weights formed otherwise than the model, such as those of experts, and each writes some of the files: none needs
more memory than a file takes, and those of one file and a layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.folder import let_umask_decide
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.tokenizer_hash import tokenizer_hashes
from chunkplan_runtime.devices import wide
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.stages import layer_of
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import has_adapters
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.run_folder import NO_ROOM, shared_folder, why
from chunkplan_runtime.training.train_step import TrainStep

#: From how many bytes on a model that several processes have is saved in several files, each of about so many.
FILE_BYTES = 1 << 30

_PARTS = "parts"

_MERGE_HINT = "leave --merge-adapters out, or name other layers by --lora-targets"

_TOKENIZER = "tokenizer.json"
_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@torch.no_grad()
def save_final(
    train_step: TrainStep,
    whole: CausalLM,
    tokenizer: list[Path],
    target: Path,
    job: Job,
    *,
    merges: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Save weights and config, or adapters, and a tokenizer's files in `target`, which is not there yet.

    `whole`: the model, without numbers where there are several processes. `merges`: save all weights with the adapters
    added to them; these are no longer in the models afterwards.

    Raises:
        ChunkplanError: it cannot be written.
    """
    own, described = train_step.model.model, whole.model
    if merges:
        own = merge_adapters(own, train_step.tensors()["weights"])
        described = own if job.groups is None else described.unload()
    with shared_folder(target, job, *([] if job.groups is None else [_PARTS])) as folder:
        if job.groups is None:
            described.save_pretrained(folder)
        else:
            save_parts(own, described, folder, target, job, file_bytes)
        if job.is_main:
            for path in folder.glob("*.safetensors"):  # which only their owner may read
                let_umask_decide(path)
            for file in tokenizer:  # to the byte the one whose hash an analysis holds
                shutil.copyfile(file, folder / file.name)


def check_mergeable(model: Any) -> None:
    """Refuse adapters of a peft model that cannot be added to their weights.

    Raises:
        UsageError: one is not of a linear layer, or its weight is used by other layers too.
    """
    from peft.tuners.lora import Linear, ParamWrapper

    uses: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        uses[id(weight)] = uses.get(id(weight), 0) + 1
    for path, layer, base, own in _adapted(model):
        parts = [*path.removeprefix("base_model.model.").split("."), own]
        name = ".".join(part for part in parts if part != "base_layer")
        if not isinstance(layer, (Linear, ParamWrapper)):
            kind = type(base).__name__
            raise UsageError(f"--merge-adapters: that of {name} ({kind}) is none of a linear layer", hint=_MERGE_HINT)
        if uses[id(getattr(base, own))] > 1:
            raise UsageError(
                f"--merge-adapters: {name} has an adapter, and another layer has the same weight without it",
                hint=_MERGE_HINT,
            )


def merge_adapters(model: Any, trained: Mapping[str, Tensor]) -> Any:
    """What a process has of a peft model, as one without adapters: peft adds them to their weights.

    `trained` has the numbers of adapters by name. Sums are in float32, of float64 weights in that, and rounded once to
    the dtype of the weight.
    """
    for path, layer, base, own in _adapted(model):
        weight = base._parameters[own]
        [adapter] = layer.active_adapters
        for part in ("lora_A", "lora_B"):
            factor = _gathered(trained[f"{path}.{part}.{adapter}.weight"])
            getattr(layer, part)[adapter].weight = nn.Parameter(factor.to(wide(weight.dtype)), requires_grad=False)
        base._parameters[own] = nn.Parameter(_gathered(weight).to(wide(weight.dtype)), requires_grad=False)
        layer.merge()
        merged = base._parameters[own].to(weight.dtype)
        if isinstance(weight, DTensor):
            merged = distribute_tensor(merged, weight.device_mesh, weight.placements, src_data_rank=None)
        base._parameters[own] = nn.Parameter(merged, requires_grad=False)
    return model.unload()


def _adapted(model: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """The layers with adapters of a peft model: path, layer, what it is around, and the name of the weight in that."""
    from peft.tuners.lora import LoraLayer

    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            yield path, layer, layer.get_base_layer(), getattr(layer, "parameter_name", "weight")


def _gathered(tensor: Tensor) -> Tensor:
    """All of a tensor of which data-parallel processes have rows; all of these have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class _File(NamedTuple):
    """A file that a process has written: its name, the tensors in it, and the bytes of these."""

    name: str
    tensors: list[str]
    num_bytes: int


def save_parts(own: Any, whole: Any, folder: Path, target: Path, job: Job, file_bytes: int) -> None:
    """Save a model of which each process has some layers, or rows of them, as `own`; `whole` has no numbers.

    Raises:
        ChunkplanError: a process cannot write; all raise it.
    """
    files, failure = _write_parts(own, whole, folder / _PARTS, job, file_bytes)
    told = job.all_gather_object((files, failure))
    for process, (_, failed) in enumerate(told):
        if failed:
            named = failed if process == 0 else f"{failed} (process {process})"
            raise ChunkplanError(f"cannot be written: {named}", where=str(target), hint=NO_ROOM)
    if not job.is_main:
        return
    if has_adapters(whole):
        for path in (folder / _PARTS).iterdir():
            for name, value in load_file(path).items():
                whole.get_parameter(name).data = value
        whole.save_pretrained(folder)
    else:
        whole.save_pretrained(folder, state_dict={})  # config and generation config
        _join(sorted(file for files, _ in told for file in files), whole, folder, file_bytes)
    shutil.rmtree(folder / _PARTS)


def _write_parts(own: Any, whole: Any, parts: Path, job: Job, file_bytes: int) -> tuple[list[_File], str]:
    """Write the files that are this process's turn, of what its stage has; returns them, and what went wrong if any."""
    names, is_adapter = _saved_names(whole), has_adapters(whole)
    dtypes = {name: weight.dtype for name, weight in whole.named_parameters(remove_duplicate=False)}
    held = {name: value for name, value in own.state_dict().items() if name in names}
    stages: dict[str, int] = {}
    for stage, its_names in job.all_gather_object((job.layout.stage, [*held])):
        for name in its_names:
            stages.setdefault(name, stage)  # tied embeddings are on two
    files: list[_File] = []
    failure, number, num_bytes, waiting = "", 0, 0, dict[str, Tensor]()
    groups = _formed_together([name for name in held if stages[name] == job.layout.stage], whole, is_adapter)
    for place, group in enumerate(groups, 1):
        tensors = {name: _gathered(held[name]) for name in group}
        tensors = {name: value.to(dtypes.get(name, value.dtype)) for name, value in tensors.items()}
        if not is_adapter:
            tensors = revert_weight_conversion(whole, tensors)
        num_bytes += sum(value.nbytes for value in tensors.values())
        if number % job.layout.dp == job.layout.replica:
            waiting |= {name: value.cpu().contiguous() for name, value in tensors.items()}
        if num_bytes < file_bytes and place < len(groups):
            continue
        if waiting and not failure:
            files.append(_File(f"{job.layout.stage:05d}-{number:05d}.safetensors", [*waiting], num_bytes))
            try:
                save_file(waiting, parts / files[-1].name, {"format": "pt"})
            except (OSError, SafetensorError) as error:
                failure = why(error)  # the others go on with what has to be done together
        number, num_bytes, waiting = number + 1, 0, {}
    return files, failure


def _saved_names(whole: Any) -> set[str]:
    """Names of the weights and buffers that are saved of a model: trained adapters, or of tied weights one."""
    weights = dict(whole.named_parameters(remove_duplicate=False))
    if has_adapters(whole):
        return {name for name, weight in weights.items() if weight.requires_grad}
    left_out = {*(whole._keys_to_ignore_on_save or ())}
    left_out |= {name for name, kept in whole.all_tied_weights_keys.items() if weights[name] is weights[kept]}
    return {*whole.state_dict()} - left_out


def _formed_together(names: list[str], whole: Any, is_adapter: bool) -> list[list[str]]:
    """Names of weights by layer; in one list where weights of several layers are one in a checkpoint."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name), []).append(name)
    if is_adapter:
        return [*groups.values()]
    state = whole.state_dict()

    def formed(group: list[str]) -> set[str]:
        tensors = {name: torch.empty_like(state[name], device="meta") for name in group}
        return {*revert_weight_conversion(whole, tensors)}

    by_layer = {name for group in groups.values() for name in formed(group)}
    return [*groups.values()] if by_layer == formed(names) else [names]


def _join(files: list[_File], whole: Any, folder: Path, file_bytes: int) -> None:
    """Put files in place as a model in one file, or as one in several with an index."""
    parts, size = folder / _PARTS, sum(file.num_bytes for file in files)
    if len(files) == 1:
        (parts / files[0].name).rename(folder / "model.safetensors")
        return
    if size <= file_bytes:
        tensors = {name: value for file in files for name, value in load_file(parts / file.name).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (parts / file.name).rename(folder / name)
        places |= dict.fromkeys(file.tensors, name)
    metadata = {"total_parameters": whole.num_parameters(), "total_size": size}
    text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def find_tokenizer(config: TrainConfig) -> list[Path]:
    """The files of the run's tokenizer: that of `--tokenizer`, else that of the model; none where it has none.

    Raises:
        UsageError: `--tokenizer` has none, or the hub cannot be reached.
    """
    model = config.model if config.model is not None else str(config.model_config and config.model_config.parent)
    folder = _folder(config.tokenizer or model)
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if config.tokenizer is not None and not files:
        raise UsageError(f"{config.tokenizer} has no {_TOKENIZER}", hint="give a folder with one, or a name on the hub")
    return files


def check_tokenizer(files: list[Path], analysis: Analysis, vocab_size: int) -> None:
    """Refuse a tokenizer that is not the data's, that the model has no room for, or that cannot be loaded.

    Raises:
        UsageError: it is one of these.
    """
    if not files:
        return
    folder = files[0].parent
    made_with = analysis.manifest.get("tokenizer") or {}
    expected = made_with.get("content_hash")
    try:
        content = files[0].read_bytes() if files[0].name == _TOKENIZER else None
        hashes = () if content is None else tokenizer_hashes(json.loads(content), content)
        num_tokens = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:  # whatever it is, what it writes could not be loaded either
        raise UsageError(
            f"the tokenizer in {folder} cannot be loaded: {error}", hint="give another --tokenizer"
        ) from error
    if expected and hashes and expected not in hashes:
        raise UsageError(
            f"{files[0]} is not the tokenizer that the data was made with, {made_with.get('path')}",
            hint="give that one with --tokenizer, or analyze again with this one",
        )
    if num_tokens > vocab_size:
        raise UsageError(
            f"the tokenizer in {folder} has {num_tokens:,} tokens, the model's vocabulary {vocab_size:,}",
            hint="give the model's own tokenizer, and analyze with it",
        )


def _folder(name: str) -> Path:
    """The folder that a name means; of a name on the hub its files come here first."""
    if Path(name).exists() or name.startswith((".", "/", "~")):
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # its errors have no common base
        raise UsageError(
            f"cannot get the tokenizer of {name!r}: {str(error).splitlines()[0]}",
            hint="give a folder with --tokenizer; a name needs the Hugging Face Hub or its cache",
        ) from error
