"""The processes that train together: their rendezvous and groups, one as it sees itself, and what all compare."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import in_words
from chunkplan.planfile.plan import Plan
from chunkplan.version import __version__
from chunkplan_runtime import set_for_several_processes
from chunkplan_runtime.devices import local_device_index
from chunkplan_runtime.execution.links import Link, Links
from chunkplan_runtime.failures.watchdog import Watchdog
from chunkplan_runtime.layout import (
    Activity,
    Block,
    Exchanges,
    RankLayout,
    all_gather,
    is_lost_connection,
    named_processes,
    reduce_scatter,
)
from chunkplan_runtime.models.model import CausalLM

T = TypeVar("T")

#: How long a process waits for another one that lives: longer than the slowest step and the largest checkpoint.
TIMEOUT = timedelta(hours=1)

#: Numbers of a gradient that are squared at once: in float64 they take 128 MiB.
NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class OwnGpu:
    """The GPU that a process takes: `index` of the `num_seen` that its machine shows it, with its `uuid`, if any."""

    machine: str
    index: int
    num_seen: int
    uuid: str | None


def find_own_gpu(device: str) -> OwnGpu:
    """The GPU of this process; `device` is as the option has it, and "cpu" takes none."""
    num_seen = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    index = local_device_index()
    uuid = str(torch.cuda.get_device_properties(index).uuid) if index < num_seen else None
    return OwnGpu(socket.gethostname(), index, num_seen, uuid)


def check_gpus(processes: Sequence[OwnGpu]) -> None:
    """Raise UsageError where there are GPUs, and one of `processes`, in order, has none or shares it with another."""
    takers: dict[str, int] = {}
    for number, own in enumerate(processes if any(each.num_seen for each in processes) else ()):
        if own.uuid is None:
            found = f"process {number} of {len(processes)} would take GPU {own.index}, and sees {own.num_seen}"
        elif (other := takers.setdefault(own.uuid, number)) != number:
            found = f"processes {other} and {number} of {len(processes)} would share a GPU ({own.uuid})"
        else:
            continue
        raise UsageError(
            found,
            where=own.machine,
            hint="start as many processes on a machine as it has GPUs, with LOCAL_RANK from 0, or show each of them a "
            "GPU of its own (CUDA_VISIBLE_DEVICES); without GPUs: --device cpu",
        )


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Within the block the processes have a group: NCCL between GPUs, if `device` is not "cpu", else gloo.

    After an error it is left as it is: what the others never send would be waited for. Raises UsageError if the others
    cannot be reached.
    """
    set_for_several_processes()  # where they do not come from `train.main`, which does it before torch is there
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if has_gpu and local_device_index() < torch.cuda.device_count():  # else it is refused when all can hear it
        torch.cuda.set_device(local_device_index())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=TIMEOUT)
    except (dist.DistError, ValueError) as error:
        raise UsageError(
            f"rendezvous failed: {str(error).splitlines()[0]}",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            hint="check that all processes were started, with the same MASTER_ADDR and MASTER_PORT and their own RANK",
        ) from error
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Groups:
    """The groups that this process is in, beside the default one of all, for objects on the CPU and sums.

    `replicas`: of its stage, one in each pipeline; None where there is one. `links_by_border`: to other processes; m is
    the border between the model stages m and m + 1. `ends`: the stages of its pipeline with the first and the last
    model stage; None on the others, and where one has both. `seconds`: how long making them took, and using each once.
    `objects`: for what lies on the CPU; None where the default one takes it.
    """

    layout: RankLayout
    device: torch.device
    replicas: DeviceMesh | None
    links_by_border: dict[int, Link]
    ends: dist.ProcessGroup | None
    exchanges: Exchanges
    seconds: float
    objects: dist.ProcessGroup | None = None

    @property
    def num_groups(self) -> int:
        """The number of process groups, with that of all; a link is two, one for each direction."""
        num_single = 1 + (self.replicas is not None) + (self.ends is not None)
        return num_single + 2 * len(self.links_by_border) + len(self.exchanges.groups)

    def links(self, hidden_size: int, dtype: torch.dtype) -> Links | None:
        """The links of this process's stage, connected; None where there is one stage. All processes have to ask."""
        row = torch.zeros(1, hidden_size, dtype=dtype, device=self.device)
        return Links(row, self.layout.model_stages(), self.links_by_border) if self.layout.pp > 1 else None


