"""Runs steps on processes that are the stages of a pipeline: of a real model, or of a stand-in that sleeps."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chunkplan.arrays import Int64Array
from chunkplan.operations import OPS
from chunkplan.planfile.measured import StepTimeline
from chunkplan.planfile.plan import Action, Chunk
from chunkplan.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FORWARD_KV
from chunkplan.schedule.timeline import Simulation
from chunkplan_runtime.attention.context import ChunkContext, CurrentChunk
from chunkplan_runtime.attention.interface import chunk_attention
from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.distributed.job import Groups, gradient_norm, make_groups
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.execution.executor import ActionClock, Around, RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork, shifted_labels
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import RankLayout, Span
from chunkplan_runtime.models.model import CausalLM, Head, new_model

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Job:
    """A step to run; its segments name `sequences` by their place. `scale`: seconds of sleep for a predicted one."""

    step: Simulation
    sequences: list[npt.NDArray[np.int32]]
    scale: float = 0.0

    def layout(self, pp: int, stage: int) -> RankLayout:
        """The process of a stage that runs it, on one data-parallel rank."""
        return RankLayout(1, pp, stage, self.step.placement)


@dataclass(frozen=True)
class Ran:
    """One stage's times of a step; `loss` on the last stage, elsewhere 0, and `norm` of all gradients, 0 of sleep."""

    times: StepTimeline
    loss: float
    norm: float


