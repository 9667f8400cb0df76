"""The facts at the top of a page, and the numbers of a whole plan."""

from __future__ import annotations

from chunkplan.lengths import LengthReport
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted, gibibytes, k_words, seconds, selection_words
from chunkplan.reporting.plan_memory import PlanMemory
from chunkplan.reporting.plan_report import PlanReport
from chunkplan.reporting.plan_words import machine_words, overview_rows, schedule_words
from chunkplan.reporting.tables import Table
from chunkplan.summary import PlanSummary

Facts = list[tuple[str, str]]


def plan_facts(plan: Plan, report: PlanReport) -> Facts:
    """List what a plan is, and what it is predicted to take."""
    config, cost_model = plan.config, plan.manifest["predictions"]["cost_model"]
    summary, memory = report.summary, report.memory
    return [
        ("model and GPUs", machine_words(cost_model)),
        ("ChunkSize", f"{summary.chunk_size:,} tokens"),
        ("K", k_words(summary.k, config.k_by_length)),
        ("GPUs: dp x tp x pp", _gpus(summary, cost_model["tp"])),
        ("schedule", schedule_words(config, cost_model["shape"]["num_layers"])),
        ("sequences a step", _sequences_a_step(summary)),
        *_selection(plan, summary),
        ("predicted time", seconds(summary.total_us)),
        *_reduction(summary),
        ("lower bound of the time", seconds(summary.total_lower_bound_us)),
        *_if_unshared(summary),
        *([] if memory is None else [("memory of the fullest stage", _of_gpu(memory))]),
        ("content hash", plan.content_hash[:16]),
    ]


def _gpus(summary: PlanSummary, tp: int) -> str:
    return f"{summary.dp * tp * summary.pp:,}: {summary.dp} x {tp} x {summary.pp}"


def _reduction(summary: PlanSummary) -> Facts:
    """Say what of the time ranks take after their stages."""
    return [("of it adding up gradients", seconds(summary.reduction_us))] if summary.reduction_us else []


def _if_unshared(summary: PlanSummary) -> Facts:
    """Say what the lower bound of a plan in which ranks share sequences would be without."""
    bound = summary.unshared_lower_bound_us
    if bound is None:
        return []
    return [("lower bound if no sequence were shared", seconds(bound + (summary.reduction_us or 0.0)))]


def _sequences_a_step(summary: PlanSummary) -> str:
    """Say how many sequences a step has; where the last one has fewer, how many the others have."""
    most = min(summary.global_batch, summary.num_sequences)
    return f"{most:,}" if summary.num_steps * most == summary.num_sequences else f"up to {most:,}"


def _of_gpu(memory: PlanMemory) -> str:
    """Say how much of the memory of a GPU is taken."""
    fits = "" if memory.fits else ", does not fit"
    return f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}{fits}"


def _selection(plan: Plan, summary: PlanSummary) -> Facts:
    """List what a plan holds of the data, where that is not every sequence once."""
    config, selection = plan.config, plan.manifest["selection"]
    facts = selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"])
    if selection["num_held_out"]:
        facts.append(("part", {"train": "to train on", "eval": "held out, to evaluate on"}[config.part]))
    if config.epochs > 1:
        facts.append(("epochs", f"{config.epochs:,}"))
    if summary.num_dropped_sequences:
        facts.append(("dropped with short last batches", counted(summary.num_dropped_sequences, "sequence")))
    return facts


def analysis_facts(analysis: Analysis, report: LengthReport) -> Facts:
    """List which data an analysis is of, and how much that is."""
    paths = [source["path"] for source in analysis.manifest.get("sources", ())]
    several = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return [
        ("source", f"{paths[0]}{several}" if paths else str(analysis.path)),
        ("sequences", f"{report.num_sequences:,}"),
        ("tokens", f"{report.num_tokens:,}"),
        ("longest", f"{report.longest:,} tokens"),
        ("content hash", analysis.content_hash[:16]),
    ]


def summary_table(plan: Plan, report: PlanReport) -> Table:
    """List what a plan comes to, as the terminal does."""
    rows = overview_rows(report.summary, plan.manifest, report.memory)
    return Table("The plan in numbers", ("of the whole plan", "value"), rows, texts=("value",))
