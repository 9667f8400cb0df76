"""What a run is, said in a few lines before its first step."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import torch

from chunkplan.planfile.plan import Plan
from chunkplan.planfile.unread_keys import unread_words
from chunkplan_runtime.attention.flash_attn import why_not_2, why_not_4
from chunkplan_runtime.attention.kernels import AUTO
from chunkplan_runtime.distributed.job import Groups, Job
from chunkplan_runtime.domains import NO_ROUTER_LOSS
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.frozen import num_weights
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.training.comparison import Comparison
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.data import TrainingData
from chunkplan_runtime.training.model_setup import Built


def describe_run(
    config: TrainConfig,
    data: TrainingData,
    built: Built,
    num_steps: int,
    tokenizer: list[Path],
    comparison: Comparison,
    groups: Groups | None = None,
) -> list[str]:
    """Lines of a name and what there is to say about it."""
    model = built.whole
    parameters = list(model.model.parameters())
    num_all = sum(map(num_weights, parameters))
    num_trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
    plan, unread = data.plan, unread_words(data.analysis.manifest.get("sources", ()))
    return [
        f"model     {config.model or config.model_config}: {num_all:,} weights, {num_trained:,} trained",
        *([f"          {built.note}"] if built.note else ()),
        f"runs on   {_devices(config, data.layout)} in {config.precision}, attention {_kernels(config, model)}",
        *([f"fused     by {config.fused_kernels}: {built.fused}"] if built.fused else ()),
        *([f"compiled  {built.compiled}"] if built.compiled else ()),
        *_left_out(config, model),
        f"plan      {plan.path} ({plan.content_hash[:12]}): {num_steps:,} of {plan.manifest['totals']['num_steps']:,} "
        f"steps, ChunkSize {plan.config.chunk_size:,}, K {plan.config.k}",
        *([f"not read  of the data: {unread}"] if unread else ()),
        *comparison.lines,
        *router_lines(config, model),
        *group_lines(groups),
        f"evaluates {_evaluation(data.evaluation)}",
        f"tokenizer {tokenizer[0].parent if tokenizer else 'none goes with the weights: the model has none'}",
        f"output    {config.output}",
        *tracker_lines(config),
    ]


def _left_out(config: TrainConfig, model: CausalLM) -> list[str]:
    """Say why kernels of attention are left out that one would expect: packages that are here, and those tried."""
    if config.attention != AUTO or torch.device(config.device).type != "cuda":
        return []
    packages = {"flash-attn-4": why_not_4(), "flash-attn-2": why_not_2()}
    found = packages | model.kernels.left_out
    return [f"          without {name}: {reason}" for name, reason in found.items() if reason]


def _kernels(config: TrainConfig, model: CausalLM) -> str:
    return ", ".join(f"{name} ({kind})" for kind, name in model.attention_kernels(torch.device(config.device)).items())


def other_kernels(config: TrainConfig, model: CausalLM, job: Job) -> list[str]:
    """Say which processes attend by other kernels than the first: each chooses for itself, all wait for the slowest."""
    first, *others = job.all_gather_object(_kernels(config, model))
    of_others = [(job.layout.describe(process), other) for process, other in enumerate(others, 1) if other != first]
    return [f"attends   otherwise on {process}: {other}" for process, other in of_others]


def router_lines(config: TrainConfig, model: CausalLM) -> list[str]:
    """Say what the load-balancing loss of routers is over, and what it costs; nothing where there is none."""
    scope = router_loss_scope(model.config, config.router_loss, "")
    if scope == NO_ROUTER_LOSS:
        return []
    counted = "each sequence" if scope == "sequence" else "the whole batch: each chunk runs forward once more"
    return [f"routers   load-balancing loss over {counted}"]


def tracker_lines(config: TrainConfig) -> list[str]:
    """Say how to look at what tensorboard gets, which shows no address of its own; nothing without it."""
    if "tensorboard" not in (config.report_to or ()):
        return []
    logs = os.getenv("TENSORBOARD_LOGGING_DIR") or config.output / "runs"  # as transformers has it
    return [f"tracked   tensorboard --logdir {shlex.quote(str(logs))}"]


def group_lines(groups: Groups | None) -> list[str]:
    """Say how many groups of processes this one is in, and how long making them took; nothing of one process."""
    if groups is None:
        return []
    sharing = len(groups.exchanges.groups)
    those = f", {sharing} of them for shared sequences" if sharing else ""
    return [f"groups    {groups.num_groups} of processes{those}; made in {groups.seconds:.2f} s"]


def _evaluation(plan: Plan | None) -> str:
    """Its path is a full one where it was found beside the plan; the others are shown as they were given."""
    if plan is None:
        return "nothing: there is no plan of held-out sequences"
    return str(plan.path.relative_to(Path.cwd()) if plan.path.is_relative_to(Path.cwd()) else plan.path)


def _devices(config: TrainConfig, layout: RankLayout) -> str:
    if layout.world_size == 1:
        return config.device
    kind = config.device.partition(":")[0]
    replicas = f"{layout.dp} data parallel" if layout.dp > 1 else ""
    stages = f"{layout.pp} pipeline stages" if layout.pp > 1 else ""
    if layout.virtual_stages > 1:
        stages += f" of {layout.virtual_stages} virtual stages"
    return f"{layout.world_size} processes ({' x '.join(filter(None, (replicas, stages)))}), each on {kind},"
