"""What a run is compared with: the plan's times, where they are of its model and devices, and the peak of these."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.utils.hub import cached_file

from chunkplan.cost.adapters import trained_words
from chunkplan.cost.fused import fused_words
from chunkplan.cost.model import NUM_BYTES, SHARDINGS, CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.optimizers import moment_bytes
from chunkplan.errors import DataError, UsageError
from chunkplan.options import options_of
from chunkplan.quantities import ZERO
from chunkplan_runtime.devices import device_name, is_profile_of, shipped_profile
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.setup import TrainingData

#: Where `chunkplan calibrate` writes the profile of the device at hand.
_PROFILE = "here.toml"


@dataclass(frozen=True)
class Comparison:
    """`times`: those of the plan are of this run. `peak_flops`: a second, of one of its devices; None: not known.

    `lines` report it, each a name and what there is to say: what is compared, or why not and what would help.
    """

    times: bool
    peak_flops: float | None
    lines: list[str]


class _Difference(NamedTuple):
    """What the plan's times are for, and what the run has; options of `chunkplan build` that end it, "": none does."""

    planned: str
    here: str
    options: str


def compare(config: TrainConfig, data: TrainingData, job: Job) -> Comparison:
    """Compare what the plan's times are for with a run of `config`, as it was resolved; all of `job` have to call it.

    Of a run that differs in the model, the device, the precision, activation checkpointing, fused kernels, the layers
    of its stages, or what of the weights is trained, times are others. MFU takes the FLOPs of the model that is
    trained, so only the device has to be the profile's. Where keys, values and weights lie (`kv_offload`, `sharding`)
    does not matter: fetching them hides behind other work, in the cost model too. The optimizer is in no times.
    """
    devices = sorted(set(job.all_gather_object(device_name(torch.device(config.device)))))
    try:
        cost = CostModel.from_dict(data.plan.manifest["predictions"]["cost_model"], where=str(data.plan.path))
    except DataError as error:
        said = f"predicts  no times and no MFU: the plan does not say what its times are for: {error.message}"
        return Comparison(False, None, [said])
    lines: list[str] = []
    profile = cost.hardware.name
    peak_flops = cost.hardware.peak_flops if all(is_profile_of(profile, name) for name in devices) else None
    differences = _of_model(cost, config, data)
    if peak_flops:
        tera = peak_flops / 1e12
        shown = f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"
        lines.append(f"profile   {profile}, {shown} TFLOP/s: MFU is a share of this")
    else:
        build = f"--hardware {shipped_profile(devices[0]) or _PROFILE}" if len(devices) == 1 else ""
        differences.append(_Difference(profile, " and ".join(devices), build))
    lines += _of_memory(cost, config, data)
    differences += _of_options(cost, config, data)
    if differences:
        planned, here, options = (list(each) for each in zip(*differences, strict=True))
        nothing = "no times" if peak_flops else "no times and no MFU"
        lines.append(
            f"predicts  {nothing}: the plan's times are for {', '.join(planned)}; this run has {', '.join(here)}"
        )
        lines += _what_helps(options, config) if all(options) else []
    return Comparison(not differences, peak_flops, lines)


def _of_memory(cost: CostModel, config: TrainConfig, data: TrainingData) -> list[str]:
    """Say that the plan counts on more being shared, or on an optimizer that remembers less, than here."""
    lines = []
    optimizer: Any = config.optimizer or "adamw"
    shared = config.sharding or "optimizer"
    if data.plan.config.dp > 1 and SHARDINGS.index(shared) < SHARDINGS.index(cost.sharding):
        here = {"optimizer": "optimizer states alone", "gradients": "gradients, and not weights"}[shared]
        planned = f"{cost.sharding} ({ZERO[cost.sharding]})"
        lines.append(
            f"shares    {here} ({ZERO[shared]}): the plan's memory is that of shared {planned}; it may not fit"
        )
    of_run, of_plan = (moment_bytes(name, cost.shape.hidden_size) for name in (optimizer, cost.optimizer))
    if of_run > of_plan:
        lines.append(f"optimizer {optimizer}: the plan's memory is that of {cost.optimizer}; it may not fit")
    return lines


