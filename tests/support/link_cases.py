"""What processes do in tests of links: run schedules with a stand-in for the model that knows what it should get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.layers import STRAIGHT, StagePlacement
from chunkplan.planfile.plan import Action, Chunk, Segment
from chunkplan_runtime.attention.context import CurrentChunk
from chunkplan_runtime.distributed.job import make_groups
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.layout import RankLayout, Span

#: (op, chunk_id, virtual_stage)
Stage = Sequence[tuple[str, int, int]]


@dataclass(frozen=True)
class Pipeline:
    """Chunks of so many tokens, the group of each (None for standalone), and what each stage does with them.

    Of one layout all have as many virtual stages.
    """

    num_tokens: Sequence[int]
    groups: Sequence[int | None]
    stages: Sequence[Stage]


class _Head:
    """Stands for what makes logits: one, of the first number."""

    vocab_size, compiles = 1, False

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden[:, :1]


@dataclass
class StandIn:
    """A model stage that adds one to what it gets and checks it; gradients too say whose they are and from which one.

    `by_stage`: those of its process, by virtual stage.
    """

    stage: int
    num_stages: int
    hidden_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vocab_size: int = 1
    wrong: list[str] = field(default_factory=list)
    current: CurrentChunk = field(default_factory=CurrentChunk)
    by_stage: list[StandIn] = field(default_factory=list)
    head: _Head = field(default_factory=_Head)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def hidden_states(self, tensors: ChunkTensors, store: Any, inputs: Tensor | None, seed: int) -> Tensor:
        chunk_id, num_tokens = int(tensors.input_ids[0, 0]), len(tensors.labels)
        if inputs is None:
            assert self.is_first
            inputs = torch.full((num_tokens, self.hidden_size), float(chunk_id) * self.num_stages, requires_grad=True)
        self.expect(inputs, chunk_id, self.stage, num_tokens, "input")
        return _Stage.apply(inputs, partial(self.backward, chunk_id, num_tokens))

    def backward(self, chunk_id: int, num_tokens: int, gradient: Tensor) -> Tensor:
        if self.is_last:
            gradient = torch.full_like(gradient, float(chunk_id) * self.num_stages)
        self.expect(gradient, chunk_id, self.num_stages - 1 - self.stage, num_tokens, "gradient")
        return gradient + 1

    def expect(self, tensor: Tensor, chunk_id: int, hops: int, num_tokens: int, what: str) -> None:
        expected = torch.full((num_tokens, self.hidden_size), float(chunk_id * self.num_stages + hops))
        if not torch.equal(tensor.detach(), expected):
            self.wrong.append(f"stage {self.stage}: the {what} of chunk {chunk_id} is another one")


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, backward: Any) -> Tensor:
        ctx.backward_of = backward
        return inputs + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.backward_of(gradients[0]), None


def drive(
    rank: int, *, pipelines: Sequence[Pipeline], hidden_size: int, placement: StagePlacement = STRAIGHT
) -> tuple[list[str], list[str]]:
    """Run schedules one after another: what was wrong, and the threads of execution of each that left something."""
    layout = RankLayout(1, dist.get_world_size(), rank, placement)
    groups = make_groups(layout, torch.device("cpu"), timedelta(seconds=30))
    links = groups.links(hidden_size, torch.float32)
    wrong: list[str] = []
    parts = [StandIn(each, layout.num_model_stages, hidden_size, wrong=wrong) for each in layout.model_stages()]
    model: Any = parts[0]
    model.by_stage = [replace(each, current=model.current) for each in parts]
    executor = RankExecutor(model, links=links)
    left = []
    for step, pipeline in enumerate(pipelines):
        executor.run(_work(step, pipeline, layout.stage), 1, lambda action: nullcontext())
        if executor.inputs or executor.in_flight or not all(store.is_empty for store in executor.stores):
            left.append(f"pipeline {step}")
    return wrong, left


def _work(step: int, pipeline: Pipeline, stage: int) -> RankWork:
    chunks, tensors = {}, {}
    for chunk_id, num_tokens in enumerate(pipeline.num_tokens):
        group = pipeline.groups[chunk_id]
        members = [other for other, its in enumerate(pipeline.groups) if its == group and group is not None] or [
            chunk_id
        ]
        start = sum(pipeline.num_tokens[other] for other in members if other < chunk_id)
        length = sum(pipeline.num_tokens[other] for other in members)
        chunks[chunk_id] = Chunk(
            chunk_id, group, members.index(chunk_id), len(members), num_tokens, 0, start, True, 1.0,
            (Segment(members[0], start, start + num_tokens),),
        )  # fmt: skip
        tensors[chunk_id] = ChunkTensors(
            torch.full((1, num_tokens), chunk_id, dtype=torch.int32),
            torch.zeros(1, num_tokens, dtype=torch.int32),
            torch.full((num_tokens,), -100, dtype=torch.int32),
            (Span(members[0], start, start + num_tokens, length, 0, group),),
        )
    actions = [Action(*action) for action in pipeline.stages[stage]]
    return RankWork(step, 0, actions, chunks, tensors)


def random_chunks(chance: random.Random, most_units: int) -> tuple[list[int], list[int | None], list[bool]]:
    """Tokens, groups, and whether activations are kept, of chunks as a planner might make them."""
    num_tokens: list[int] = []
    groups: list[int | None] = []
    keeps: list[bool] = []
    for unit in range(chance.randint(1, most_units)):
        size = chance.choice([1, 1, 1, 2, 3, 6])
        kept = chance.randint(1, size)
        groups += [unit if size > 1 else None] * size
        keeps += [False] * (size - kept) + [True] * kept
        num_tokens += [chance.randint(1, 5) for _ in range(size)]
    return num_tokens, groups, keeps


def random_order(
    chance: random.Random, groups: Sequence[int | None], keeps: Sequence[bool], layout: RankLayout
) -> list[list[tuple[str, int, int]]]:
    """What each stage does in an execution where at every moment a model stage does anything it could do.

    Links take chunks in one order, for forwards and for backwards; parts of a group ascend and descend.
    """
    forwards, backwards = _shuffled(chance, groups), _shuffled(chance, groups)
    for group in {*groups} - {None}:
        places = [place for place, chunk_id in enumerate(backwards) if groups[chunk_id] == group]
        for place, chunk_id in zip(places, [backwards[place] for place in reversed(places)], strict=True):
            backwards[place] = chunk_id
    eager = chance.random()  # how likely a forward is where both could be
    stages: list[list[tuple[str, int, int]]] = [[] for _ in range(layout.pp)]
    num = layout.num_model_stages
    forwarded, backwarded = [0] * num, [0] * num
    while min(backwarded) < len(groups):
        model_stage = chance.randrange(num)
        stage = layout.stage_of(model_stage)
        virtual_stage = layout.model_stages(stage).index(model_stage)
        forward = forwarded[model_stage] < (len(groups) if model_stage == 0 else forwarded[model_stage - 1])
        backward = backwarded[model_stage] < (len(groups) if model_stage == num - 1 else backwarded[model_stage + 1])
        backward = backward and backwards[backwarded[model_stage]] in forwards[: forwarded[model_stage]]
        if forward and (not backward or chance.random() < eager):
            chunk_id = forwards[forwarded[model_stage]]
            stages[stage].append(("forward" if keeps[chunk_id] else "forward_kv", chunk_id, virtual_stage))
            forwarded[model_stage] += 1
        elif backward:
            chunk_id = backwards[backwarded[model_stage]]
            stages[stage] += [] if keeps[chunk_id] else [("recompute", chunk_id, virtual_stage)]
            stages[stage].append(("backward", chunk_id, virtual_stage))
            backwarded[model_stage] += 1
    return stages


def _shuffled(chance: random.Random, groups: Sequence[int | None]) -> list[int]:
    """All chunks, those of a group ascending."""
    order = list(range(len(groups)))
    chance.shuffle(order)
    for group in {*groups} - {None}:
        places = [place for place, chunk_id in enumerate(order) if groups[chunk_id] == group]
        for place, chunk_id in zip(places, sorted(order[place] for place in places), strict=True):
            order[place] = chunk_id
    return order
