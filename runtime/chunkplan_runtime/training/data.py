"""What a run trains on and evaluates on: plans, their analysis, and streams of them for one model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.likeness import how_to_build_like
from chunkplan.planfile.load import load_held_out, load_plan
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout, refuse_other_replicas
from chunkplan_runtime.models.checks import max_positions
from chunkplan_runtime.sharing import Block, used_blocks
from chunkplan_runtime.training.config import TrainConfig

#: Tokens that a run compares with their hash before it begins. A core hashes some 150 to 350 million in a second, and
#: 0.8 GB are read for these; of billions it would be a wait of minutes where disks are slow.
HASHED_TOKENS = 200_000_000


@dataclass(frozen=True)
class TrainingData:
    """A plan, the analysis of both plans, and the plan of held-out sequences where there is one.

    `pin_memory`: tensors are on their way to a GPU. `layout`: streams are of this process's work.
    """

    plan: Plan
    analysis: Analysis
    evaluation: Plan | None
    model_config: Any
    pin_memory: bool
    layout: RankLayout

    def stream(self, plan: Plan) -> PlanStream:
        """A stream of the steps of `plan`, for the model of the run.

        Raises:
            UsageError: the data has no tokens, or a token or a length that the model does not take.
        """
        return PlanStream(
            plan,
            self.analysis,
            vocab_size=self.model_config.vocab_size,
            max_positions=max_positions(self.model_config),
            pin_memory=self.pin_memory,
            layout=self.layout,
        )

    def num_steps(self, config: TrainConfig) -> int:
        """How many steps of the plan the run has."""
        steps = self.plan.steps()
        within: int = steps.num_rows
        if config.max_epochs is not None:
            within = steps.filter(pc.field("epoch") < config.max_epochs).num_rows
        return min(within, config.max_steps or within)

    def epochs_done(self, step: int) -> float:
        """How many epochs of the plan are done where `step` comes next, with the share that is done of one."""
        epochs: float = step * self.plan.manifest["epochs"] / self.plan.manifest["totals"]["num_steps"]
        return epochs


def open_data(config: TrainConfig, model_config: Any, layout: RankLayout) -> TrainingData:
    """Open the plans that `config` names.

    Raises:
        UsageError: one is not there, or is not for the processes there are.
        DataError: one is damaged, or not of the same analysis as the other.
    """
    open_here = partial(open_plan, dp=layout.dp, pp=layout.pp, option="--analysis")
    plan, analysis = open_here(config.plan, config.analysis)
    folder = evaluation_folder(config, plan)
    if folder is not None and load_plan(folder).manifest["analysis"]["content_hash"] != analysis.content_hash:
        raise UsageError(
            f"the evaluation plan {folder} is not of the same analysis as {config.plan}",
            hint="analyze both together, and build with --holdout",
        )
    evaluation = None if folder is None else open_here(folder, analysis.path)[0]
    if evaluation is not None and evaluation.config.dp % layout.dp:
        raise UsageError(
            f"{layout.dp} pipelines cannot share the {evaluation.config.dp} data-parallel ranks of the evaluation "
            f"plan {folder} evenly",
            hint=f"`{how_to_build_like(evaluation, layout.dp, layout.pp)}` builds one for these: give that as "
            "--eval-plan",
        )
    if evaluation is not None:
        own = {"like": plan} if config.eval_plan is None else {"then": "give that as --eval-plan"}
        refuse_other_replicas(evaluation, layout.dp, **own)
        its_layout = choose_layout(evaluation, layout.world_size, layout.process)
        if its_layout != layout:
            raise UsageError(
                f"the evaluation plan {folder} is for other virtual stages than {config.plan}",
                hint="build both plans with the same --schedule and --virtual-stages",
            )
    return TrainingData(plan, analysis, evaluation, model_config, config.device != "cpu", layout)


def evaluation_folder(config: TrainConfig, plan: Plan) -> Path | None:
    """The plan of held-out sequences: the one that `config` names, or that which was built with `plan`, if it was."""
    if config.eval_plan is not None:
        return config.eval_plan
    held_out = load_held_out(plan)
    return None if held_out is None else held_out.path


def sharing_blocks(config: TrainConfig, layout: RankLayout) -> list[Block]:
    """The blocks of ranks that share sequences of the plan, or of the evaluation plan, ascending.

    Raises:
        DataError: one of them is damaged.
    """
    plan = load_plan(config.plan)
    folder = evaluation_folder(config, plan)
    plans = [plan, *([] if folder is None else [load_plan(folder)])]
    # One that does not fit is refused when data are opened.
    return sorted({block for each in plans if each.config.dp == layout.dp for block in used_blocks(each)})


def compare_tokens(analysis: Analysis, job: Job) -> list[str]:
    """Compare all tokens with their hash, on the main process; of more than `HASHED_TOKENS` say who does that instead.

    Raises:
        DataError: they are others than those that were analyzed.
    """
    num_tokens, where = int(analysis.num_tokens.sum(dtype=np.int64)), shlex.quote(str(analysis.path))
    if num_tokens > HASHED_TOKENS:
        return [
            f"tokens    not compared with their hash: {num_tokens:,} are many; `chunkplan validate {where}` does it"
        ]
    if job.is_main and analysis.tokens().content_hash() != analysis.manifest["content_hashes"]["tokens"]:
        raise DataError(
            "content-hash: the tokens are not those the manifest was written for",
            where=str(analysis.path),
            hint="files of tokens were changed: analyze again, and build the plan again",
        )
    return []