def _of_model(cost: CostModel, config: TrainConfig, data: TrainingData) -> list[_Difference]:
    planned = cost.shape
    try:
        shape = shape_of_config(data.model_config.to_dict(), "")
    except (UsageError, DataError):
        kind = data.model_config.model_type
        return [_Difference(planned.name, f"a model of type {kind}, whose times are not known", "")]
    if replace(shape, name=planned.name, max_positions=planned.max_positions) == planned:
        return []
    here = shape.name if shape.name != planned.name else f"{shape.name} of other sizes"
    return [_Difference(planned.name, here, f"--model-config {shlex.quote(_config_file(config))}")]


def _of_options(cost: CostModel, config: TrainConfig, data: TrainingData) -> list[_Difference]:
    precision = "bf16" if config.precision == "bf16-pure" else str(config.precision)
    checkpointing, fused = config.checkpointing or "none", config.fused_kernels or "none"
    found = []
    if precision != cost.precision:
        build = f"--precision {precision}" if precision in NUM_BYTES else ""
        found.append(_Difference(cost.precision, precision, build))
    if checkpointing != cost.checkpointing:
        words = (("no" if each == "none" else each) for each in (cost.checkpointing, checkpointing))
        of_plan, of_run = (f"{each} activation checkpointing" for each in words)
        found.append(_Difference(of_plan, of_run, f"--checkpointing {checkpointing}"))
    if fused != cost.fused_kernels:
        of_plan, of_run = (" ".join(fused_words(each)) or "no fused kernels" for each in (cost.fused_kernels, fused))
        found.append(_Difference(of_plan, of_run, f"--fused-kernels {fused}"))
    if bool(config.compile) != cost.compile:
        of_plan, of_run = (
            "compiled layers" if each else "layers as they are" for each in (cost.compile, config.compile)
        )
        found.append(_Difference(of_plan, of_run, "--compile" if config.compile else "--no-compile"))
    planned = data.plan.config.layers(data.model_config.num_hidden_layers)
    if config.stage_layers not in (None, planned):
        before, now = (",".join(map(str, layers)) for layers in (planned, config.stage_layers or ()))
        found.append(_Difference(f"stages of {before} layers", "others by --stage-layers", f"--stage-layers {now}"))
    return found + _of_adapters(cost, config)


def _of_adapters(cost: CostModel, config: TrainConfig) -> list[_Difference]:
    planned = trained_words(cost.lora_rank, cost.load_in_4bit)
    if config.freeze or config.train_only:
        return [_Difference(planned, "some weights frozen", "")]
    here = trained_words(config.lora_rank or 0, bool(config.load_in_4bit))
    default = options_of(TrainConfig)["lora_targets"].default
    if config.lora_rank and config.lora_targets != default:
        of_plan, of_run = (f" of {','.join(names)}" for names in (default, config.lora_targets))
        return [_Difference(planned + (of_plan if cost.lora_rank else ""), here + of_run, "")]
    options = f"--lora-rank {config.lora_rank or 0}" + (" --load-in-4bit" if config.load_in_4bit else "")
    return [] if planned == here else [_Difference(planned, here, options)]


def _what_helps(options: list[str], config: TrainConfig) -> list[str]:
    """What to type so that there is no difference: a calibration first, where `build` takes its profile."""
    build = f"`chunkplan build` with `{' '.join(options)}`"
    if not any(_PROFILE in each for each in options):
        return [f"          to have them: {build}"]
    words = ["chunkplan", "calibrate", "--model-config", _config_file(config), "--output", _PROFILE]
    on_cpu = config.device == "cpu"
    if on_cpu and torch.cuda.is_available():
        words += ["--device", "cpu"]
    if str(config.precision) != ("fp32" if on_cpu else "bf16"):
        words += ["--precision", "bf16" if config.precision == "bf16-pure" else str(config.precision)]
    threads = os.environ.get("OMP_NUM_THREADS") if on_cpu else None
    calibration = (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join(words)
    return [f"          to have them: `{calibration}`, then", f"          {build}"]


def _config_file(config: TrainConfig) -> str:
    """The config.json of the model, or its folder; of one from the Hugging Face Hub as it was loaded."""
    found: Any = config.model_config or cached_file(str(config.model), "config.json", local_files_only=True)
    return str(found)
