"""Loads what a run trains from its options: plans with their analysis, and a model on a device."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_held_out, load_plan
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import gibibytes
from chunkplan_runtime.attention.context import CurrentChunk
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.devices import device_name, find_device, is_profile_of, local_device_index
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.stages import WholeOnlyError, cut_stage, load_shard, rows_of, split_layers
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout
from chunkplan_runtime.models import trained
from chunkplan_runtime.models.checks import plan_stream
from chunkplan_runtime.models.compiled import CompiledLayers
from chunkplan_runtime.models.fused import Fused, fuse
from chunkplan_runtime.models.model import CausalLM, load_model, meta_model, meta_weight, new_model
from chunkplan_runtime.models.parts import ModelStage
from chunkplan_runtime.proof.prove import check_exact
from chunkplan_runtime.training.config import SHARED, TrainConfig

#: Tokens that a run compares with their hash before it begins: of billions it would be a wait of minutes.
HASHED_TOKENS = 200_000_000

#: Numbers of a weight that identify it.
_SAMPLES = 256

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


@dataclass(frozen=True)
class TrainingData:
    """A plan, the analysis of both plans, and the plan of held-out sequences where there is one.

    `router_loss`: what the load-balancing loss is over. `layout`: streams are of this process's work.
    """

    plan: Plan
    analysis: Analysis
    evaluation: Plan | None
    model_config: Any
    router_loss: str
    pin_memory: bool
    layout: RankLayout

    def stream(self, plan: Plan) -> PlanStream:
        """A stream of the steps of `plan`; UsageError: the model does not take a token, a length or the plan."""
        how: Any = {"layout": self.layout, "router_loss": self.router_loss}
        return plan_stream(self.model_config, plan, self.analysis, pin_memory=self.pin_memory, **how)

    def num_steps(self, config: TrainConfig) -> int:
        """The number of steps of the run."""
        steps = self.plan.steps()
        if config.max_epochs is not None:
            steps = steps.filter(pc.field("epoch") < config.max_epochs)
        num_steps: int = steps.num_rows
        return min(num_steps, config.max_steps or num_steps)

    def epochs_done(self, step: int) -> float:
        """The number of epochs done where `step` comes next, with the share that is done of one."""
        return float(step * self.plan.manifest["epochs"] / self.plan.manifest["totals"]["num_steps"])


def open_data(config: TrainConfig, model_config: Any, layout: RankLayout) -> TrainingData:
    """Open the plans that `config` names, for a model that is refused where its gradients are not exact.

    Raises UsageError: one is not there, or not for these processes or this model; DataError: one is damaged.
    """
    where = str(config.model or config.model_config)
    router_loss = check_exact(model_config, where, num_stages=layout.pp, router_loss=config.router_loss)
    open_here = partial(open_plan, dp=layout.dp, pp=layout.pp, option="--analysis")
    plan, analysis = open_here(config.plan, config.analysis)
    evaluation = next(iter(load_plans(config)[1:]), None)
    if evaluation is not None:
        if evaluation.manifest["analysis"]["content_hash"] != analysis.content_hash:
            raise UsageError(
                f"the evaluation plan {evaluation.path} is not of the same analysis as {config.plan}",
                hint="analyze both together, and build with --holdout",
            )
        evaluation, _ = open_here(evaluation.path, analysis.path)
        own: Any = {"like": plan} if config.eval_plan is None else {"then": "give that as --eval-plan"}
        if choose_layout(evaluation, layout.world_size, layout.process, **own) != layout:
            raise UsageError(
                f"the evaluation plan {evaluation.path} is for other virtual stages than {config.plan}",
                hint="build both plans with the same --schedule and --virtual-stages",
            )
    elif config.early_stopping or config.keep_best:
        raise UsageError(
            f"{'--early-stopping' if config.early_stopping else '--keep-best'} without a plan of held-out sequences",
            hint="build the plan with --holdout 0.01, or give --eval-plan",
        )
    return TrainingData(plan, analysis, evaluation, model_config, router_loss, config.device != "cpu", layout)


def load_plans(config: TrainConfig) -> list[Plan]:
    """The plan, and where there is one that of held-out sequences: given, or built with it."""
    plan = load_plan(config.plan)
    held_out = load_held_out(plan) if config.eval_plan is None else load_plan(config.eval_plan)
    return [plan] if held_out is None else [plan, held_out]


def compare_tokens(analysis: Analysis, job: Job) -> list[str]:
    """Compare all tokens with their hash, on the main process; of too many say who does that instead."""
    num_tokens, where = int(analysis.num_tokens.sum(dtype=np.int64)), shlex.quote(str(analysis.path))
    if num_tokens > HASHED_TOKENS:
        told = f"not compared with their hash: {num_tokens:,} are many; `chunkplan validate {where}` does it"
        return [f"tokens    {told}"]
    if job.is_main and analysis.tokens().content_hash() != analysis.manifest["content_hashes"]["tokens"]:
        raise DataError(
            "content-hash: the tokens are not those the manifest was written for",
            where=str(analysis.path),
            hint="files of tokens were changed: analyze again, and build the plan again",
        )
    return []


def choose_device(config: TrainConfig, *, alone: bool = True) -> TrainConfig:
    """`config` with device and precision as they will be; unless it is `alone`, each process has a GPU of its own."""
    name = config.device
    if not alone and name.startswith("cuda:"):
        raise UsageError(f"--device is {name}, for every process", hint="leave it out: each takes a GPU of its own")
    if not alone and name != "cpu" and torch.cuda.is_available():
        name = f"cuda:{local_device_index()}"
    device = str(find_device(name))
    return replace(config, device=device, precision=config.precision or ("fp32" if device == "cpu" else "bf16"))


class LoadedModel(NamedTuple):
    """A model as one of several processes has it.

    `own`: what is trained here, on the CPU where sharding brings it to the device weight by weight. `whole`: all of it;
    on several processes its weights have no numbers. `identity`: a hash that other weights do not have; None on one
    process alone. `note`: what to say of how it was loaded.
    """

    own: CausalLM
    whole: CausalLM
    identity: str | None = None
    note: str | None = None
    fused: Fused | None = None
    compiled: CompiledLayers | None = None


def build_model(config: TrainConfig, model_config: Any, plan: Plan, job: Job) -> LoadedModel:
    """Load or draw a model, after `choose_device`: of a saved one each of several processes reads what it has of it.

    Raises UsageError: it cannot be loaded, or an option is not one for it; DataError: weights are missing or misshapen.
    """
    is_alone = job.groups is None
    own, identity, note = _load_part(config, model_config, plan, job)
    kernels = config.fused_kernels or "none"
    fused = fuse(own.model, kernels, torch.device(config.device)) if kernels != "none" else None
    whole = own if is_alone else _meta_whole(own, model_config, _DTYPES[str(config.precision)], job)
    if config.lora_rank:
        adapters: Any = {name: getattr(config, f"lora_{name}") for name in ("rank", "alpha", "dropout", "targets")}
        own = trained.add_lora(own, **adapters, seed=config.seed, whole=None if is_alone else whole)
        whole = own if is_alone else trained.add_lora(whole, **adapters, seed=config.seed)
        note = "; ".join(filter(None, (note, trained.without_adapters(whole, config.lora_targets)))) or None
        if not is_alone:
            trained.take_adapters(own, whole)
    frozen = trained.frozen_names(whole.model, config.freeze or (), config.train_only or ())
    for model in (own, whole):
        trained.freeze_weights(model.model, frozen)
    compiled = CompiledLayers(own) if config.compile else None
    own.set_checkpointing(config.checkpointing or "none")
    return LoadedModel(own, whole, identity, note, fused, compiled)


def _load_part(config: TrainConfig, model_config: Any, plan: Plan, job: Job) -> tuple[CausalLM, str | None, str | None]:
    """Load a process's part of a model without adapters; also the identity of the whole, and a note."""
    device, dtype, layout, note = torch.device(config.device), _DTYPES[str(config.precision)], job.layout, None
    layers: list[range] = []
    if job.groups is not None:
        given = config.stage_layers or plan.config.stage_layers
        layers = split_layers(model_config.num_hidden_layers, layout.pp, given, layout.virtual_stages)
    kernels = _kernels(config, plan)
    if config.model is None:
        model = new_model(model_config, dtype, config.seed, kernels=kernels, runs_on=device)
    else:
        if job.groups is not None:
            held = torch.float32 if config.precision == "bf16" and not config.lora_rank else None  # master weights
            how: Any = {"kernels": kernels, "device": device, "held": held}
            try:
                return *load_shard(config.model, model_config, dtype, layers, layout, **how), None
            except WholeOnlyError as error:
                note = f"every process loads the whole model, not its part: {error}"
        quantized = trained.in_4bit(dtype, device) if config.load_in_4bit else {}
        model = load_model(config.model, model_config, dtype, kernels=kernels, runs_on=device, **quantized)
    if note is not None:
        note += f"; that takes {gibibytes(sum(each.nbytes for each in model.model.parameters()))} in each"
    identity = None if job.groups is None else fingerprint(model, model, Job())
    if layout.pp > 1:
        model = cut_stage(model, layers, layout)
    if layout.dp == 1:  # else sharding brings it there bit by bit
        model = replace(model, model=model.model.to(device))
    return model, identity, note


