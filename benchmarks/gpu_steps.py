"""Runs steps of the plans in benchmarks/gpu_plans/ with the runtime's own parts, beside what the planner predicts."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_plans import FOLDER, PLANS, GpuPlan, write_model, write_tokens
from gpu_streams import streams_at_work
from gpu_work import work_of

from chunkplan.cost.durations import attention_pairs_of, durations
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.operations import KEPT_ATTENTION, OPS
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import Action, Chunk
from chunkplan_runtime.calibration.calibrate import Probe, time_probe
from chunkplan_runtime.devices import synchronize
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, StepWork, open_plan
from chunkplan_runtime.models.compiled import CompiledLayers
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.training.optimizer import TrainedWeights

Row = dict[str, Any]

#: Before any step a chunk of at most so many tokens runs, behind three of the same size: it prepares most kernels.
_WARM_CHUNK = 8192

#: A step of at most so many tokens runs once before it is measured, where nothing else is said.
_WARM = 50_000


class _OverError(Exception):
    """The time for a step is over."""


@dataclass(frozen=True)
class Run:
    """What all steps of a report have in common; `hardware`: profiles to predict with, by what they are called."""

    device: torch.device
    toy: bool
    hardware: Mapping[str, str | Path]
    add: Callable[[Row], None]


def run_plan(
    run: Run,
    name: str,
    kv_offload: Sequence[bool] = (False,),
    compile_: bool = False,
    *,
    seconds: float = math.inf,
    warm: int = _WARM,
    streams: bool = False,
) -> None:
    """Add a row for each step of a plan, the one with fewest tokens first, with keys and values on the GPU or the host.

    A step that is not done after `seconds` ends there: its row says how much of it is done, and is predicted. One of at
    most `warm` tokens runs once before it is measured: kernels are prepared then, and memory is taken. With `streams`
    it runs once more, for a row of what the GPU's streams do. `compile_`: layers and loss are compiled.
    """
    plan, path = PLANS[name], FOLDER / name
    if run.toy:
        path = FOLDER / "toy"
        plan = GpuPlan("toy", PLANS["toy"].chunk_size, PLANS["toy"].lengths, plan.checkpointing, plan.lora_rank)
    load_plan(path)  # which is there, before tokens are written for it
    with tempfile.TemporaryDirectory() as folder:
        opened = open_plan(path, write_tokens(plan, Path(folder) / "analysis"))
        config = read_config(write_model(plan.model, Path(folder)))
        model = new_model(config, torch.bfloat16, 0, device=run.device)
        if plan.lora_rank:
            model = add_lora(model, rank=plan.lora_rank, alpha=16)
        weights = TrainedWeights(model.model, master_weights=True)
        if compile_:
            CompiledLayers(model)
        model.set_checkpointing(plan.checkpointing)
        chunk = min(_WARM_CHUNK, plan.chunk_size)
        time_probe(model, Probe((chunk,), 3 * chunk))
        stream = PlanStream(*opened, vocab_size=model.vocab_size, max_positions=None, prefetch=0)
        for work in sorted(stream, key=lambda work: work.step.num_tokens):
            for offload in kv_offload:
                row = _describe(name, plan, work, offload) | ({"compile": True} if compile_ else {})
                segments = [
                    (each.start, each.end) for chunk in work.ranks[0].chunks.values() for each in chunk.segments
                ]
                row["work"] = work_of(model, segments, forwards=2 if plan.checkpointing == "full" else 1)
                row["head_size"] = config.hidden_size // config.num_attention_heads
                executor = RankExecutor(model, kv_offload=offload)
                gc.collect()
                if run.device.type == "cuda":
                    torch.cuda.empty_cache()
                found, done = _measure(executor, weights, work, seconds)
                if work.step.num_tokens <= warm:
                    row |= {"first s": found["seconds"], "first prepared s": found["prepared s"]}
                    found, done = _measure(executor, weights, work, seconds)
                row |= found
                for called, hardware in run.hardware.items():
                    cost = plan.cost(hardware, kv_offload=offload, compile=compile_, optimizer="sgd")
                    row[f"predicted s, {called}"] = round(predicted_seconds(cost, work, done), 3)
                if run.device.type == "cuda":
                    row["predicted GiB"] = round(predicted_bytes(cost, work) / 2**30, 2)
                run.add(row)
                if streams:
                    step = partial(_measure, executor, weights, work, seconds)
                    run.add({"streams of": name, "kv_offload": offload} | streams_at_work(run.device, step))


def _describe(name: str, plan: GpuPlan, work: StepWork, kv_offload: bool) -> Row:
    chunks = work.ranks[0].chunks.values()
    return {
        "plan": name,
        "ckpt": plan.checkpointing,
        "kv_offload": kv_offload,
        "step": work.step.step,
        "tokens": work.step.num_tokens,
        "longest": max(segment.end for chunk in chunks for segment in chunk.segments),
        "chunks": len(chunks),
    }


def _measure(
    executor: RankExecutor, weights: TrainedWeights, work: StepWork, most_seconds: float
) -> tuple[Row, list[Action]]:
    """Measure a step, and which of its actions were done."""
    device = executor.model.device
    is_gpu = device.type == "cuda"
    for tensor in weights.tensors.values():
        tensor.grad = None
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    actions, done = work.ranks[0].actions, []
    loss = None
    synchronize(device)
    started = time.perf_counter()
    prepared = 0.0  # seconds until the first action, in which host memory is taken

    @contextmanager
    def counted(action: Action) -> Iterator[None]:
        nonlocal prepared
        prepared = prepared or time.perf_counter() - started
        yield
        done.append(action)
        if most_seconds < math.inf:
            synchronize(device)
            if time.perf_counter() - started > most_seconds:
                raise _OverError

    with suppress(_OverError):
        loss = executor.run(work.ranks[0], work.step.num_target_tokens, counted).loss
    synchronize(device)
    seconds = time.perf_counter() - started
    row: Row = {"seconds": round(seconds, 4), "prepared s": round(prepared, 4)}
    if len(done) < len(actions):
        row["done"] = f"{len(done)} of {len(actions)} actions"
    else:
        row |= {"tok_s": round(work.step.num_tokens / seconds), "loss": round(float(loss or 0), 6)}
    if is_gpu:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return row, done


def predicted_seconds(cost: CostModel, work: StepWork, actions: Sequence[Action]) -> float:
    """What the cost model says that `actions` of a step take, one after another."""
    chunks = list(work.ranks[0].chunks.values())
    tokens = np.array([chunk.num_tokens for chunk in chunks])
    pairs = np.array([_pairs(cost, chunk) for chunk in chunks])
    kept = np.array([KEPT_ATTENTION.index(chunk.kept_attention) for chunk in chunks], np.int8)
    times = durations(tokens, pairs, cost.rates, (cost.shape.num_layers,), None, kept)[:, 0]
    place = {chunk.chunk_id: number for number, chunk in enumerate(chunks)}
    return sum(int(times[OPS.index(action.op), place[action.chunk_id]]) for action in actions) / 1e9


def _pairs(cost: CostModel, chunk: Chunk) -> float:
    starts, ends = np.array([(segment.start, segment.end) for segment in chunk.segments]).T
    return float(attention_pairs_of(ends - starts, starts, cost.shape.attention_patterns).sum())


def predicted_bytes(cost: CostModel, work: StepWork) -> int:
    """What the cost model says the step's tensors take at its fullest moment, without what is reserved.

    With K of 1: the chunk at work, and of the longest sequence that is split keys and values, with their gradients, and
    what its other chunks keep of attention.
    """
    chunks = list(work.ranks[0].chunks.values())
    size = max(chunk.num_tokens for chunk in chunks)
    split = [chunk for chunk in chunks if chunk.group_id is not None]
    kv, longest = max(((chunk.segments[0].end, chunk.group_id) for chunk in split), default=(0, None))
    attention = sum(chunk.num_tokens for chunk in split if (chunk.group_id, chunk.kept_attention) == (longest, "gpu"))
    held = ResidentTokens(activations=size, kv=kv, attention=attention, kv_gradients=kv)
    [memory] = stage_memory(cost, dp=1, layers=(cost.shape.num_layers,), held=[held], chunk_size=size)
    return memory.total - memory.reserved
