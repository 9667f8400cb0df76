"""What a run prints on stderr: what it is, a line a step, and on a terminal one progress bar below them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from chunkplan.planfile.unread_keys import unread_words
from chunkplan.quantities import Pace, left_words
from chunkplan.visible import one_line
from chunkplan_runtime.attention.flash import broken_packages
from chunkplan_runtime.attention.kernels import AUTO
from chunkplan_runtime.distributed.job import Groups, Job
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.models.trained import num_weights
from chunkplan_runtime.training.comparison import Comparison
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.metrics import Row
from chunkplan_runtime.training.setup import Built, TrainingData

#: Of a line that is not shown on a terminal.
_COLUMNS = 120


def describe_run(
    config: TrainConfig,
    data: TrainingData,
    built: Built,
    num_steps: int,
    tokenizer: list[Path],
    comparison: Comparison,
    groups: Groups | None = None,
) -> list[str]:
    """The lines before the first step: each a name and what there is to say about it."""
    model, plan = built.whole, data.plan
    parameters = list(model.model.parameters())
    num_all = sum(map(num_weights, parameters))
    num_trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
    unread = unread_words(data.analysis.manifest.get("sources", ()))
    evaluation = None if data.evaluation is None else data.evaluation.path
    if evaluation is not None and evaluation.is_relative_to(Path.cwd()):  # a full path where it was found by the plan
        evaluation = evaluation.relative_to(Path.cwd())
    scopes = {"sequence": "each sequence", "batch": "the whole batch: each chunk runs forward once more"}
    routers = scopes.get(router_loss_scope(model.config, config.router_loss, ""))
    logs = shlex.quote(str(os.getenv("TENSORBOARD_LOGGING_DIR") or config.output / "runs"))  # as transformers has it
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
        *([f"routers   load-balancing loss over {routers}"] if routers else ()),
        *group_lines(groups),
        f"evaluates {evaluation or 'nothing: there is no plan of held-out sequences'}",
        f"tokenizer {tokenizer[0].parent if tokenizer else 'none goes with the weights: the model has none'}",
        f"output    {config.output}",
        *([f"tracked   tensorboard --logdir {logs}"] if "tensorboard" in (config.report_to or ()) else ()),
    ]


def _left_out(config: TrainConfig, model: CausalLM) -> list[str]:
    """Say why kernels of attention are left out that one would expect: packages that are here, and those tried."""
    if config.attention != AUTO or torch.device(config.device).type != "cuda":
        return []
    found = broken_packages() | model.kernels.left_out
    return [f"          without {name}: {reason}" for name, reason in found.items()]


def _kernels(config: TrainConfig, model: CausalLM) -> str:
    return ", ".join(f"{name} ({kind})" for kind, name in model.attention_kernels(torch.device(config.device)).items())


def other_kernels(config: TrainConfig, model: CausalLM, job: Job) -> list[str]:
    """Say which processes attend by other kernels than the first: each chooses for itself, all wait for the slowest."""
    first, *others = job.all_gather_object(_kernels(config, model))
    of_others = [(job.layout.describe(process), other) for process, other in enumerate(others, 1) if other != first]
    return [f"attends   otherwise on {process}: {other}" for process, other in of_others]


def group_lines(groups: Groups | None) -> list[str]:
    """Say how many groups of processes this one is in, and how long making them took; nothing of one process."""
    if groups is None:
        return []
    sharing = len(groups.exchanges.groups)
    those = f", {sharing} of them for shared sequences" if sharing else ""
    return [f"groups    {groups.num_groups} of processes{those}; made in {groups.seconds:.2f} s"]


def _devices(config: TrainConfig, layout: RankLayout) -> str:
    if layout.world_size == 1:
        return config.device
    replicas = f"{layout.dp} data parallel" if layout.dp > 1 else ""
    stages = f"{layout.pp} pipeline stages" if layout.pp > 1 else ""
    if layout.virtual_stages > 1:
        stages += f" of {layout.virtual_stages} virtual stages"
    product = " x ".join(filter(None, (replicas, stages)))
    return f"{layout.world_size} processes ({product}), each on {config.device.partition(':')[0]},"


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
        """Print a line; control characters in names from elsewhere are made visible."""
        if not self._silent:
            tqdm.write(one_line(line), file=sys.stderr)
            sys.stderr.flush()

    def show_step(self, row: Row) -> None:
        """Print the line of a step from its metrics, and move the bar.

        It has the step's number in the plan, from 0, and how many steps are done now: "step 4 (5/5)" is the last of 5.
        """
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
