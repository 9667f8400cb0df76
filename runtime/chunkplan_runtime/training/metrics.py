"""Records of a run: its configuration, the metrics of steps and evaluations, and its largest step."""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from chunkplan.files.json_file import write_json
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.measured import Spent, StepTimeline, write_measured
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.version import __version__
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.execution.loss import SequenceLoss
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.checks import kv_shapes, share_of_tokens, windows
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.trained import num_weights
from chunkplan_runtime.training.config import TrainConfig

#: How many losses the median of spikes is of, and how few are too few for one.
_WINDOW, _FEWEST = 50, 5

#: Kinds of layers that attend to nothing.
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")

#: Actions of a process in the largest step that is kept: nobody could look at more.
_MOST_ACTIONS = 20_000


#: A line of metrics.jsonl or evals.jsonl: docs/training.md has the meaning of every entry.
Row = dict[str, Any]


def write_config(path: Path, config: TrainConfig, plan: Plan) -> None:
    """Write the options of a run as they were resolved, its plan's hash and the versions of packages."""
    document = {
        "plan": plan.content_hash,
        "chunkplan": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": as_entries(config),
    }
    write_json(path, document, indent=2)


def as_entries(config: TrainConfig) -> dict[str, object]:
    """The options by name, as JSON has them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def predicted_seconds(step: PlanStep, layout: RankLayout) -> float:
    """Seconds that the plan predicts for a step: of the slowest pipeline, whose ranks run one after another."""
    ends: dict[int, float] = {}
    for (dp_rank, _), end in step.schedule_us.items():
        ends[dp_rank] = max(ends.get(dp_rank, 0.0), end)
    return max(sum(ends.get(dp_rank, 0.0) for dp_rank in own) for own in layout.rows(max(ends) + 1)) / 1e6


def peak_memory(device: torch.device) -> int:
    """The peak in bytes: of tensors on a GPU since it was reset, or of the whole process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def source_losses(losses: Sequence[SequenceLoss], analysis: Analysis) -> dict[str, float]:
    """The mean loss of a target token, by path of the source, of sources that have some."""
    sources = analysis.manifest.get("sources") or []
    if not sources:
        return {}
    source = analysis.source[[loss.sequence_id for loss in losses]]
    sums = np.bincount(source, [loss.loss for loss in losses], len(sources))
    counts = np.bincount(source, [loss.num_target_tokens for loss in losses], len(sources))
    return {sources[i]["path"]: float(sums[i] / counts[i]) for i in np.flatnonzero(counts)}


def add_up(losses: Sequence[SequenceLoss]) -> list[SequenceLoss]:
    """One entry a sequence, ascending: processes that share one have each the loss of its own slices."""
    sums: dict[int, tuple[float, int]] = {}
    for each in sorted(losses, key=lambda loss: loss.sequence_id):
        loss, num_target_tokens = sums.get(each.sequence_id, (0.0, 0))
        sums[each.sequence_id] = loss + each.loss, num_target_tokens + each.num_target_tokens
    return [SequenceLoss(number, *total) for number, total in sums.items()]


