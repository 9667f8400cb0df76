"""A plan or an analysis as a page: the Python twin of `chunkplan inspect --html`."""

from __future__ import annotations

from pathlib import Path

from chunkplan.cost.fused import fused_words
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.extras import pip_install
from chunkplan.files.writing import refuse_overwriting, refuse_unwritable, whole_file
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_plan_or_analysis, load_same_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted, percent, trained_words
from chunkplan.reporting.token_text import TextSource, open_tokenizer
from chunkplan.tuning.document import read_tuning_document, tuning_document
from chunkplan.tuning.document_entries import CostModelEntry, DataEntry, TuningDocument
from chunkplan.tuning.drift import length_drift
from chunkplan.tuning.tune import Tuning


def write_report(
    path: str | Path,
    plan_or_analysis: Plan | Analysis | str | Path,
    *,
    tuning: Tuning | str | Path | None = None,
    analysis: str | Path | None = None,
    tokenizer: str | Path | None = None,
    step: int | None = None,
) -> tuple[str, ...]:
    """Write one self-contained HTML page of a plan, or of an analysis, to `path`: whole or not at all.

    Example: `chunkplan.write_report("plan.html", "plan")`

    Returns the page's warnings: `tuning` is of other data, another model, other GPUs or steps.

    `tuning`: the result of `tune`, or its file. `analysis`: the present path of the plan's analysis, if it has moved.
    `tokenizer`: decodes text in place of the analysis' own. `step`: the step to draw first. The same arguments give the
    same bytes.

    Raises:
        UsageError: plotly or an input is missing, `path` cannot be written, or the page would replace an input.
        DataError: a file is damaged, or `analysis` is not that of the plan.
    """
    try:
        from chunkplan.reporting.page import content
    except ImportError as error:
        raise UsageError(f"the page needs plotly ({error})", hint=pip_install("report")) from error
    if isinstance(plan_or_analysis, str | Path):
        plan_or_analysis = load_plan_or_analysis(plan_or_analysis)
    read = [plan_or_analysis.path, analysis, None if isinstance(tuning, Tuning) else tuning]
    read += [plan_or_analysis.analysis_path] if isinstance(plan_or_analysis, Plan) else []
    refuse_overwriting(Path(path), read)
    refuse_unwritable(Path(path))
    document = None if tuning is None else _document(tuning)
    warnings: list[str] = []
    if isinstance(plan_or_analysis, Plan):
        found, why_not = _analysis_of(plan_or_analysis, analysis)
        if found is None and tokenizer is not None:
            raise UsageError(
                f"--tokenizer is of no use without the analysis of the plan: {why_not}", hint="give --analysis DIR"
            )
        _refuse_sources(Path(path), found)
        warnings += [] if document is None else tuning_warnings(document, plan_or_analysis, found)
        no_lengths = None if why_not is None else f"Lengths before are not shown: {why_not}"
        source = TextSource(why_not=why_not) if found is None else _text_source(found, tokenizer)
        text = content.plan_page(plan_or_analysis, source, no_lengths, document, warnings, step)
    elif analysis is not None or step is not None:
        raise UsageError(
            "an analysis has neither steps nor an analysis of its own", hint="give a plan, or leave them out"
        )
    else:
        _refuse_sources(Path(path), plan_or_analysis)
        warnings += [] if document is None else tuning_warnings(document, None, plan_or_analysis)
        source = _text_source(plan_or_analysis, tokenizer)
        text = content.analysis_page(plan_or_analysis, source, document, warnings)
    with whole_file(Path(path)) as file:
        file.write(text)
    return tuple(warnings)


def _refuse_sources(path: Path, analysis: Analysis | None) -> None:
    """Refuse to write over the data that `analysis` was made of."""
    if analysis is not None:
        refuse_overwriting(path, [source["path"] for source in analysis.manifest.get("sources", [])])


def _document(tuning: Tuning | str | Path) -> TuningDocument:
    return tuning_document(tuning) if isinstance(tuning, Tuning) else read_tuning_document(Path(tuning))


def _text_source(analysis: Analysis, given: str | Path | None) -> TextSource:
    """Source of the text of `analysis`; if no tokenizer is given and its own is not available, it says why not.

    A bare file of lengths has neither text nor a reason.
    """
    if not analysis.manifest.get("sources"):
        return TextSource(analysis)
    if not analysis.has_tokens:
        return TextSource(analysis, why_not="the analysis has no tokens.")
    try:
        return TextSource(analysis, open_tokenizer(analysis, given))
    except ChunkplanError as error:
        if given is not None:
            raise
        return TextSource(analysis, why_not=f"{error}. {error.hint[:1].upper()}{error.hint[1:]}.")


def _analysis_of(plan: Plan, given: str | Path | None) -> tuple[Analysis | None, str | None]:
    """Load the analysis of `plan`; or return None, where none is given and it cannot be had, and why."""
    try:
        return load_same_analysis(plan, given), None
    except ChunkplanError as error:
        if given is not None:
            raise
        return None, f"{error}."


# Compare a tuning with the data, the model, the GPUs and the steps that it is shown beside.


def tuning_warnings(tuning: TuningDocument, plan: Plan | None, analysis: Analysis | None) -> list[str]:
    """List what differs between `plan` or `analysis`, where not None, and what a tuning was found for."""
    said = [] if analysis is None else _of_data(tuning["data"], analysis)
    return said if plan is None else [*said, *_of_plan(tuning, plan)]


def is_tuning_of(path: Path, plan_or_analysis: Path, analysis: str | Path | None = None) -> bool:
    """True if the tuning at `path` is for `plan_or_analysis`; `analysis` is the present path of the plan's analysis.

    False if a file is missing or damaged.
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
    layout, config = tuning["chosen"], plan.config  # every choice has as many GPUs
    gpus = layout["dp"] * layout["tp"] * layout["pp"], config.dp * here["tp"] * config.pp
    batches = tuning["options"]["global_batch"], config.global_batch
    compared = [
        (there["precision"], here.get("precision", there["precision"]), "for {}, the plan's times are for {}"),
        (*map(_trained, (there, here)), "for {}, the plan's times are for {}"),
        (*(each.get("optimizer", "adamw") for each in (there, here)), "for {}, the plan's memory is that of {}"),
        (*map(_fused, (there, here)), "for fused kernels {}, the plan's times are for {}"),
        (counted(gpus[0], "GPU"), counted(gpus[1], "GPU"), "for {}, the plan is for {}"),
        (f"{batches[0]:,}", f"{batches[1]:,}", "for steps of {} sequences, those of the plan have {}"),
    ]
    said += [f"The tuning is {words.format(tuned, planned)}." for tuned, planned, words in compared if tuned != planned]
    return said


def _trained(cost_model: CostModelEntry) -> str:
    return trained_words(cost_model.get("lora_rank", 0), cost_model.get("load_in_4bit", False))


def _fused(cost_model: CostModelEntry) -> str:
    words = fused_words(cost_model.get("fused_kernels", "none"), cost_model.get("compile", False))
    return " and ".join(words) or "none"
