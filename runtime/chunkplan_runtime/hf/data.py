"""The batches of `ChunkTrainer`: one for each step of a plan, and which plan it evaluates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.likeness import how_to_build_like
from chunkplan.planfile.load import load_held_out, load_plan
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.feed.stream import StepWork, open_plan
from chunkplan_runtime.layout import used_blocks
from chunkplan_runtime.models.checks import plan_stream

_logger = logging.getLogger(__name__)


class StepBatch(TypedDict, total=False):
    """A batch: a step of the plan, and what transformers counts tokens and FLOPs by, int64 [num_tokens]; or nothing."""

    work: StepWork
    input_ids: Tensor
    attention_mask: Tensor


class PlanData(IterableDataset[StepBatch]):
    """The epochs of a plan; a batch is a step.

    It starts with step `position()` of the plan. Before a step in the middle of an epoch come empty batches, one for
    each step that is done: when transformers resumes, it drops as many, whatever they hold.
    """

    def __init__(
        self, plan: Plan, analysis: Analysis, model: PreTrainedModel, position: Callable[[], int], *, pin_memory: bool
    ) -> None:
        self.batch_size: int = plan.config.global_batch
        counts = np.bincount(to_numpy(plan.steps().column("epoch").combine_chunks())).tolist()
        if len(set(counts)) != 1:
            raise DataError(
                f"epochs of {', '.join(map(str, counts))} steps", where=str(plan.path), hint="build the plan again"
            )
        self._num_steps: int = counts[0]
        in_steps = to_numpy(plan.steps().column("num_sequences").combine_chunks())
        #: How many sequences an epoch has.
        self.num_sequences = int(in_steps[: self._num_steps].sum())
        self._position = position
        self._stream = plan_stream(model.config, plan, analysis, pin_memory=pin_memory)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[StepBatch]:
        position = self._position()
        done = position % len(self)
        for _ in range(done):
            yield {}
        self._stream.load_state_dict({**self._stream.state_dict(), "step": position})
        for work in islice(self._stream, len(self) - done):
            # What transformers counts tokens and FLOPs by: as many elements as there are tokens, without their memory.
            tokens = torch.ones(1, dtype=torch.int64).expand(work.step.num_tokens)
            yield {"work": work, "input_ids": tokens, "attention_mask": tokens}


def loader(data: Any) -> DataLoader[Any]:
    """A loader that hands on the batches of `PlanData` as they are."""
    return DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)


def open_own(plan: str | Path, analysis: str | Path | None, output: Path) -> tuple[Plan, Analysis]:
    """Open a plan and its analysis for one process: where ranks share sequences, one like it, built at `output`."""
    opened, found = open_plan(plan, analysis)
    if not used_blocks(opened):
        return opened, found
    try:
        from chunkplan import build_like  # the planner, which executing a plan does not need

        build_like(opened.path, output, analysis=found.path, dp=1)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"ranks of the plan share sequences, and {error.name} is missing, to build one like it for this process",
            where=str(opened.path),
            hint=f"`{how_to_build_like(opened, 1, 1)}` builds it where chunkplan is installed with its planner",
        ) from error
    _logger.warning("ranks share sequences in %s: trained with %s, like it and for one process", opened.path, output)
    return open_plan(output, found.path)


def evaluation_plan(
    plan: Plan, analysis: Analysis, given: str | Path | None, output: Path
) -> tuple[Plan, Analysis] | None:
    """The evaluation plan and its analysis: the one given, or the one that was built with `plan`, if it was.

    `output`: see `open_own`.
    """
    if given is not None:
        same = load_plan(given).manifest["analysis"]["content_hash"] == analysis.content_hash
        return open_own(given, analysis.path if same else None, output)
    held_out = load_held_out(plan)
    return None if held_out is None else open_own(held_out.path, analysis.path, output)


def nothing_to_evaluate() -> UsageError:
    """The error of an evaluation without a plan for it."""
    return UsageError("there is no evaluation plan", hint="build the plan with --holdout, or give eval_plan=")
