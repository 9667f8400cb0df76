"""Whether a tuning is of the data, the model, the GPUs and the steps that it is shown beside."""

from __future__ import annotations

from pathlib import Path

from chunkplan.cost.fused import fused_words
from chunkplan.errors import ChunkplanError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_plan_or_analysis, load_same_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted, percent, trained_words
from chunkplan.tuning.document import read_tuning_document
from chunkplan.tuning.document_entries import CostModelEntry, DataEntry, TuningDocument
from chunkplan.tuning.drift import length_drift


def tuning_warnings(tuning: TuningDocument, plan: Plan | None, analysis: Analysis | None) -> list[str]:
    """What a tuning (see `tuning_document`) was found for and `plan`, or `analysis`, is not; those that are None are
    not looked at."""
    said = [] if analysis is None else _of_data(tuning["data"], analysis)
    return said if plan is None else [*said, *_of_plan(tuning, plan)]


def is_tuning_of(path: Path, plan_or_analysis: Path, analysis: str | Path | None = None) -> bool:
    """Whether the tuning at `path` is for what lies at `plan_or_analysis`; `analysis`: where that of a plan is now.

    Not so where a file is not there or damaged.
    """
    try:
        found = load_plan_or_analysis(plan_or_analysis)
        document = read_tuning_document(path)
        if isinstance(found, Plan):
            return not tuning_warnings(document, found, load_same_analysis(found, analysis))
        return not tuning_warnings(document, None, found)
    except ChunkplanError:
        return False


def _of_data(data: DataEntry, analysis: Analysis) -> list[str]:
    before = {int(length): share for length, share in data["token_histogram"].items()}
    drift = length_drift(analysis.num_tokens, before, data["longest_sequence"])
    if not drift.has_drifted:
        return []
    return [
        f"The tuning is of other data: {percent(drift.moved)} of the tokens here are in other length classes, and the "
        f"longest sequence has {drift.longest_now:,} tokens, there {drift.longest_before:,}."
    ]


def _of_plan(tuning: TuningDocument, plan: Plan) -> list[str]:
    here: CostModelEntry = plan.manifest["predictions"]["cost_model"]
    there = tuning["cost_model"]
    said = []
    for what, planned, tuned in (
        ("model", here["shape"], there["shape"]),
        ("GPU", here["hardware"], there["hardware"]),
    ):
        if planned["name"] != tuned["name"]:
            said.append(
                f"The tuning is for another {what}: {tuned['name']}, the plan's times are for {planned['name']}."
            )
        # But for the memory: the plan fits that of its GPUs, and what was tuned that of those it was tuned for.
        elif {**planned, "memory_bytes": 0} != {**tuned, "memory_bytes": 0}:
            said.append(f"The tuning has other numbers for the {what} {planned['name']} than the plan.")
    if here.get("precision", there["precision"]) != there["precision"]:
        said.append(f"The tuning is for {there['precision']}, the plan's times are for {here['precision']}.")
    trained = [trained_words(each.get("lora_rank", 0), each.get("load_in_4bit", False)) for each in (there, here)]
    if trained[0] != trained[1]:
        said.append(f"The tuning is for {trained[0]}, the plan's times are for {trained[1]}.")
    optimizers = [each.get("optimizer", "adamw") for each in (there, here)]
    if optimizers[0] != optimizers[1]:
        said.append(f"The tuning is for {optimizers[0]}, the plan's memory is that of {optimizers[1]}.")
    entries = ((each.get("fused_kernels", "none"), each.get("compile", False)) for each in (there, here))
    fused = [" and ".join(fused_words(*each)) or "none" for each in entries]
    if fused[0] != fused[1]:
        said.append(f"Fused kernels: the tuning is for {fused[0]}, the plan's times are for {fused[1]}.")
    layout = tuning["chosen"]  # every choice has as many GPUs
    gpus_there = layout["dp"] * layout["tp"] * layout["pp"]
    gpus_here = plan.config.dp * here["tp"] * plan.config.pp
    if gpus_there != gpus_here:
        said.append(f"The tuning is for {counted(gpus_there, 'GPU')}, the plan is for {gpus_here:,}.")
    num_there, num_here = tuning["options"]["global_batch"], plan.config.global_batch
    if num_there != num_here:
        said.append(f"The tuning is for steps of {num_there:,} sequences, those of the plan have {num_here:,}.")
    return said
