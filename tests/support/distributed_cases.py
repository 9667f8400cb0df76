"""What processes do in tests of distributed training: run steps of a plan, and compare with whole sequences."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.cost.model import Sharding
from chunkplan.errors import UsageError
from chunkplan.layers import StagePlacement
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis, load_plan
from chunkplan.planfile.plan import Action, Plan
from chunkplan_runtime.distributed.job import (
    Groups,
    OwnGpu,
    check_gpus,
    gather_objects,
    gradient_norm,
    make_groups,
    tied_weight,
)
from chunkplan_runtime.distributed.sharding import Shards, _weights
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.execution.executor import Around, Collectives, RankExecutor, no_collectives
from chunkplan_runtime.feed.stream import PlanStream, RankWork, StepWork, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout, used_blocks
from chunkplan_runtime.models.model import CausalLM, new_model, read_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.products import SummedWeight
from chunkplan_runtime.models.trained import ALL_LINEAR, add_lora, freeze_weights, frozen_names
from chunkplan_runtime.parity import run_whole
from chunkplan_runtime.proof.prove import relative_errors, take_gradients, vanishing_gradients
from chunkplan_runtime.training.optimizer import TrainedWeights
from tests.support.kept_attention import keeping_attention
from tests.support.link_cases import random_order


@dataclass(frozen=True)
class Compared:
    """One process's share of a step beside the same step of one process running whole sequences."""

    error: float
    names: list[str]
    loss: float
    evaluated_loss: float | None
    reference_loss: float
    norm: float
    reference_norm: float
    chunks: list[int]


@dataclass(frozen=True)
class StageProcess:
    """What one process has of a model, and how it runs it."""

    model: CausalLM
    groups: Groups
    shards: Shards | None
    executor: RankExecutor
    stream: PlanStream
    sharding: Sharding = "optimizer"

    def work(self, step: int) -> StepWork:
        """That of a step, whichever came before."""
        self.stream.load_state_dict({**self.stream.state_dict(), "step": step})
        return next(iter(self.stream))

    def evaluate(self, work: StepWork) -> float:
        """The loss of all processes, without gradients."""
        if self.shards:
            self.shards.begin_forwards()
        meet = self._meeting(work, only_forwards=True)
        loss = sum(self.executor.evaluate(each, work.step.num_target_tokens, meet).loss for each in work.ranks)
        meet(None)
        assert all(store.is_empty for store in self.executor.stores)
        if self.shards:
            self.shards.end_forwards()
            self.shards.free()
        return _sum(loss)

    def run(self, work: StepWork) -> float:
        """The loss of all processes; gradients are left in the weights."""
        around: Around = lambda action: nullcontext()  # noqa: E731
        if self.shards:
            self.shards.begin_step()
            around = self.shards.around(around)
        meet = self._meeting(work)
        before = self.shards.reduce_in_backward if self.shards else None
        num_target_tokens = work.step.num_target_tokens
        loss = 0.0
        for each in work.ranks:
            before_last = before if each is work.last else None
            loss += self.executor.run(each, num_target_tokens, around, before_last, meet).loss
        meet(None)
        if self.shards:
            self.shards.reduce_gradients()
        return _sum(loss)

    def _meeting(self, work: StepWork, *, only_forwards: bool = False) -> Collectives:
        if self.shards is None:
            return no_collectives
        return self.shards.collectives_of(work, self.groups.layout, only_forwards=only_forwards)

    def finish_gradients(self, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Gradients of the stage, whole, and the norm of those of the model."""
        tied = tied_weight(self.model, self.groups)
        norm = gradient_norm(weights, tied, self.groups)
        return {name: _whole(value) for name, value in weights.items()}, norm.item()

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is trained of the stage."""
        return {name: value for name, value in self.model.model.named_parameters() if value.requires_grad}


def four_layers(model: dict[str, Any]) -> dict[str, Any]:
    """A model of two layers, twice."""
    twice = {name: value * 2 for name, value in model.items() if isinstance(value, list)}
    return {"num_hidden_layers": 4, **model, **twice}


def refuse_gpus(rank: int, *, gpus: Sequence[OwnGpu]) -> str | None:
    """What a process that takes `gpus[rank]` says of it and all others; None if nothing is wrong."""
    try:
        check_gpus(gather_objects(gpus[rank]))
    except UsageError as error:
        return str(error)
    return None


def mixed_levels(num_layers: int) -> str:
    """Runs of layers with several levels of activation checkpointing, the last of them none where there are three."""
    levels = ("keep-products", "full", "none")
    return ",".join(f"{level}:1" for level in levels[:num_layers]) + f",keep-attention:{num_layers - 3}" * (
        num_layers > 3
    )


def compare_steps(
    rank: int,
    *,
    plan: Path,
    config: Path,
    lora: bool = False,
    checkpointing: bool | str = False,
    kv_offload: bool = False,
    sharding: Sharding = "optimizer",
    stage_layers: tuple[int, ...] | None = None,
    steps: Sequence[int] = (0,),
    evaluates: bool = False,
    freeze: Sequence[str] = (),
    train_only: Sequence[str] = (),
    keep_attention: bool = False,
) -> list[Compared]:
    """Run steps of `plan` as one of all processes; with `evaluates` each after an evaluation of the same step.

    `checkpointing`: the level of all layers, or several. `keep_attention`: see `keeping_attention`.

    The reference is always plain training of all weights.
    """
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float64, seed=1)
    if lora:
        model = _adapted(model, dropout=0.0)
    compared = []
    with evaluate_in_float64(model.model):
        reference_losses, references = [], []
        for step in steps:
            reference_losses.append(_reference_loss(model, opened, analysis, step))
            references.append(take_gradients(model))
        frozen = frozen_names(model.model, freeze, train_only)
        references = [{name: each[name] for name in each if name not in frozen} for each in references]
        freeze_weights(model.model, frozen)
        if checkpointing:
            several = mixed_levels(model.config.num_hidden_layers)
            model.set_checkpointing(checkpointing if isinstance(checkpointing, str) else several)
        how = {"kv_offload": kv_offload, "sharding": sharding}
        stage = make_stage(rank, opened, analysis, model, stage_layers=stage_layers, **how)
        for step, reference_loss, reference in zip(steps, reference_losses, references, strict=True):
            work = stage.work(step)
            if keep_attention:
                work = replace(work, ranks=[keeping_attention(each) for each in work.ranks])
            evaluated = stage.evaluate(work) if evaluates else None
            assert all(weight.grad is None for weight in stage.weights.values())
            loss = stage.run(work)
            gradients, norm = stage.finish_gradients(stage.weights)
            own = {name: reference[name] for name in gradients}
            if work.step.num_target_tokens:
                errors = relative_errors(gradients, own, vanishing_gradients(own))
            else:
                errors = {name: gradient.norm().item() for name, gradient in gradients.items()}
            norms = [value.norm().item() for value in reference.values()]
            chunks = [len(each.chunks) for each in work.ranks]
            compared.append(
                Compared(
                    float(np.max([0.0, *errors.values()])),
                    sorted(gradients),
                    loss,
                    evaluated,
                    reference_loss,
                    norm,
                    math.hypot(*norms),
                    chunks,
                )
            )
            stage.model.model.zero_grad()
    return compared


