"""Saves the model that a run leaves, as `save_pretrained` of transformers does, and the tokenizer that goes with it.

Several processes gather it weight by weight, and each writes some of the files with safetensors: torch's own
consolidation would write every number twice, those of a weight without dimensions as 0, and no integers.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import create_repo, snapshot_download, upload_folder
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.folder import let_umask_decide
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.tokenizer_hash import tokenizer_hash
from chunkplan_runtime.devices import wide
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.stages import layer_of
from chunkplan_runtime.models.model import CausalLM, first_line
from chunkplan_runtime.models.parts import has_adapters
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.run_folder import shared_folder, why
from chunkplan_runtime.training.train_step import TrainStep

#: From how many bytes on a model that several processes have is saved in several files, each of about so many.
FILE_BYTES = 1 << 30

_MERGE_HINT = "leave --merge-adapters out, or name other layers by --lora-targets"

_TOKENIZER = "tokenizer.json"
_MORE = "tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja vocab.json merges.txt"
_FILES = [_TOKENIZER, *_MORE.split(), "tokenizer.model"]


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

    `merges`: save all weights, with the adapters added for good. Raises ChunkplanError: it cannot be written.
    """
    own, described = train_step.model.model, whole.model
    if merges:
        own = merge_adapters(own, train_step.tensors()["weights"])
        described = own if job.groups is None else described.unload()
    with shared_folder(target, job) as folder:
        if job.groups is None:
            described.save_pretrained(folder)
        else:
            save_parts(own, described, folder, job, file_bytes)
        if job.is_main:
            for path in folder.glob("*.safetensors"):  # which only their owner may read
                let_umask_decide(path)
            for file in tokenizer:  # to the byte the one whose hash an analysis holds
                shutil.copyfile(file, folder / file.name)


def open_repository(name: str) -> str:
    """The address of a repository on the Hugging Face Hub, which is made if it is not there.

    Raises UsageError: it cannot be, such as without a token.
    """
    try:
        return str(create_repo(name, exist_ok=True))
    except Exception as error:  # its errors have no common base
        raise UsageError(
            f"--push-to-hub {name}: {first_line(error)}",
            hint="look at the network, run `hf auth login` with a token that may write, or upload when it is trained: "
            "`hf upload USER/NAME RUN/final`",
        ) from error