def _kernels(config: TrainConfig, plan: Plan) -> Kernels:
    """Attention kernels that are asked for; by their rates in the plan's profile, if it is of this device."""
    has_links = plan.config.pp > 1
    try:
        hardware = plan.cost.hardware
    except DataError:  # which the comparison with the plan's times tells
        return Kernels(config.attention, has_links=has_links)
    is_here = is_profile_of(hardware.name, device_name(torch.device(config.device)))
    return Kernels(config.attention, hardware.attention if is_here else (), has_links=has_links)


def _meta_whole(own: CausalLM, model_config: Any, dtype: torch.dtype, job: Job) -> CausalLM:
    """The whole of a model of which processes have their `own` part: no numbers, but what is saved beside weights."""
    model = meta_model(model_config, dtype)
    dtypes = {name: weight.dtype for name, weight in own.model.named_parameters()}
    for found in job.all_gather_object({name: each for name, each in dtypes.items() if each != dtype}):
        for name, other in found.items():
            weight = model.get_parameter(name)
            weight.data = meta_weight(weight.to(other)).data
    model.generation_config = own.model.generation_config
    if hasattr(own.model, "_weight_conversions"):
        model._weight_conversions = own.model._weight_conversions
    return replace(own, model=model, stages=(ModelStage(),), rows={}, current=CurrentChunk())