def mean_of_steps(rows: Sequence[Mapping[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """The mean of each number over the steps that have it, which weigh `counts`, such as their sequences."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        pairs = [(row[name], count) for row, count in zip(rows, counts, strict=True) if name in row]
        found[name] = sum(value * count for value, count in pairs) / sum(count for _, count in pairs)
    return found


def describe_worst(losses: Sequence[SequenceLoss], analysis: Analysis, most: int = 3) -> list[str]:
    """The sequences whose loss is not finite, else those with the highest mean of a target token, in words."""
    means = [(loss.loss / max(loss.num_target_tokens, 1), loss.sequence_id) for loss in losses]
    broken = [each for each in means if not math.isfinite(each[0])]
    worst = broken or sorted(means, key=lambda each: each[0], reverse=True)
    words = [f"sequence {number} ({analysis.place(number)}), loss {mean:.4g}" for mean, number in worst[:most]]
    return words + ([f"and {len(broken) - most} more"] if len(broken) > most else [])


class SpikeWatch:
    """Knows the losses of the last steps; a loss above `factor` times their median is a spike, with 0 none is."""

    def __init__(self, factor: float, losses: Sequence[float] = ()) -> None:
        self._factor = factor
        self.losses = list(losses)

    def is_spike(self, loss: float) -> bool:
        """True if a step's loss is a spike beside those before; from then on it is one of them."""
        before = self.losses
        self.losses = [*before, loss][-_WINDOW:]
        return self._factor > 0 and len(before) >= _FEWEST and loss > self._factor * median(before)


class LargestStep:
    """Keeps this process's times of the largest step so far, the first one only while there is no other: it is slow."""

    def __init__(self) -> None:
        self._num_tokens = -1
        self._times: StepTimeline | None = None

    def look_at(self, step: PlanStep, times: StepTimeline) -> None:
        """Keep the times of a step that is done, if it is the largest so far."""
        most_actions = max(map(len, step.actions.values()), default=0)
        if step.num_tokens > self._num_tokens and most_actions <= _MOST_ACTIONS:
            self._num_tokens = step.num_tokens if self._times is not None else 0
            self._times = times

    def write(self, plan: Plan, path: Path, job: Job, *, planned: bool) -> bool:
        """Write what all processes measured of it, if anything; `planned`: the plan's times stand beside it."""
        timelines = [times for times in job.all_gather_object(self._times) if times is not None]
        if timelines and job.is_main:
            write_measured(path, plan, timelines, job.layout.dp, planned=planned)
        return bool(timelines)


def stage_rows(spent: Sequence[Spent], layout: RankLayout) -> list[Row]:
    """Times of work and waiting of each process in a step, in their order, each a row of JSON; in seconds.

    What is not busy of a stage until the last one of its pipeline is done is waiting, `bubble` its share, 0..1. It is
    idle from then on until the last pipeline is done, when gradients can be reduced.
    """
    last = max(own.end for own in spent)
    rows: list[Row] = []
    for process, own in enumerate(spent):
        at = replace(layout, process=process)
        span = max(spent[layout.process_of(stage, at.replica)].end for stage in range(layout.pp))
        rows.append(
            {
                "process": process,
                "stage": at.stage,
                "pipeline": at.replica,
                "busy_seconds": own.busy,
                "wait_seconds": span - own.busy,
                "bubble": (span - own.busy) / span if span else 0.0,
                "idle_seconds": last - span,
                "reduce_seconds": max(own.reduce - (last - own.end), 0.0),
            }
        )
    return rows


class FlopCounter:
    """Counts the model FLOPs of steps of one model, as in Chowdhery et al., arXiv 2204.02311, appendix B.

    Every weight of a matrix counts 6 for a token that meets it, or 4 if it is frozen; of experts its share, of
    embeddings a tied head alone. Adapters of a stack of experts are added to it, which so has gradients: they meet no
    token. Attention counts where the mask lets it see, recompute and what recurrent layers do with states nothing.
    """

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        self._widths, self._of_token = attention_widths(config), 0.0
        for path, module in model.model.named_modules():
            for own, weight in () if isinstance(module, nn.Embedding) else module.named_parameters(path, recurse=False):
                is_stacked = ".experts." in own and "base_layer" in own
                if weight.ndim >= 2 and not own.endswith("bias") and not (is_stacked and "lora_" in own):
                    flops = 6.0 if weight.requires_grad or is_stacked else 4.0
                    self._of_token += flops * num_weights(weight) * share_of_tokens(config, own, weight, module)

    def count(self, step: PlanStep) -> float:
        """The model FLOPs of the forward and backward of a step, on all ranks."""
        segments = [segment for chunks in step.chunks.values() for chunk in chunks for segment in chunk.segments]

        def twice_pairs(num_tokens: int, window: int | None) -> int:
            """Twice the pairs (query, key) of a sequence, where a query sees the `window` tokens that end with it."""
            seen = num_tokens if window is None else min(num_tokens, window)
            return seen * (2 * num_tokens - seen)

        pairs = sum(
            width * (twice_pairs(segment.end, window) - twice_pairs(segment.start, window)) / 2
            for window, width in self._widths.items()
            for segment in segments
        )
        return self._of_token * sum(segment.end - segment.start for segment in segments) + 6.0 * pairs


def attention_widths(config: Any) -> Counter[int | None]:
    """Width of keys and values of all query heads, by window, over the layers with attention."""
    of_layers = windows(config)
    kinds = getattr(config, "layer_types", None) or (None,) * len(of_layers)
    own = getattr(config, "per_layer_config", None) or (config,) * len(of_layers)
    widths: Counter[int | None] = Counter()
    for window, kind, layer in zip(of_layers, kinds, own, strict=True):
        if kind not in _WITHOUT_ATTENTION:
            (_, key_dim), (_, value_dim) = kv_shapes(layer)
            value_dim = getattr(layer, "v_head_dim", None) or value_dim
            widths[window] += (getattr(layer, "num_attention_heads", None) or 1) * (key_dim + value_dim)
    return widths