def run_stages(jobs: Sequence[Job], pp: int, repeats: int, config: Any = None) -> list[list[list[Ran]]]:
    """Run every job `repeats` times on `pp` processes, in turn, after one round that does not count.

    Returns [len(jobs)][repeats][pp]. The stages are those of a model of `config`; without one they sleep.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, args=(pp, Path(folder), list(jobs), repeats, config), nprocs=pp)
        by_stage = [pickle.loads((Path(folder) / str(stage)).read_bytes()) for stage in range(pp)]
    return [[[rounds[repeat][job] for rounds in by_stage] for repeat in range(repeats)] for job in range(len(jobs))]


def _work(stage: int, pp: int, folder: Path, jobs: list[Job], repeats: int, config: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", _TIMEOUT, world_size=pp, rank=stage)
    run = _Stage(stage, pp, config)
    rounds = [[run(job) for job in jobs] for _ in range(repeats + 1)]
    (folder / str(stage)).write_bytes(pickle.dumps(rounds[1:]))
    dist.destroy_process_group()


class _Stage:
    """One stage of a pipeline, which runs jobs: by layout of virtual stages its links, and its part of the model."""

    def __init__(self, stage: int, pp: int, config: Any) -> None:
        self._stage, self._pp, self._config = stage, pp, config
        self._groups: dict[RankLayout, Groups] = {}
        self._models: dict[RankLayout, CausalLM] = {}

    def __call__(self, job: Job) -> Ran:
        layout = job.layout(self._pp, self._stage)
        if layout not in self._groups:
            self._groups[layout] = make_groups(layout, _CPU, _TIMEOUT)
            if self._config is not None:
                whole = new_model(self._config, torch.float32, seed=0)
                layers = split_layers(self._config.num_hidden_layers, self._pp, None, layout.virtual_stages)
                self._models[layout] = cut_stage(whole, layers, layout)
        groups, own = self._groups[layout], self._models.get(layout)
        work, durations = work_of(job, self._stage), job.step.times.durations
        model: Any = own or Sleeper.of(durations, job.scale, work, layout)
        executor = RankExecutor(model, links=groups.links(model.config.hidden_size if own else 1, model.dtype))
        clock = ActionClock(_CPU)
        num_targets = sum(len(sequence) - 1 for sequence in job.sequences)
        around = clock.around(0)
        if own is None:
            around = weight_halves(around, durations, job.scale, layout)
        dist.barrier()
        clock.start(0)
        # Who sleeps has no attention to keep.
        chunks = {number: replace(chunk, kept_attention="") for number, chunk in work.chunks.items()}
        loss = executor.run(replace(work, chunks=chunks), num_targets, around).loss
        times = clock.stop()
        if own is None:
            return Ran(times, loss, 0.0)
        norm = gradient_norm(dict(own.model.named_parameters()), None, groups).item()
        own.model.zero_grad()
        return Ran(times, loss, norm)


@dataclass(frozen=True)
class Sleeper:
    """What the executor needs of a model: its forwards and backwards sleep, its hidden states are a number a token.

    A chunk that processes share they begin together: attention of one layer of heads of one number, which exchanges all
    that the runtime would, and computes nothing. Weight halves sleep in `weight_halves`.

    `seconds` of a forward, one that keeps KV alone, and a backward or its input half, by the spans of a chunk.
    `by_stage`: its virtual stages, of which a process has one or several.
    """

    seconds: dict[tuple[Span, ...], tuple[float, float, float]]
    is_first: bool
    is_last: bool
    by_stage: list[Sleeper]
    head: Head = field(default_factory=lambda: Head(nn.Linear(1, 2), 2))
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    current: CurrentChunk = field(default_factory=CurrentChunk)

    @classmethod
    def of(cls, durations: Int64Array, scale: float, work: RankWork, layout: RankLayout) -> Sleeper:
        """Make a process that sleeps for as long as is predicted, scaled.

        `durations` in ns: [num_ops, num_model_stages, num_chunks].
        """
        splits = any(action.op == "backward_input" for action in work.actions)
        ops = [FORWARD, FORWARD_KV, BACKWARD_INPUT if splits else BACKWARD]
        current, last, parts = CurrentChunk(), layout.num_model_stages - 1, []
        for model_stage in layout.model_stages():
            by_chunk = [tuple(each) for each in (durations[ops, model_stage] / 1e9 * scale).T.tolist()]
            seconds = {tensors.spans: by_chunk[chunk_id] for chunk_id, tensors in work.tensors.items()}
            parts.append(cls(seconds, model_stage == 0, model_stage == last, [], current=current))
        return cls({}, layout.is_first, layout.is_last, parts, current=current)

    def hidden_states(
        self, tensors: ChunkTensors, store: KVStore, inputs: Tensor | None = None, seed: int | None = None
    ) -> Tensor:
        """Sleep as long as a forward takes, and return a hidden state of one number a token, [num_tokens, 1]."""
        forward, forward_kv, backward = self.seconds[tensors.spans]
        received = torch.zeros(len(tensors.labels), 1, requires_grad=True) if inputs is None else inputs
        hidden: Tensor = _Sleep.apply(received, 0.0, backward)
        if tensors.shared is not None:
            hidden = _meet(hidden, tensors, store)
        slept: Tensor = _Sleep.apply(hidden, forward if torch.is_grad_enabled() else forward_kv, 0.0)
        return slept


def weight_halves(inner: Around, durations: Int64Array, scale: float, layout: RankLayout) -> Around:
    """What the executor enters around an action: `inner`, in which weight halves sleep as is predicted of them."""
    model_stages = layout.model_stages()

    @contextmanager
    def sleeping(action: Action) -> Iterator[None]:
        with inner(action):
            if action.op == "backward_weight":
                stage = model_stages[action.virtual_stage]
                time.sleep(durations[BACKWARD_WEIGHT, stage, action.chunk_id] / 1e9 * scale)
            yield

    return sleeping


def _meet(hidden: Tensor, tensors: ChunkTensors, store: KVStore) -> Tensor:
    """Exchange what attention of one layer needs; in a backward too, before it sleeps."""
    assert tensors.shared is not None
    context = ChunkContext(tensors.spans, store, _NO_KERNELS, shared=tensors.shared)
    heads = hidden.T[None, :, :, None].expand(-1, len(tensors.shared.heads), -1, 1)  # [1, heads, num_tokens, 1]
    _LAYER.chunkplan = CurrentChunk(context)
    out, _ = chunk_attention(_LAYER, heads, heads, heads, None)  # [1, num_tokens, heads, 1]
    return out[0].sum(1)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = backward_seconds
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class _NoKernel(AttentionKernel):
    """Attention that computes nothing."""

    name = "none"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Zeros of the right shapes."""
        return torch.zeros_like(query), query.new_zeros(query.shape[:3])

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros of the right shapes."""
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


class _NoKernels(Kernels):
    def choose(
        self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form
    ) -> AttentionKernel:
        return _NoKernel()


_NO_KERNELS = _NoKernels()
_LAYER: Any = nn.Identity()
_LAYER.layer_idx = 0


def work_of(job: Job, stage: int) -> RankWork:
    """Turn a simulated step into the work of one stage; all tokens are targets."""
    chunks = {each.chunk_id: replace(each, num_target_tokens=each.num_tokens) for each in job.step.chunks}
    actions = job.step.actions
    own = slice(*actions.stages[stage : stage + 2])
    done = zip(*(column[own].tolist() for column in actions[:3]), strict=True)
    tensors = {chunk_id: _tensors(chunk, job.sequences) for chunk_id, chunk in chunks.items()}
    return RankWork(0, 0, [Action(OPS[op], *of_chunk) for op, *of_chunk in done], chunks, tensors)


def _tensors(chunk: Chunk, sequences: Sequence[npt.NDArray[np.int32]]) -> ChunkTensors:
    ids, positions, labels, spans, offset = [], [], [], [], 0
    for sequence_id, start, end in ((each.sequence_id, each.start, each.end) for each in chunk.segments):
        sequence = sequences[sequence_id]
        with_next = sequence[start : end + 1]
        ids.append(sequence[start:end])
        positions.append(np.arange(start, end, dtype=np.int32))
        labels.append(shifted_labels(with_next, np.ones(len(with_next), np.bool_))[: end - start])
        spans.append(Span(sequence_id, start, end, len(sequence), offset, chunk.group_id))
        offset += end - start
    input_ids, position_ids, targets = (torch.from_numpy(np.concatenate(each)) for each in (ids, positions, labels))
    return ChunkTensors(input_ids[None], position_ids[None], targets, tuple(spans))