def check_layout(config: TrainConfig, layout: RankLayout) -> None:
    """Refuse options, given or of the plan, that are not for these processes."""
    if layout.pp == 1 and config.stage_layers is not None:
        raise UsageError("--stage-layers with one stage", hint="leave it out, or build the plan with --pp")
    if config.load_in_4bit and layout.world_size > 1:
        raise UsageError(
            f"weights in 4 bits (--load-in-4bit, or as planned) with {layout.world_size} processes",
            hint="they are for one process; give --no-load-in-4bit",
        )
    if config.sharding in SHARED[1:] and layout.dp == 1:
        raise UsageError(
            f"--sharding {config.sharding} with one process a stage, which shares nothing with others",
            hint="leave it out, or start more data-parallel processes",
        )


@torch.no_grad()
def fingerprint(own: CausalLM, whole: CausalLM, job: Job, *, only_frozen: bool = False) -> str | None:
    """Identify weights, whatever part of them each process has, by a hash of up to `_SAMPLES` numbers of each.

    `only_frozen`: of those that are not trained, and so in no checkpoint. None where there are no such weights.
    """
    named = whole.model.named_parameters()
    shapes = {name: tuple(value.shape) for name, value in named if not (only_frozen and value.requires_grad)}
    if not shapes:
        return None
    own_samples: list[tuple[str, int, bytes]] = []
    for name, weight in own.model.named_parameters():
        if name in shapes:
            every, begin = max(1, weight.numel() // _SAMPLES), 0
            if weight in own.rows:
                begin = rows_of(len(weight), job.layout).start * weight[:1].numel()
            first = -(-begin // every) * every
            numbers = own.rows.get(weight, weight.detach()).flatten()[first - begin :: every]
            own_samples.append((name, first, numbers.double().cpu().numpy().tobytes()))
    found: dict[str, dict[int, bytes]] = {name: {} for name in shapes}
    for samples in job.all_gather_object(own_samples):
        for name, first, sampled in samples:
            found[name][first] = sampled
    digest = hashlib.sha256()
    for name, shape in shapes.items():
        digest.update(f"{name} {shape}".encode())
        for _, sampled in sorted(found[name].items()):
            digest.update(sampled)
    return digest.hexdigest()