def compare_orders(
    rank: int, *, plan: Path, config: Path, seeds: Sequence[int], placement: StagePlacement, kv_offload: bool = False
) -> list[float]:
    """By seed the worst error of a gradient of this stage, their norm or the loss, in a random order of chunks.

    `placement`: where the virtual stages lie, whatever the plan says.
    """
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float64, seed=1)
    layout = replace(choose_layout(opened, dist.get_world_size(), rank), placement=placement)
    errors = []
    with evaluate_in_float64(model.model):
        reference_loss = _reference_loss(model, opened, analysis, 0)
        reference = take_gradients(model)
        reference_norm = math.hypot(*(gradient.norm().item() for gradient in reference.values()))
        stage = make_stage(rank, opened, analysis, model, layout=layout, kv_offload=kv_offload)
        work = stage.work(0)
        for seed in seeds:
            ranks = [_in_random_order(each, random.Random(f"{seed} {each.dp_rank}"), layout) for each in work.ranks]
            ordered = replace(work, ranks=ranks)
            losses = stage.evaluate(ordered), stage.run(ordered)
            gradients, norm = stage.finish_gradients(stage.weights)
            own = {name: reference[name] for name in gradients}
            of_numbers = [abs(loss / reference_loss - 1) for loss in losses] + [abs(norm / reference_norm - 1)]
            errors.append(max(*of_numbers, *relative_errors(gradients, own, vanishing_gradients(own)).values()))
            stage.model.model.zero_grad()
    return errors


def _in_random_order(work: RankWork, chance: random.Random, layout: RankLayout) -> RankWork:
    """The same chunks, of each group some of which keep their activations: the last ones."""
    chunks = list(work.chunks.values())
    kept = {chunk.group_id: chance.randint(1, chunk.group_size) for chunk in chunks}
    keeps = [chunk.group_id is None or chunk.group_index >= chunk.group_size - kept[chunk.group_id] for chunk in chunks]
    order = random_order(chance, [chunk.group_id for chunk in chunks], keeps, layout)
    ordered = replace(work, actions=[Action(*action) for action in order[layout.stage]])
    return keeping_attention(ordered) if chance.random() < 0.5 else ordered