def upload(folder: Path, name: str) -> str:
    """Upload a folder to a repository on the Hugging Face Hub; returns the address of the commit."""
    try:
        return str(upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with chunkplan").commit_url)
    except Exception as error:
        hint = f"what was trained is there: hf upload {shlex.join([name, str(folder)])} does it again"
        raise ChunkplanError(f"--push-to-hub {name}: {first_line(error)}", where=str(folder), hint=hint) from error


def check_mergeable(model: Any) -> None:
    """Raise UsageError if an adapter is not of a linear layer, or its weight is used by other layers too."""
    from peft.tuners.lora import Linear, ParamWrapper

    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for path, layer, base, own in _adapted(model):
        parts = [*path.removeprefix("base_model.model.").split("."), own]
        name = ".".join(part for part in parts if part != "base_layer")
        if not isinstance(layer, (Linear, ParamWrapper)):
            kind = type(base).__name__
            raise UsageError(f"--merge-adapters: that of {name} ({kind}) is none of a linear layer", hint=_MERGE_HINT)
        if uses[id(getattr(base, own))] > 1:
            told = f"--merge-adapters: {name} has an adapter, and another layer has the same weight without it"
            raise UsageError(told, hint=_MERGE_HINT)


def merge_adapters(model: Any, trained: Mapping[str, Tensor]) -> Any:
    """A process's weights of a peft model by name, with the adapters of `trained` merged by peft.

    Sums are in float32, of float64 weights in that, and rounded once to the dtype of the weight.
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


def save_parts(own: Any, whole: Any, folder: Path, job: Job, file_bytes: int) -> None:
    """Save a model of which each process has layers or rows of them as `own`; all raise OSError if one cannot write."""
    is_adapter = has_adapters(whole)
    if job.is_main and not is_adapter:
        whole.save_pretrained(folder, state_dict={})  # its configs
    weights, held = dict(whole.named_parameters(remove_duplicate=False)), own.state_dict()
    if is_adapter:
        names = {name for name, weight in weights.items() if weight.requires_grad}
    else:  # of tied weights one
        tied = {name for name, kept in whole.all_tied_weights_keys.items() if weights[name] is weights[kept]}
        names = {*whole.state_dict()} - tied - {*(whole._keys_to_ignore_on_save or ())}
    stages: dict[str, int] = {}
    for stage, its_names in job.all_gather_object((job.layout.stage, [name for name in held if name in names])):
        for name in its_names:
            stages.setdefault(name, stage)  # tied embeddings are on two
    files, places, size, failure = _files(whole, stages, file_bytes), dict[str, str](), 0, ""
    for number, (stage, in_file) in enumerate(files):
        tensors: dict[str, Tensor] = {}
        for name in in_file if stage == job.layout.stage else ():
            tensors[name] = _gathered(held[name].to(weights.get(name, held[name]).dtype)).cpu()
            if number % job.layout.dp != job.layout.replica:
                del tensors[name]
        if not tensors:
            continue
        tensors = tensors if is_adapter else revert_weight_conversion(whole, tensors)
        size += sum(value.nbytes for value in tensors.values())
        places |= dict.fromkeys(tensors, f"model-{number + 1:05d}-of-{len(files):05d}.safetensors")
        try:
            _save(tensors, folder / places[next(iter(tensors))])
        except (OSError, SafetensorError) as error:
            failure = failure or why(error)  # the others go on with what has to be done together
    told = job.all_gather_object((places, size, failure))
    for process, (*_, failed) in enumerate(told):
        if failed:
            raise OSError(failed + (f" (process {process})" if process else ""))
    if not job.is_main:
        return
    places, size = {name: file for each, *_ in told for name, file in each.items()}, sum(each for _, each, _ in told)
    if not is_adapter and size > file_bytes:
        metadata = {"total_parameters": whole.num_parameters(), "total_size": size}
        text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")
        return
    written = sorted({folder / file for file in places.values()})
    tensors = {name: value for path in written for name, value in load_file(path).items()}
    for path in written:
        path.unlink()
    if is_adapter:
        for name, value in tensors.items():
            weights[name].data = value
        whole.save_pretrained(folder)
    else:
        _save(tensors, folder / "model.safetensors")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})


def _files(whole: Any, stages: Mapping[str, int], file_bytes: int) -> list[tuple[int, list[str]]]:
    """The stage and the weights of each file, of whole layers and about `file_bytes`; `stages`: that of each weight."""
    layers: dict[tuple[int, str], list[str]] = {}
    sizes = {name: value.nbytes for name, value in whole.state_dict().items() if name in stages}
    for name in sizes:
        layers.setdefault((stages[name], layer_of(name)), []).append(name)
    files: list[tuple[int, list[str]]] = []
    filled = 0
    for (stage, _), names in sorted(layers.items(), key=lambda layer: layer[0][0]):
        size = sum(sizes[name] for name in names)
        filled += size
        if not files or files[-1][0] != stage or filled > file_bytes:
            files.append((stage, []))
            filled = size
        files[-1][1].extend(names)
    return files


def find_tokenizer(config: TrainConfig) -> list[Path]:
    """The files of the tokenizer of the run, or of its model, if any; UsageError: `--tokenizer` has none."""
    name = config.tokenizer or config.model or str(config.model_config and config.model_config.parent)
    folder = Path(name)
    if not folder.exists() and not name.startswith((".", "/", "~")):
        try:
            folder = Path(snapshot_download(name, allow_patterns=_FILES))
        except Exception as error:  # its errors have no common base
            raise UsageError(
                f"cannot get the tokenizer of {name!r}: {str(error).splitlines()[0]}",
                hint="give a folder with --tokenizer; a name needs the Hugging Face Hub or its cache",
            ) from error
    files = [folder / file for file in _FILES if (folder / file).is_file()]
    if config.tokenizer is not None and not files:
        raise UsageError(f"{config.tokenizer} has no {_TOKENIZER}", hint="give a folder with one, or a name on the hub")
    return files


def check_tokenizer(files: list[Path], analysis: Analysis, vocab_size: int) -> None:
    """Raise UsageError for a tokenizer that is not the data's, that the model has no room for, or that is damaged."""
    if not files:
        return
    folder = files[0].parent
    made_with = analysis.manifest.get("tokenizer") or {}
    expected = made_with.get("content_hash")
    try:
        content = files[0].read_bytes() if files[0].name == _TOKENIZER else None
        found = None if content is None else tokenizer_hash(json.loads(content))
        num_tokens = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:  # whatever it is, what it writes could not be loaded either
        told = f"the tokenizer in {folder} cannot be loaded: {error}"
        raise UsageError(told, hint="give another --tokenizer") from error
    if expected and found and expected != found:
        raise UsageError(
            f"{files[0]} is not the tokenizer that the data was made with, {made_with.get('path')}",
            hint="give that one with --tokenizer, or analyze again with this one",
        )
    if num_tokens > vocab_size:
        raise UsageError(
            f"the tokenizer in {folder} has {num_tokens:,} tokens, the model's vocabulary {vocab_size:,}",
            hint="give the model's own tokenizer, and analyze with it",
        )
