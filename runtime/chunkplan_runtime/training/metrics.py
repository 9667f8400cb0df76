"""What a run writes down: its configuration, and JSON lines of steps, sequences and evaluations."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import transformers

from chunkplan.files.json_file import write_json
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.version import __version__
from chunkplan_runtime.execution.loss import SequenceLoss
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.profiling.timeline import ProcessRow
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.losses import source_losses
from chunkplan_runtime.training.run_folder import RunFolder, append_lines, cut_back, lines_before
from chunkplan_runtime.training.train_step import Gradients


class ComputedRow(TypedDict):
    """What a step computed; docs/training.md has the meaning of every entry."""

    step: int
    epoch: int
    loss: float
    target_tokens: int
    tokens: int
    grad_norm: float
    tokens_per_second: float
    seconds: float
    predicted_seconds: float | None
    source_losses: dict[str, float]
    router_loss: NotRequired[float]  # where there is one
    processes: NotRequired[list[ProcessRow]]  # of several


class StepRow(ComputedRow):
    """A line of metrics.jsonl."""

    lr: float
    mfu: float | None
    peak_memory_bytes: int
    wait_seconds: float
    spike: list[str]


class EvaluationRow(TypedDict):
    """A line of evals.jsonl."""

    step: int
    eval_loss: float | None
    target_tokens: int
    seconds: float
    source_losses: dict[str, float]


class RunLog:
    """Writes the files of a run into its folder, which is there when the first step is done."""

    def __init__(self, folder: RunFolder, config: TrainConfig, plan: Plan) -> None:
        self._folder = folder
        self._config = config
        self._plan = plan
        self._begun = False

    def cut_back(self, step: int) -> None:
        """Remove the lines of `step` and later from all files."""
        for lines in (self._folder.metrics, self._folder.sequences, self._folder.evaluations):
            cut_back(lines, step)

    def write_step(self, row: StepRow, sequences: Sequence[SequenceLoss]) -> None:
        """Write a step's metrics, and where it was asked for the loss of each of its sequences."""
        if self._config.log_sequences:
            append_lines(
                self._folder.sequences,
                (
                    {
                        "step": row["step"],
                        "sequence_id": loss.sequence_id,
                        "loss": loss.loss,
                        "target_tokens": loss.num_target_tokens,
                    }
                    for loss in sequences
                ),
            )
        append_lines(self._folder.metrics, [row])
        if not self._begun:  # after the metrics: these tell a run from any other folder with a config.json
            self._write_config()
        self._begun = True

    def write_evaluation(self, row: EvaluationRow) -> None:
        """Append the line of an evaluation."""
        append_lines(self._folder.evaluations, [row])

    def _write_config(self) -> None:
        config = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self._config).items()
        }
        document = {
            "plan": self._plan.content_hash,
            "chunkplan": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "config": config,
        }
        write_json(self._folder.config, document, indent=2)


def evaluations_before(path: Path, start: int) -> list[tuple[int, float | None]]:
    """The evaluations of a run that goes on with step `start`: how many steps were done, and the loss.

    Lines of later ones, which it will cut off, are left out.
    """
    rows: list[EvaluationRow] = lines_before(path, start)
    return [(row["step"] + 1, row["eval_loss"]) for row in rows]


def step_row(
    step: PlanStep, gradients: Gradients, analysis: Analysis, seconds: float, predicted: float | None
) -> ComputedRow:
    """What a step computed, which took `seconds`, and was `predicted` to take, where a plan does."""
    row: ComputedRow = {
        "step": step.step,
        "epoch": step.epoch,
        "loss": gradients.loss,
        "target_tokens": step.num_target_tokens,
        "tokens": step.num_tokens,
        "grad_norm": gradients.norm,
        "tokens_per_second": step.num_tokens / seconds,
        "seconds": seconds,
        "predicted_seconds": predicted,
        "source_losses": source_losses(gradients.sequences, analysis),
    }
    if gradients.router_loss is not None:
        row["router_loss"] = gradients.router_loss
    return row


def predicted_seconds(step: PlanStep, layout: RankLayout) -> float:
    """Seconds that the plan predicts for a step: of the pipeline that is done last.

    Those ranks of the plan that one pipeline serves run one after another.
    """
    ends: dict[int, float] = {}
    for (dp_rank, _), end in step.schedule_us.items():
        ends[dp_rank] = max(ends.get(dp_rank, 0.0), end)
    return max(sum(ends.get(dp_rank, 0.0) for dp_rank in own) for own in layout.rows(max(ends) + 1)) / 1e6


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of memory on a GPU; that of a process on a CPU cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The peak in bytes: of tensors on a GPU since `reset_peak_memory`, or of the whole process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
