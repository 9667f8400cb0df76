"""The training loop: one optimizer step per step of the plan, one line of metrics each."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from transformers.utils.logging import disable_progress_bar

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.planfile.folder import MANIFEST
from chunkplan_runtime.executor import Executor
from chunkplan_runtime.models import load_model, new_model, read_config, read_pretrained_config
from chunkplan_runtime.save import save_model
from chunkplan_runtime.stream import PlanStream, open_plan

METRICS = "metrics.jsonl"
FINAL = "final"


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

    `clip` is the largest gradient norm, 0 for none; `max_steps` None runs the whole plan.
    """

    plan: Path
    output: Path
    analysis: Path | None = None
    model_config: Path | None = None
    model: str | None = None
    dtype: str = "float32"
    max_steps: int | None = None
    seed: int = 0
    lr: float = 1e-4
    clip: float = 1.0


def train(config: TrainConfig) -> None:
    """Train and leave `metrics.jsonl` and the weights in `config.output`. Everything refusable is refused first.

    Raises:
        ChunkplanError: loss or gradients are not finite.
        UsageError: an option, a path, the model or the plan cannot be used.
        DataError: plan, analysis or model files are damaged or do not belong together.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    plan, analysis = open_plan(config.plan, config.analysis)
    final, metrics_path = config.output / FINAL, config.output / METRICS
    _check_output(config.output)
    if config.model is not None:
        model_config = read_pretrained_config(config.model)
    else:
        assert config.model_config is not None
        model_config = read_config(config.model_config)
    stream = PlanStream(
        plan,
        analysis,
        vocab_size=model_config.vocab_size,
        max_positions=model_config.max_position_embeddings,
    )
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.model is not None:
        model = load_model(config.model, model_config, dtype)
    else:
        model = new_model(model_config, dtype, config.seed)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr)
    executor = Executor(model)
    num_steps = min(plan.steps().num_rows, config.max_steps or sys.maxsize)
    with ExitStack() as files:
        metrics: TextIO | None = None
        for step, ranks in stream:
            if step.step == num_steps:
                break
            started = time.perf_counter()
            loss = sum(executor.run(work, stream.load, step.num_target_tokens) for work in ranks)
            norm = torch.nn.utils.clip_grad_norm_(model.model.parameters(), config.clip or math.inf).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise ChunkplanError(
                    f"loss {loss}, gradient norm {norm}: not finite",
                    where=f"step {step.step}",
                    hint="try a smaller --lr, --clip 1, or --dtype float32",
                )
            if step.num_target_tokens:  # without targets there is nothing to learn: no decay, no momentum either
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - started
            row = {
                "step": step.step,
                "loss": loss,
                "target_tokens": step.num_target_tokens,
                "grad_norm": norm,
                "tokens_per_second": step.num_tokens / seconds,
            }
            if metrics is None:  # only now, so that a run that cannot do its first step leaves nothing
                config.output.mkdir(parents=True, exist_ok=True)
                metrics = files.enter_context(metrics_path.open("w", encoding="utf-8"))
            metrics.write(json.dumps(row, allow_nan=False) + "\n")
            metrics.flush()
            _say(
                f"step {step.step} of {num_steps}  loss {loss:.4f}  targets {step.num_target_tokens:,}  "
                f"grad norm {norm:.4g}  {row['tokens_per_second']:,.0f} tokens/s  {seconds:.2f} s"
            )
    save_model(model, final)
    _say(f"weights: {final}")
    _say(f"metrics: {metrics_path}")


def _check_output(output: Path) -> None:
    """Refuse a folder that holds something already, or that cannot be made, before any work is done."""
    for earlier in (output / FINAL, output / METRICS):
        if earlier.exists():
            raise UsageError(f"{earlier} of an earlier run is there", hint="give another --output, or remove that run")
    if (output / MANIFEST).exists():
        raise UsageError(f"{output} is an analysis or a plan", hint="give another --output")
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"cannot write to {output}", hint="give another --output")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
