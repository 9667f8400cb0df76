"""The order of a plan's steps for the pipelines of torch: what `_PipelineScheduleRuntime._load_csv` reads.

A file for each data-parallel rank of each step, and in it a line for each pipeline rank: its actions, as stage, op and
micro-batch, such as 0F0. A stage of torch is a model stage here, and a micro-batch is a chunk, numbered in the order in
which all stages forward: that is how torch finds the loss of a micro-batch on its last stage.

torch has no op for a forward that keeps nothing. Such a chunk has its forward and its backward there, and is to be
recomputed by the stage itself, by activation checkpointing. (Its schedules can be given a second forward, which their
checks let pass, but a stage that runs it has no input for it and counts its loss twice.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from chunkplan.errors import DataError
from chunkplan.exporting.checks import PLAN_HINT, check_plan
from chunkplan.files.folder import EXPORT, refuse_other_content, replace_folder
from chunkplan.files.json_file import write_json
from chunkplan.layers import model_stage_of
from chunkplan.operations import OPS
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import Action, Plan, PlanStep
from chunkplan.version import __version__

#: The name of the format.
TORCH_PIPELINING = "torch-pipelining"

#: The file with a line for every other one: whose order it has, and of which chunks.
MICROBATCHES = "microbatches.jsonl"

#: The letter of torch for each op; it has none for a recompute, which it does not do.
_LETTERS = {"forward": "F", "forward_kv": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


@dataclass(frozen=True, kw_only=True)
class OrderExport:
    """A written export in the folder `path`: the order of every step, for each of its data-parallel ranks.

    `num_stages`: model stages, on `pp` pipeline ranks. Of all micro-batches, those that their stage has to recompute,
    that are parts of a split sequence, and that are a rank's slice of what several ranks share. Files are named by
    `microbatches`.
    """

    path: Path
    format: str
    tool_version: str
    source: Path
    source_content_hash: str
    schedule: str
    pp: int
    dp: int
    num_stages: int
    num_steps: int
    chunk_size: int
    num_microbatches: int
    num_recomputed: int
    num_parts: int
    num_shared: int
    microbatches: str

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document; export.json holds the same."""
        return {**asdict(self), "path": str(self.path), "source": str(self.source)}


class _Microbatches(msgspec.Struct):
    """A line of `MICROBATCHES`; lists have an entry for each micro-batch."""

    file: str
    step: int
    dp_rank: int
    num_microbatches: int
    chunk_ids: list[int]
    num_tokens: list[int]
    is_recomputed: list[bool]
    is_part: list[bool]
    is_shared: list[bool]


def export_order(plan: Plan | str | Path, output: str | Path) -> OrderExport:
    """Write the order of every step of a plan into a folder, for the pipeline schedules of torch.

    Example: `chunkplan.export_order("plan-of-two-stages", "order")`

    Raises:
        UsageError: there is no plan, or `output` is something else.
        DataError: a file of the plan is damaged or was changed.
    """
    output = Path(output)
    refuse_other_content(output, "export")
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    check_plan(plan, {"steps": plan.steps(), "chunks": plan.chunks(), "schedule": plan.schedule()})
    config, num_steps = plan.config, plan.manifest["totals"]["num_steps"]
    counts = dict.fromkeys(("num_microbatches", "num_recomputed", "num_parts", "num_shared"), 0)
    with replace_folder(output, "export") as folder:
        with (folder / MICROBATCHES).open("wb") as index:
            for step in plan.iter_steps():
                for rank in range(config.dp):
                    name = f"step-{step.step:0{len(str(num_steps))}}-rank-{rank:0{len(str(config.dp))}}.csv"
                    described, lines = _of_rank(plan, step, rank, name)
                    (folder / name).write_text("".join(f"{','.join(line)}\n" for line in lines), encoding="ascii")
                    index.write(msgspec.json.encode(described) + b"\n")
                    counts["num_microbatches"] += described.num_microbatches
                    for name, flags in (
                        ("num_recomputed", described.is_recomputed),
                        ("num_parts", described.is_part),
                        ("num_shared", described.is_shared),
                    ):
                        counts[name] += sum(flags)
        written = OrderExport(
            path=output,
            format=TORCH_PIPELINING,
            tool_version=__version__,
            source=plan.path,
            source_content_hash=plan.content_hash,
            schedule=config.schedule,
            pp=config.pp,
            dp=config.dp,
            num_stages=config.pp * config.virtual_stages,
            num_steps=num_steps,
            chunk_size=config.chunk_size,
            microbatches=MICROBATCHES,
            **counts,
        )
        write_json(folder / EXPORT, written.to_dict(), indent=2)
    return written


def _of_rank(plan: Plan, step: PlanStep, rank: int, name: str) -> tuple[_Microbatches, list[list[str]]]:
    """The micro-batches of a rank, and the words of each of its stages.

    Raises:
        DataError: stages take chunks in different orders, or an op is unknown.
    """
    config, chunks = plan.config, {chunk.chunk_id: chunk for chunk in step.chunks.get(rank, [])}
    stages = [step.actions.get((rank, stage), []) for stage in range(config.pp)]
    order = [action.chunk_id for action in stages[0] if action.op.startswith("forward") and action.virtual_stage == 0]
    for stage, actions in enumerate(stages):
        for virtual_stage in range(config.virtual_stages):
            own = [action for action in actions if action.virtual_stage == virtual_stage]
            forwards = [action.chunk_id for action in own if action.op.startswith("forward")]
            if forwards != order or sorted(order) != sorted(chunks) or not {action.op for action in own} <= set(OPS):
                raise DataError(
                    f"stage {stage} does not forward the chunks of the rank in the order of the first stage",
                    where=f"{plan.path}, step {step.step}, rank {rank}",
                    hint=PLAN_HINT,
                )
    number = {chunk_id: microbatch for microbatch, chunk_id in enumerate(order)}
    recomputed = {action.chunk_id for action in stages[0] if action.op == "recompute"}
    described = _Microbatches(
        file=name,
        step=step.step,
        dp_rank=rank,
        num_microbatches=len(order),
        chunk_ids=order,
        num_tokens=[chunks[chunk_id].num_tokens for chunk_id in order],
        is_recomputed=[chunk_id in recomputed for chunk_id in order],
        is_part=[chunks[chunk_id].group_id is not None for chunk_id in order],
        is_shared=[chunks[chunk_id].cp_size > 1 for chunk_id in order],
    )
    return described, [list(_words(plan, stage, actions, number)) for stage, actions in enumerate(stages)]


def _words(plan: Plan, stage: int, actions: list[Action], number: dict[int, int]) -> Iterator[str]:
    config = plan.config
    for action in actions:
        if action.op in _LETTERS:
            model_stage = model_stage_of(stage, action.virtual_stage, config.pp, config.placement)
            yield f"{model_stage}{_LETTERS[action.op]}{number[action.chunk_id]}"
