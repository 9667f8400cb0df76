"""Loads of a saved model what a process has of it, and nothing else: the layers of its stage, of each weight its rows.

transformers loads it, with all that it knows of names and forms of weights in checkpoints, but it is given only those
tensors that this process takes, layer by layer, and of each only its rows. Where a weight is made of several tensors,
such as those of experts, or of a part of one, a layer is loaded whole and its rows are kept. All other weights have no
numbers (`models.model.meta_weight`), until the stage is cut from the model.

FSDP2 shards shapes alone: `take_rows` leaves these to it, and `give_rows` puts the rows of this process back.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from chunkplan.errors import DataError
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.distributed.stages import cut_stage
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM, load_model, meta_model, meta_weight, replace_weights

_HINT = "the checkpoint is incomplete, or its config.json is not its own"

#: By which transformers is told to read without threads.
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"

#: How many numbers in the middle of each tensor tell a checkpoint from another one.
_SAMPLE = 1024

#: A module, the name of a weight in it, and the rows of that which this process has.
ShardedWeight = tuple[nn.Module, str, Tensor]


class WholeOnlyError(Exception):
    """Of this model no part can be loaded by itself: the reason, as the end of a sentence."""


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
    """What the process of `layout` has of a saved model whose model stages have `layers`, its weights on `device`.

    With data-parallel processes these have no numbers, and their rows are in `rows`, as `held` if they are kept in
    another dtype than they are loaded in. Also a hash of the whole checkpoint.

    Raises:
        WholeOnlyError: it can be loaded as a whole only.
        UsageError, DataError: as `load_model`; also for a weight of another shape.
    """
    whole = CausalLM(meta_model(config, dtype))
    kind = type(whole.model)
    stage = cut_stage(whole, layers, layout) if layout.pp > 1 else whole
    part = _Part(held, stage.model.state_dict().keys(), layout, device)

    def load(model: Any, _: Any, files: Sequence[str], how: Any, *__: Any) -> Any:
        return part.load(kind._load_pretrained_model, model, files, how)

    loader: Any = type(
        kind.__name__, (kind,), {"_load_pretrained_model": staticmethod(load), "__module__": kind.__module__}
    )
    with _without_threads():
        model = load_model(name, config, dtype, kernels=kernels, runs_on=device, loader=loader)
    model.model.__class__ = kind
    model = replace(model, rows=part.rows)
    if layout.pp > 1:
        model = cut_stage(model, layers, layout)
    if layout.dp == 1:
        model.model.to(device)
    return model, part.identity


@contextmanager
def _without_threads() -> Iterator[None]:
    """Within the block transformers reads a tensor when it takes it, and no threads read all that it is given."""
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_THREADS)
        os.environ |= {} if before is None else {_NO_THREADS: before}


class StoredTensor:
    """A tensor in a safetensors file, or `rows` of it, read when it is indexed, as a slice of safetensors is.

    The file is mapped no longer than that: what was read of it would count as memory of the process.
    """

    def __init__(self, path: Path, name: str, stored: Any) -> None:
        self.path, self.name, self.rows = path, name, slice(None)
        self.shape: list[int] = stored.get_shape()
        self._dtype: str = stored.get_dtype()

    def get_shape(self) -> list[int]:
        """The shape of its rows, as safetensors calls it."""
        return [len(range(*self.rows.indices(self.shape[0]))), *self.shape[1:]] if self.shape else []

    def get_dtype(self) -> str:
        """Its dtype, by the name that safetensors has for it."""
        return self._dtype

    def read(self, rows: slice) -> Tensor:
        """Rows of the whole of it."""
        with safe_open(self.path, "pt") as file:
            found: Tensor = file.get_slice(self.name)[rows if self.shape else ...]
            return found.clone()

    def __getitem__(self, where: Any) -> Tensor:
        found = self.read(self.rows)
        return found if where is ... else found[where]


def open_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of several safetensors files, by name.

    Raises:
        DataError: one of the files is torn.
    """
    found: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                found |= {name: StoredTensor(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    return found


class _Part:
    """Which weights a process has, and what it has loaded of them."""

    def __init__(
        self, held: torch.dtype | None, names: Iterable[str], layout: RankLayout, device: torch.device
    ) -> None:
        self.rows: dict[nn.Parameter, Tensor] = {}
        self.identity = ""
        self._names, self._layout, self._device, self._held = set(names), layout, device, held
        self._shapes: dict[str, torch.Size] = {}

    def load(self, load_some: Any, model: Any, files: Sequence[str], how: Any) -> Any:
        """Load into a model without weights, by `load_some` of transformers, some tensors at a time."""
        self._shapes = {name: value.shape for name, value in model.state_dict().items()}
        stored = open_files(Path(file) for file in files)
        self.identity = _identity(stored)
        targets, used = _targets(stored, model, how, self._shapes)
        present = {name for name, _ in targets.values()}
        tied: dict[str, str] = model.all_tied_weights_keys
        for name, other in tied.items():
            if {name, other} <= present:
                raise WholeOnlyError(f"its checkpoint has both {name} and {other}, which its config says are one")
        own = self._names | {each for pair in tied.items() if self._names & {*pair} for each in pair}
        groups: dict[str, dict[str, StoredTensor]] = {}
        for key, (name, is_made) in targets.items():
            if name in self._shapes and name not in own:
                continue
            if name in own and not is_made:
                self._show_rows_of(model, name, key, stored[key])
            groups.setdefault(layer_of(name), {})[key] = stored[key]
        report, rest = None, None
        for some in groups.values():
            found, rest = load_some(model, some, None, how)
            self._keep_rows_of(model, self._shapes.keys() - found.missing_keys)
            report = found if report is None else _both(report, found)
        if report is None:
            raise WholeOnlyError("its checkpoint has no weight of this process")
        self._leave_others(model, own)
        ends = {each for pair in tied.items() for each in pair} - present
        report.missing_keys &= own | ends
        model._weight_conversions = used
        return report, rest

    def _leave_others(self, model: Any, own: set[str]) -> None:
        """Put weights without numbers in place of those that other processes have."""
        for name in self._shapes.keys() - own:
            module, last = _place(model, name)
            if (weight := module._parameters.get(last)) is not None:
                module._parameters[last] = _initialized(meta_weight(weight, self._shapes[name]))

    def _show_rows_of(self, model: Any, name: str, key: str, stored: StoredTensor) -> None:
        """Have model and checkpoint agree that a weight has the rows of this process only."""
        shape = self._shapes[name]
        if stored.get_shape() != [*shape]:
            found = f"{key} has the shape {stored.get_shape()}, the model has {[*shape]}"
            raise DataError(found, where=str(stored.path), hint=_HINT)
        module, last = _place(model, name)
        weight = module._parameters.get(last)
        if self._layout.dp > 1 and weight is not None and shape:
            stored.rows = rows_of(shape[0], self._layout)
            smaller = weight.new_empty(stored.get_shape())
            module._parameters[last] = nn.Parameter(smaller, requires_grad=weight.requires_grad)

    def _keep_rows_of(self, model: Any, names: set[str]) -> None:
        """Keep the rows of weights that were loaded, and leave their shapes; without replicas, move them."""
        for name in names:
            module, last = _place(model, name)
            weight = module._parameters.get(last)
            if weight is None:
                continue
            if self._layout.dp == 1:
                weight.data = weight.data.to(self._device)
                continue
            shape, rows = self._shapes[name], weight.data
            if rows.shape == shape and shape:  # it was loaded whole
                rows = rows[rows_of(shape[0], self._layout)].clone()
            if self._held is not None:
                rows = rows.to(self._held)
            module._parameters[last] = standing = _initialized(meta_weight(weight, shape))
            self.rows[standing] = rows.to(self._device)


def _place(model: Any, name: str) -> tuple[nn.Module, str]:
    """The module that a weight or a buffer is in, and its name there."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _initialized(weight: nn.Parameter) -> nn.Parameter:
    """A weight that transformers does not draw, as it takes it for one that was loaded."""
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    return weight


def _identity(stored: Mapping[str, StoredTensor]) -> str:
    """A hash of names, kinds and a piece from the middle of all tensors of a checkpoint, however it is split."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        middle = tensor.shape[0] // 2 if tensor.shape else 0
        sample = tensor.read(slice(middle, middle + 1)).reshape(-1)[:_SAMPLE].view(torch.uint8)
        digest.update(f"{name} {tensor.get_dtype()} {tensor.shape}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _targets(
    stored: Mapping[str, StoredTensor], model: Any, how: Any, shapes: dict[str, torch.Size]
) -> tuple[dict[str, tuple[str, bool]], list[Any]]:
    """By tensor of a checkpoint the weight that it becomes, and whether that is made of several, or of a part.

    Also the changes of names and forms that this takes, which saving turns back. Tensors are in the order in which
    transformers goes through them, which for some changes matters.
    """
    mapping = list(how.weight_mapping or ())
    tried = copy.deepcopy(mapping)
    renamings = [each for each in tried if isinstance(each, WeightRenaming)]
    converters = [each for each in tried if isinstance(each, WeightConverter)]
    found: dict[str, tuple[str, bool]] = {}
    prefix = model.base_model_prefix
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, shapes)
        if name not in shapes and key in shapes:
            name, pattern = rename_source_key(key, [], [], prefix, shapes)
        found[key] = name, pattern is not None
    return found, [each for each, copied in zip(mapping, tried, strict=True) if copied.was_used()]


def layer_of(name: str) -> str:
    """What is loaded and saved at once: a layer, or a weight beside the layers."""
    layer = re.match(r".*?\.\d+\.", name)
    return layer[0] if layer else name


def _both(one: Any, other: Any) -> Any:
    """The reports of two loads of one model, as one."""
    one.missing_keys &= other.missing_keys
    one.unexpected_keys |= other.unexpected_keys
    one.mismatched_keys |= other.mismatched_keys
    one.conversion_errors |= other.conversion_errors
    one.error_msgs += other.error_msgs
    return one


def take_rows(model: CausalLM, replicas: DeviceMesh, *, master_weights: bool) -> list[ShardedWeight]:
    """Leave the shapes of a model's weights, on torch's meta device, and return of each the rows of this process.

    It is done weight by weight, so that there are never more than the rows and one weight: of a whole weight its rows
    are copied, and where these are `master_weights` it is they that become float32; those of frozen weights do not.
    """
    device = torch.device(replicas.device_type)
    rows: dict[nn.Parameter, Tensor] = {}

    def take(weight: nn.Parameter) -> nn.Parameter:
        own = model.rows.pop(weight, None)
        if own is None:
            chunks = torch.chunk(weight.data, replicas.size())
            own = next(iter(chunks[replicas.get_local_rank() :]), weight.data[:0]).clone()
        if master_weights:
            own = own.float() if weight.requires_grad else own.to(weight.dtype)
        shape = nn.Parameter(own.new_empty(weight.shape, device="meta"), requires_grad=weight.requires_grad)
        rows[shape] = own.to(device)
        return shape

    replace_weights(model.model, take)
    return [
        (module, name, rows[shape])
        for module in model.model.modules()
        for name, shape in module._parameters.items()
        if shape is not None
    ]


def give_rows(places: Sequence[ShardedWeight]) -> None:
    """Put the rows of this process where FSDP2 has sharded shapes."""
    made: dict[int, nn.Parameter] = {}
    for module, name, own in places:
        if id(own) not in made:
            sharded: Any = module._parameters[name]
            how = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
            filled = DTensor.from_local(own, sharded.device_mesh, sharded.placements, **how)
            made[id(own)] = nn.Parameter(filled, requires_grad=sharded.requires_grad)
        module._parameters[name] = made[id(own)]