def make_groups(layout: RankLayout, device: torch.device, timeout: timedelta, blocks: Sequence[Block] = ()) -> Groups:
    """Make the groups and use each of them once; all processes have to, at the same time, after `init_process_group`.

    The first use of a group of NCCL, for each thing that it is used for, connects its processes and waits for the
    device, which must not be in the middle of a step. Those of links are used once by `Links`. `blocks`: see
    `layout.used_blocks`.
    """
    started, pipelines, replicas = time.perf_counter(), range(layout.dp), None

    def own_group(members: list[list[int]]) -> dist.ProcessGroup | None:
        """The one of these groups that this process is in; all processes make all, so that torch counts them alike."""
        groups = [(each, dist.new_group(each, timeout=timeout)) for each in members]
        return next((group for each, group in groups if layout.process in each), None)

    def of_stages(*stages: int) -> list[list[int]]:
        """Processes of these stages, by pipeline."""
        return [[layout.process_of(stage, replica) for stage in stages] for replica in pipelines]

    if layout.dp > 1:
        own: Any = own_group([[layout.process_of(stage, each) for each in pipelines] for stage in range(layout.pp)])
        replicas = DeviceMesh.from_group(own, device.type, mesh_dim_names=("dp",))
    first, *_ = stages_of = [layout.stage_of(model_stage) for model_stage in range(layout.num_model_stages)]
    links: dict[int, Link] = {}
    for border, (above, below) in enumerate(pairwise(stages_of)):
        if above != below:  # else both are on one process
            down, up = own_group(of_stages(above, below)), own_group(of_stages(above, below))
            if down is not None and up is not None:
                other = below if layout.stage == above else above
                links[border] = Link(layout.process_of(other, layout.replica), down, up)
    ends = own_group(of_stages(first, stages_of[-1])) if first != stages_of[-1] else None
    dist.all_reduce(torch.zeros(1, device=device))
    if ends is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=ends)
    if replicas is not None:
        rows = torch.zeros(layout.dp, 1, device=device)
        all_gather(rows, rows[:1].clone(), group=replicas.get_group())
        reduce_scatter(rows[:1].clone(), rows, group=replicas.get_group())
    # Who lets accelerate make the default group has one of NCCL alone, between GPUs.
    objects = None if "cpu:" in dist.get_backend_config() else dist.new_group(backend="gloo", timeout=timeout)
    dist.all_reduce(torch.zeros(1), group=objects)

    shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
    wanted = {group for block in blocks for group in (*block.groups_of_heads(), *block.groups_of_pages())}
    for members in sorted(group for group in wanted if len(group) > 1):
        made = own_group([[layout.process_of(stage, each) for each in members] for stage in range(layout.pp)])
        if made is not None:
            shared[members] = made
    exchanges = Exchanges(layout, shared)
    exchanges.use_once(device)
    return Groups(layout, device, replicas, links, ends, exchanges, time.perf_counter() - started, objects)


