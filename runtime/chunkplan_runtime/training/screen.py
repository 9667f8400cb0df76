"""The screen of a run on stderr: its facts and comparison, a line a step, and on a terminal a progress bar."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers.utils.hub import cached_file

from chunkplan.cost.model import NUM_BYTES, SHARDINGS, CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.optimizers import moment_bytes
from chunkplan.errors import DataError, UsageError, one_line
from chunkplan.options import options_of
from chunkplan.planfile.manifest import unread_words
from chunkplan.quantities import ZERO, Pace, counted, left_words, trained_words
from chunkplan_runtime.attention.flash import broken_packages
from chunkplan_runtime.attention.kernels import AUTO
from chunkplan_runtime.devices import device_name, is_profile_of, shipped_profile
from chunkplan_runtime.distributed.job import Groups, Job
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.models.trained import num_weights
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.metrics import Row
from chunkplan_runtime.training.setup import LoadedModel, TrainingData

#: Of a line that is not shown on a terminal.
_COLUMNS = 120

#: Where `chunkplan calibrate` writes the profile of the device at hand.
_PROFILE = "here.toml"

#: What the plan's times are for, and what the run has; options of `chunkplan build` that end it, "": none does.
_Difference = tuple[str, str, str]


class Comparison(NamedTuple):
    """A plan compared with a run: whether `times` hold for it, FLOP/s of a device or None, and `lines` that say so."""

    times: bool
    peak_flops: float | None
    lines: list[str]


def compare(config: TrainConfig, data: TrainingData, job: Job) -> Comparison:
    """Compare what the plan's times are for with a run of `config`, as it was resolved; all of `job` have to call it.

    For MFU only the device has to be the profile's. Where keys, values and weights lie does not matter to times.
    """
    devices = sorted(set(job.all_gather_object(device_name(torch.device(config.device)))))
    try:
        cost = CostModel.from_dict(data.plan.manifest["predictions"]["cost_model"], where=str(data.plan.path))
    except DataError as error:
        said = f"predicts  no times and no MFU: the plan does not say what its times are for: {error.message}"
        return Comparison(False, None, [said])
    profile = cost.hardware.name
    peak_flops = cost.hardware.peak_flops if all(is_profile_of(profile, name) for name in devices) else None
    lines: list[str] = []
    device: list[_Difference] = []
    if peak_flops:
        tera = peak_flops / 1e12
        shown = f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"
        lines.append(f"profile   {profile}, {shown} TFLOP/s: MFU is a share of this")
    else:
        build = f"--hardware {shipped_profile(devices[0]) or _PROFILE}" if len(devices) == 1 else ""
        device.append((profile, " and ".join(devices), build))
    optimizer: Any = config.optimizer
    shared = str(config.sharding)
    if data.plan.config.dp > 1 and SHARDINGS.index(shared) < SHARDINGS.index(cost.sharding):
        less = {"optimizer": "optimizer states alone", "gradients": "gradients, and not weights"}[shared]
        less += f" ({ZERO[shared]}): the plan's memory is that of shared {cost.sharding} ({ZERO[cost.sharding]})"
        lines.append(f"shares    {less}; it may not fit")
    of_run, of_plan = (moment_bytes(name, cost.shape.hidden_size) for name in (optimizer, cost.optimizer))
    if of_run > of_plan:
        lines.append(f"optimizer {optimizer}: the plan's memory is that of {cost.optimizer}; it may not fit")
    if differences := _differences(cost, config, data, device):
        planned, here, options = (list(each) for each in zip(*differences, strict=True))
        told = f"the plan's times are for {', '.join(planned)}; this run has {', '.join(here)}"
        lines.append(f"predicts  no times{'' if peak_flops else ' and no MFU'}: {told}")
        lines += _what_helps(options, config) if all(options) else []
    return Comparison(not differences, peak_flops, lines)


def _differences(
    cost: CostModel, config: TrainConfig, data: TrainingData, device: list[_Difference]
) -> list[_Difference]:
    """Differences of the model, of the `device`, of how layers compute and of what is trained."""
    model_config, planned = data.model_config, cost.shape
    found: list[_Difference] = []
    try:
        shape = shape_of_config(model_config.to_dict(), "")
    except (UsageError, DataError):
        found.append((planned.name, f"a model of type {model_config.model_type}, whose times are not known", ""))
    else:
        if replace(shape, name=planned.name, max_positions=planned.max_positions) != planned:
            here = shape.name if shape.name != planned.name else f"{shape.name} of other sizes"
            found.append((planned.name, here, f"--model {shlex.quote(_config_file(config))}"))
    found += device
    precision = "bf16" if config.precision == "bf16-pure" else str(config.precision)
    if precision != cost.precision:
        found.append((cost.precision, precision, f"--precision {precision}" if precision in NUM_BYTES else ""))
    layers = data.plan.config.layers(model_config.num_hidden_layers)
    for flag, of_plan, of_run in (
        ("--checkpointing {}", cost.checkpointing, config.checkpointing),
        ("--fused-kernels {}", cost.fused_kernels, config.fused_kernels),
        ("--{}", *("compile" if each else "no-compile" for each in (cost.compile, config.compile))),
        ("--stage-layers {}", *(",".join(map(str, each)) for each in (layers, config.stage_layers or layers))),
    ):
        if of_run != of_plan:
            found.append((flag.format(of_plan), flag.format(of_run), flag.format(of_run)))
    trained, here = trained_words(cost.lora_rank, cost.load_in_4bit), "some weights frozen"
    options = ""
    if not config.freeze and not config.train_only:
        here = trained_words(config.lora_rank or 0, bool(config.load_in_4bit))
        options = f"--lora-rank {config.lora_rank}" + (" --load-in-4bit" if config.load_in_4bit else "")
        default = options_of(TrainConfig)["lora_targets"].default
        if config.lora_rank and config.lora_targets != default:
            trained += f" of {','.join(default)}" if cost.lora_rank else ""
            here, options = f"{here} of {','.join(config.lora_targets)}", ""
    return [*found, (trained, here, options)] if trained != here else found


def _what_helps(options: list[str], config: TrainConfig) -> list[str]:
    """The commands that remove the differences: a calibration first, where `build` takes its profile."""
    build = f"`chunkplan build` with `{' '.join(options)}`"
    if not any(_PROFILE in each for each in options):
        return [f"          to have them: {build}"]
    words = ["chunkplan", "calibrate", "--model", _config_file(config), "--output", _PROFILE]
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


def describe_run(
    config: TrainConfig,
    data: TrainingData,
    built: LoadedModel,
    num_steps: int,
    tokenizer: list[Path],
    comparison: Comparison,
    job: Job,
) -> list[str]:
    """The lines before the first step: each a name and what there is to say about it; all of `job` have to ask."""
    model, plan = built.whole, data.plan
    parameters = list(model.model.parameters())
    num_all = sum(map(num_weights, parameters))
    num_trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
    unread = unread_words(data.analysis.manifest.get("sources", ()))
    evaluation = None if data.evaluation is None else data.evaluation.path
    if evaluation is not None and evaluation.is_relative_to(Path.cwd()):  # a full path where it was found by the plan
        evaluation = evaluation.relative_to(Path.cwd())
    layout, device = data.layout, config.device
    if layout.world_size > 1:
        parts = [f"{layout.dp} data parallel"] if layout.dp > 1 else []
        virtual = f" of {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
        parts += [f"{layout.pp} pipeline stages{virtual}"] if layout.pp > 1 else []
        device = f"{layout.world_size} processes ({' x '.join(parts)}), each on {config.device.partition(':')[0]},"
    on_gpu = torch.device(config.device).type == "cuda"
    kernels, *others = job.all_gather_object(
        ", ".join(f"{name} ({kind})" for kind, name in model.attention_kernels(torch.device(config.device)).items())
    )  # each process chooses for itself, and all wait for the slowest
    left_out = broken_packages() | model.kernels.left_out if config.attention == AUTO and on_gpu else {}
    scopes = {"sequence": "each sequence", "batch": "the whole batch: each chunk runs forward once more"}
    routers = scopes.get(router_loss_scope(model.config, config.router_loss, ""))
    logs = shlex.quote(str(os.getenv("TENSORBOARD_LOGGING_DIR") or config.output / "runs"))  # as transformers has it
    return [
        f"model     {config.model or config.model_config}: {num_all:,} weights, {num_trained:,} trained",
        *([f"          {built.note}"] if built.note else ()),
        f"runs on   {device} in {config.precision}, attention {kernels}",
        *([f"fused     by {config.fused_kernels}: {built.fused}"] if built.fused else ()),
        *([f"compiled  {built.compiled}"] if built.compiled else ()),
        *(f"          without {name}: {reason}" for name, reason in left_out.items()),
        f"plan      {plan.path} ({plan.content_hash[:12]}): {num_steps:,} of {plan.manifest['totals']['num_steps']:,} "
        f"steps, ChunkSize {plan.config.chunk_size:,}, K {plan.config.k}",
        *([f"not read  of the data: {unread}"] if unread else ()),
        *comparison.lines,
        f"learns    {_learning_words(config, num_steps)}",
        *([f"routers   load-balancing loss over {routers}"] if routers else ()),
        *group_lines(job.groups),
        f"evaluates {evaluation or 'nothing (build with --holdout 0.01)'}",
        f"tokenizer {tokenizer[0].parent if tokenizer else 'none goes with the weights: the model has none'}",
        f"output    {config.output}",
        *([f"tracked   tensorboard --logdir {logs}"] if "tensorboard" in (config.report_to or ()) else ()),
        *(
            f"attends   otherwise on {layout.describe(process)}: {other}"
            for process, other in enumerate(others, 1)
            if other != kernels
        ),
    ]


def _learning_words(config: TrainConfig, num_steps: int) -> str:
    """The optimizer and its learning rate over the run, in one line."""
    rate, warmup = config.highest_lr, config.num_warmup(num_steps)
    words = [f"by {config.loss}"] if config.loss not in (None, "sft") else []
    words += [f"{config.optimizer}, learning rate {rate:g}"]
    words += [f"after {counted(warmup, 'step')} of warm-up"] if warmup else []
    words += [config.lr_schedule + ("" if config.lr_schedule == "constant" else f" to {rate * config.min_lr:g}")]
    words += [f"weight decay {config.weight_decay:g}"]
    words += [f"gradients clipped at {config.max_grad_norm:g}"] if config.max_grad_norm else []
    return ", ".join(words)


def group_lines(groups: Groups | None) -> list[str]:
    """Lines on the process groups of this process, and the time making them took; none for one process."""
    if groups is None:
        return []
    sharing = len(groups.exchanges.groups)
    those = f", {sharing} of them for shared sequences" if sharing else ""
    return [f"groups    {groups.num_groups} of processes{those}; made in {groups.seconds:.2f} s"]


class Screen:
    """Prints lines; within a `with` block on a terminal above a progress bar."""

    def __init__(self, start: int, num_steps: int, *, silent: bool = False) -> None:
        """Step `start` of `num_steps` comes next. `silent`: another process prints."""
        self._start, self._num_steps, self._silent = start, num_steps, silent
        self._bar: Any = None
        self._pace = Pace()

    def __enter__(self) -> Screen:
        if sys.stderr.isatty() and not self._silent:
            columns, rows = shutil.get_terminal_size()
            how: Any = {"initial": self._start, "total": self._num_steps, "mininterval": 0, "desc": "loss -"}
            how |= {"file": sys.stderr, "ncols": columns, "nrows": rows}
            self._bar = tqdm(bar_format="{n:,} of {total:,} steps {bar:10} {desc}", **how)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, line: str) -> None:
        """Print a line, which a terminal has in several where it is long and no command; controls are made visible."""
        if not self._silent:
            is_whole = "`" in line or not sys.stderr.isatty()
            columns = 1_000_000 if is_whole else shutil.get_terminal_size().columns
            how: Any = {"subsequent_indent": 10 * " ", "break_on_hyphens": False, "break_long_words": False}
            tqdm.write("\n".join(wrap(one_line(line), max(columns, 40), **how)), file=sys.stderr)
            sys.stderr.flush()

    def show_step(self, row: Row) -> None:
        """Print the line of a step, with its number from 0 and how many are done ("step 4 (5/5)"); move the bar."""
        step = row["step"]
        parts = [
            f"step {step} ({step + 1}/{self._num_steps})  loss {row['loss']:.4f}  grad {row['grad_norm']:.3g}",
            f"{row['tokens_per_second']:,.0f} tok/s",
            f"{row['peak_memory_bytes'] / 2**30:.1f} GiB",
            f"{row['seconds']:.2f} s",
        ]
        parts += [f"plan {row['predicted_seconds']:.2f} s"] if row["predicted_seconds"] is not None else []
        parts += [f"MFU {row['mfu']:.1%}"] if row["mfu"] is not None else []
        columns = shutil.get_terminal_size().columns if self._bar is not None else _COLUMNS
        while len("  ".join(parts)) > columns and len(parts) > 1:
            parts.pop()  # metrics.jsonl has it all
        self.say("  ".join(parts))
        if self._bar is not None:
            rate = self._pace.rate(step + 1 - self._start, self._num_steps - self._start, time.monotonic())
            left = "" if rate is None else f"  {left_words((self._num_steps - step - 1) / rate)}"
            loss, speed = f"loss {row['loss']:.4f}", f"{row['tokens_per_second']:,.0f} tokens/s"
            self._bar.set_description_str(f"{loss}  {speed}{left}", refresh=False)
            self._bar.update(step + 1 - self._bar.n)