def compare_master_weights(
    rank: int,
    *,
    plan: Path,
    config: Path,
    alone: Path | None = None,
    targets: tuple[str, ...] = (),
    sharding: Sharding = "optimizer",
) -> tuple[float, int]:
    """The largest relative error of bfloat16's float32 gradients beside one process with all chunks of the plan.

    And of how many weights. With `targets`, of adapters on these. `alone`: a plan like it for the one process.
    """
    opened, analysis = open_for_its_stages(plan)

    def make_model() -> CausalLM:
        model = new_model(read_config(config), torch.bfloat16, seed=1)
        return _adapted(model, dropout=0.0, targets=targets) if targets else model

    SummedWeight.devices = frozenset({"cpu"})  # as on a GPU
    model = make_model()
    whole = TrainedWeights(model.model, master_weights=True)
    whole_plan = load_plan(alone) if alone else opened
    stream = PlanStream(whole_plan, analysis, vocab_size=model.vocab_size, max_positions=10**6)
    executor, work = RankExecutor(model), next(iter(stream))
    for each in work.ranks:
        actions = [action for action in each.actions if action.virtual_stage == 0]
        executor.run(replace(each, actions=actions), work.step.num_target_tokens)
    reference = {name: value.grad for name, value in whole.tensors.items()}
    stage = make_stage(rank, opened, analysis, make_model(), master_weights=True, sharding=sharding)
    weights = stage.weights if stage.shards else TrainedWeights(stage.model.model, master_weights=True).tensors
    stage.run(stage.work(0))
    if stage.shards and sharding == "optimizer":  # what processes sum before they reduce it is made in the sum
        gathered = [weight._unsharded_param for module in stage.shards._modules for weight in _weights(module)]
        assert all(
            isinstance(weight, SummedWeight) == (weight.ndim == 2) and weight.grad is None for weight in gathered
        )
    gradients, norm = stage.finish_gradients(weights)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    reference_norm = torch.nn.utils.get_total_norm(reference.values()).item()
    errors = relative_errors(gradients, {name: reference[name] for name in gradients}, [])
    return max([abs(norm / reference_norm - 1), *errors.values()]), len(gradients)


def gradients_with_dropout(
    rank: int, *, plan: Path, config: Path, checkpointing: bool = False
) -> dict[str, np.ndarray]:
    """Those of a stage in the first step."""
    opened, analysis = open_for_its_stages(plan)
    model = _adapted(new_model(read_config(config), torch.float64, seed=1), dropout=0.3)
    if checkpointing:
        model.set_checkpointing("full")
    with evaluate_in_float64(model.model):
        stage = make_stage(rank, opened, analysis, model)
        stage.run(stage.work(0))
        gradients, _ = stage.finish_gradients(stage.weights)
    return {name: gradient.numpy() for name, gradient in gradients.items()}


def open_for_its_stages(plan: Path) -> tuple[Plan, Analysis]:
    return open_plan(plan, pp=load_plan(plan).config.pp)


def make_stage(
    rank: int,
    plan: Plan,
    analysis: Analysis,
    model: CausalLM,
    *,
    kv_offload: bool = False,
    master_weights: bool = False,
    sharding: Sharding = "optimizer",
    stage_layers: tuple[int, ...] | None = None,
    layout: RankLayout | None = None,
) -> StageProcess:
    layout = layout or choose_layout(plan, dist.get_world_size(), rank)
    blocks = used_blocks(plan)
    groups = make_groups(layout, torch.device("cpu"), timedelta(seconds=60), blocks)
    layers = split_layers(model.config.num_hidden_layers, layout.pp, stage_layers, layout.virtual_stages)
    model = cut_stage(model, layers, layout)
    shards = None
    if groups.replicas:
        how = {"master_weights": master_weights, "sharding": sharding}
        shards = Shards(model, groups.replicas, **how)
    model = shards.model if shards else model
    links = groups.links(model.config.hidden_size, model.dtype)
    executor = RankExecutor(model, kv_offload=kv_offload, links=links, exchanges=groups.exchanges)
    stream = PlanStream(plan, analysis, vocab_size=model.vocab_size, max_positions=10**6, prefetch=0, layout=layout)
    return StageProcess(model, groups, shards, executor, stream, sharding)


def _sum(loss: float) -> float:
    losses = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(losses)
    return losses.item()


def _whole(weight: Tensor) -> Tensor:
    gradient = weight.grad
    if gradient is None:
        return torch.zeros_like(weight)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _reference_loss(model: CausalLM, plan: Plan, analysis: Analysis, step: int) -> float:
    """Of the step's sequences run whole; gradients are left in the model."""
    found = next(plan.iter_steps(step))
    if not found.num_target_tokens:
        return 0.0
    chunks = [chunk for chunks in found.chunks.values() for chunk in chunks]
    sequences = [segment.sequence_id for chunk in chunks for segment in chunk.segments if segment.start == 0]
    return run_whole(model, load_analysis(analysis.path), sorted([*sequences, *found.prefixes]))


def _adapted(model: CausalLM, dropout: float, targets: tuple[str, ...] = (ALL_LINEAR,)) -> CausalLM:
    """With adapters that are not zero, where half of their gradients would vanish."""
    model = add_lora(model, rank=2, alpha=4.0, dropout=dropout, targets=targets)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model
