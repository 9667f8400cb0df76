"""What tests of the load-balancing loss share: it written down for whole sequences, and steps of trainer processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.planfile.load import load_analysis
from chunkplan_runtime.distributed.job import Job, make_groups
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.feed.stream import PlanStream
from chunkplan_runtime.layout import choose_layout, used_blocks
from chunkplan_runtime.models.model import CausalLM, new_model, read_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.parity import run_whole
from chunkplan_runtime.proof.prove import (
    relative_errors,
    spread_weights,
    take_gradients,
    train_routers,
    vanishing_gradients,
)
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.train_step import TrainStep
from tests.support.distributed_cases import open_for_its_stages


def balance_by_sequence(model: CausalLM, sequences: Sequence[Tensor]) -> float:
    """DeepSeek-V3's sequence-wise loss, written down as in its equations 17 to 20, of whole sequences."""
    num_tokens, total = sum(map(len, sequences)), torch.zeros((), dtype=torch.float64)
    for tokens in sequences:
        logits = model.model(tokens[None].long(), use_cache=False, output_router_logits=True).router_logits
        top_k = model.model.num_experts_per_tok
        for of_layer in logits:
            affinity = torch.softmax(of_layer, -1)  # [T, experts]
            chosen = torch.zeros_like(affinity)
            for token, row in enumerate(affinity):
                chosen[token, row.topk(top_k).indices] = 1
            frequency = affinity.shape[1] / (top_k * len(tokens)) * chosen.sum(0)
            mean = affinity.sum(0) / len(tokens)
            total = total + (frequency * mean).sum() * len(tokens) / num_tokens
    total = total * model.model.router_aux_loss_coef
    torch.autograd.backward(total)
    return total.item()


#: By scope, the loss of whole sequences, which leaves its gradients in the model.
OF_WHOLE_SEQUENCES: dict[str, Callable[[CausalLM, Sequence[Tensor]], float]] = {
    "batch": train_routers,
    "sequence": balance_by_sequence,
}


def compare_router_loss(
    rank: int, *, plan: Path, config: Path, scope: str, sharding: str = "optimizer", checkpointing: bool = False
) -> tuple[float, float, float]:
    """Run a step as one of all processes of the trainer, twice.

    Returns the worst error of a gradient beside whole sequences on one process, and what was added to the loss beside
    what that is of whole sequences.
    """
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config, router_loss=True), torch.float64, seed=1)
    spread_weights(model.model)
    with evaluate_in_float64(model.model):
        work = next(opened.iter_steps(0))
        segments = [each for chunks in work.chunks.values() for chunk in chunks for each in chunk.segments]
        sequences = sorted(segment.sequence_id for segment in segments if segment.start == 0)
        tokens = load_analysis(analysis.path).tokens()
        run_whole(model, load_analysis(analysis.path), sequences)
        attention = model.config._attn_implementation
        model.model.set_attn_implementation("eager")
        added = OF_WHOLE_SEQUENCES[scope](model, [torch.from_numpy(tokens(each)[0].copy()) for each in sequences])
        model.model.set_attn_implementation(attention)
        reference = take_gradients(model)
        if checkpointing:
            model.set_checkpointing("keep-projections")
        step, stream = trainer_step(rank, plan, config, model, router_loss=scope, sharding=sharding)
        step_work = next(iter(stream))
        worst = 0.0
        for _ in range(2):
            found = step.compute_gradients(step_work)
            gradients = own_gradients(step)
            own = {name: reference[name] for name in gradients}
            errors = relative_errors(gradients, own, vanishing_gradients(own))
            worst = max(worst, float(np.max(list(errors.values()))))
            step.model.model.zero_grad()
            for weight in step.tensors()["weights"].values():
                weight.grad = None
    assert found.router_loss is not None
    return worst, found.router_loss, added


def gradients_with_noise(rank: int, *, plan: Path, config: Path, scope: str = "none") -> dict[str, np.ndarray]:
    """Those of a stage in the first step."""
    model = new_model(read_config(config, router_loss=True), torch.float64, seed=1)
    spread_weights(model.model)
    with evaluate_in_float64(model.model):
        step, stream = trainer_step(rank, plan, config, model, router_loss=scope)
        step.compute_gradients(next(iter(stream)))
        return {name: gradient.numpy() for name, gradient in own_gradients(step).items()}


def trainer_step(
    rank: int, plan: Path, config: Path, model: CausalLM, **options: object
) -> tuple[TrainStep, PlanStream]:
    opened, analysis = open_for_its_stages(plan)
    layout = choose_layout(opened, dist.get_world_size(), rank)
    groups = make_groups(layout, torch.device("cpu"), timedelta(seconds=60), used_blocks(opened))
    layers = split_layers(model.config.num_hidden_layers, layout.num_model_stages)
    unclipped = {"max_grad_norm": 0.0, "precision": "fp64", **options}
    given = TrainConfig(plan=plan, output=plan / "run", model_config=config, **unclipped)  # type: ignore[arg-type]
    step = TrainStep(cut_stage(model, layers, layout), given, 1, Job(layout, groups))
    stream = PlanStream(opened, analysis, vocab_size=model.vocab_size, max_positions=None, prefetch=0, layout=layout)
    return step, stream


def own_gradients(step: TrainStep) -> dict[str, Tensor]:
    found = {}
    for name, weight in step.tensors()["weights"].items():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found