@dataclass(frozen=True)
class Job:
    """One process of a job; without arguments the only one, which has no groups."""

    layout: RankLayout = field(default_factory=RankLayout)
    groups: Groups | None = None
    watchdog: Watchdog | None = None

    @property
    def is_main(self) -> bool:
        """True if this process is the one that prints and writes for all."""
        return self.layout.process == 0

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all processes, in their order; all of them have to call it."""
        return [value] if self.groups is None else gather_objects(value, self.groups.objects)

    def broadcast_object(self, value: T) -> T:
        """The value of the main process; all processes have to call it, what the others give is ignored."""
        values = [value]
        if self.groups is not None:
            dist.broadcast_object_list(values, src=0, group=self.groups.objects)
        return values[0]

    def at_step(self, step: int) -> None:
        """Tell the watchdog the step that this process is at, for its messages; -1 is before the first."""
        if self.watchdog is not None:
            self.watchdog.at_step(step)

    def defers_interrupt(self, defers: bool) -> None:
        """Tell the watchdog if this process takes the next Ctrl-C when its step is done."""
        if self.watchdog is not None:
            self.watchdog.defers_interrupt = defers

    def reporting(
        self, activity: Callable[[], Activity], on_device: Callable[[], str | None]
    ) -> AbstractContextManager[None]:
        """Within the block, have the watchdog tell what this process is at: see `Heartbeat.reporting`."""
        return nullcontext() if self.watchdog is None else self.watchdog.heartbeat.reporting(activity, on_device)

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.groups is not None:
            dist.barrier(self.groups.objects)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all processes of a group, by default the default one, in order; all of them have to call it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def versions_with(plan: Plan) -> dict[str, str]:
    """The versions that all processes must have alike: with another plan or version, making groups might hang."""
    packages = {"chunkplan": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**packages, "plan": plan.content_hash}


def refuse_differences(given: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError, on all processes, if these were not `given` the same: of each what it was, by name."""
    names = {name: None for each in given for name in each}
    texts = {name: [json.dumps(each.get(name)) for each in given] for name in names}
    differ = [name for name, own in texts.items() if len({*own}) > 1]
    if differ:
        [name, *more] = differ
        holders = {text: [process for process, own in enumerate(texts[name]) if own == text] for text in texts[name]}
        told = [f"{shorten(json.loads(text))} on {named_processes(who)}" for text, who in holders.items()]
        raise UsageError(
            f"the processes do not have the same {name}: {'; '.join(told)}" + f"; {len(more)} more differ" * bool(more),
            hint="start all processes with the same options, files and versions",
        )


@contextmanager
def lost_peers(watchdog: Watchdog) -> Iterator[None]:
    """Around what waits for other processes: if one vanishes, `watchdog` names it and ends this process.

    Raises ChunkplanError if a connection broke, or nothing came over it in time, and yet nobody died.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        watchdog.await_end()
        first_line = str(error).partition("\n")[0]
        raise ChunkplanError(
            f"the connection to another process broke: {first_line}",
            where=watchdog.heartbeat.activity().words or None,
            hint=f"check the network between the machines; {watchdog.resume}",
        ) from error


def shorten(value: object) -> str:
    """A value as a message has it: hashes, and all else that is long, by the first 12 characters."""
    text = in_words(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def tied_weight(model: CausalLM, groups: Groups | None) -> str | None:
    """The name of the trained weight that both ends of a pipeline have; None on all other stages and models."""
    if groups is None or groups.ends is None or not model.config.tie_word_embeddings:
        return None
    weight = model.model.get_input_embeddings().weight
    named = model.model.named_parameters()
    return next((name for name, value in named if value is weight and value.requires_grad), None)


def gradient_norm(weights: Mapping[str, Tensor], tied: str | None, groups: Groups | None) -> Tensor:
    """The norm of the gradients of the whole model: the same number on all processes.

    Before, both ends of a pipeline are given the gradient of both uses of a `tied` weight, which counts once. Sums are
    float64: of a million float32 squares torch on a CPU loses the fifth digit.
    """
    if tied is not None and groups is not None:
        if weights[tied].grad is None:  # the head's, in a step without targets
            weights[tied].grad = torch.zeros_like(weights[tied])
        dist.all_reduce(_local_gradients([weights[tied]])[0], group=groups.ends)
    counted = [weight for name, weight in weights.items() if name != tied or groups is None or groups.layout.is_first]
    device = groups.device if groups is not None else next(iter(weights.values())).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in _local_gradients(counted):
        for numbers in torch.split(gradient.reshape(-1), NUMBERS_AT_ONCE):
            squares += torch.linalg.vector_norm(numbers, dtype=torch.float64) ** 2
    if groups is not None:
        dist.all_reduce(squares)
    return squares.sqrt()


def clip(weights: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale gradients whose norm is `norm` down to `largest`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    gradients = _local_gradients(weights)
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))


def _local_gradients(weights: Iterable[Tensor]) -> list[Tensor]:
    """The local shards of the gradients of `weights`, of those that have one."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
