"""Builds a plan from an analysis: the Python twin of `chunkplan build`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from chunkplan.arrays import Int32Array
from chunkplan.cost.flops import CostModel
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.folder import refuse_other_content, replace_folder
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import describe_plan, write_plan
from chunkplan.planning import CountTargets, PlanConfig, count_all_targets, count_masked_targets, plan_steps


def build(
    analysis: Analysis | str | Path,
    output: str | Path,
    config: PlanConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the dataset of `analysis` (an analysis, its folder, or a lengths file) and write the plan to `output`.

    `progress` is called with (steps planned, steps). A plan already there is replaced once the new one is complete.

    Raises:
        UsageError: there is no analysis, `output` holds something else, or no step is left after dropping.
        DataError: the analysis is damaged.
    """
    output = Path(output)
    refuse_other_content(output, "plan")
    tables, manifest = compute_plan(analysis, output, config, progress=progress)
    with replace_folder(output, "plan") as folder:
        write_plan(folder, tables, manifest)
    return Plan(path=output, manifest=manifest)


def compute_plan(
    analysis: Analysis | str | Path,
    output: str | Path,
    config: PlanConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """The tables and the manifest that `build` writes, without writing them; `output` is where they would go."""
    if not isinstance(analysis, Analysis):
        analysis = load_analysis(analysis)
    num_sequences = analysis.num_sequences
    if config.last_batch == "drop" and num_sequences < config.global_batch:
        raise UsageError(
            f"all {num_sequences} sequences would be dropped: a global batch has {config.global_batch}",
            hint="lower --global-batch, or use --last-batch keep",
        )
    cost = CostModel()
    tables = plan_steps(
        analysis.num_tokens, analysis.num_target_tokens, _target_counter(analysis), config, cost, progress
    )
    steps = tables["steps"]
    totals = {
        "num_steps": steps.num_rows,
        "num_chunks": tables["chunks"].num_rows,
        **{name: sum(steps.column(name).to_pylist()) for name in ("num_sequences", "num_tokens", "num_target_tokens")},
        "longest_sequence": int(analysis.num_tokens.max()),
        "num_dropped_sequences": config.epochs * num_sequences - sum(steps.column("num_sequences").to_pylist()),
    }
    manifest = describe_plan(
        tables,
        config=asdict(config),
        seed=config.seed,
        epochs=config.epochs,
        analysis={
            "path": Path(os.path.relpath(analysis.path.resolve(), Path(output).resolve())).as_posix(),
            "content_hash": analysis.content_hash,
            "exact": analysis.is_exact,
            "has_tokens": analysis.has_tokens,
        },
        totals=totals,
        predictions={
            "cost_model": asdict(cost),
            "predicted_us": sum(steps.column("predicted_us").to_pylist()),
            "lower_bound_us": sum(steps.column("lower_bound_us").to_pylist()),
        },
    )
    return tables, manifest


def _target_counter(analysis: Analysis) -> CountTargets:
    if not analysis.has_tokens:
        return count_all_targets
    tokens = analysis.tokens()

    def count(sequence_id: int, start: Int32Array, end: Int32Array) -> Int32Array:
        return count_masked_targets(tokens(sequence_id)[1], start, end)

    return count
