"""A plan or an analysis as a page: the Python twin of `chunkplan inspect --html`."""

from __future__ import annotations

from pathlib import Path

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.extras import pip_install
from chunkplan.files.whole_file import refuse_overwriting, refuse_unwritable, whole_file
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_plan_or_analysis, load_same_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.page.tuning_warnings import tuning_warnings
from chunkplan.reporting.token_text import open_tokenizer
from chunkplan.tuning.document import read_tuning_document, tuning_document
from chunkplan.tuning.document_entries import TuningDocument
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

    Returns what the page warns of: that `tuning` is of other data, of another model, of other GPUs or another number of
    them, or of other steps.

    `tuning`: what `tune` found, or the file that it left. `analysis`: where that of the plan is now, if it has moved.
    `tokenizer`: decodes the examples of an analysis, in place of the one it was made with. `step`: drawn first,
    whatever it is like. The same arguments give the same bytes.

    Raises:
        UsageError: plotly is not installed, something is not there, `path` cannot be written, or the page would
            replace one of its inputs.
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
        if tokenizer is not None:
            raise UsageError(
                "a page of a plan shows no text, so --tokenizer is of no use", hint="give an analysis, or leave it out"
            )
        found, why_not = _analysis_of(plan_or_analysis, analysis)
        _refuse_sources(Path(path), found)
        warnings += [] if document is None else tuning_warnings(document, plan_or_analysis, found)
        text = content.plan_page(plan_or_analysis, found, why_not, document, warnings, step)
    elif analysis is not None or step is not None:
        raise UsageError(
            "an analysis has neither steps nor an analysis of its own", hint="give a plan, or leave them out"
        )
    else:
        _refuse_sources(Path(path), plan_or_analysis)
        warnings += [] if document is None else tuning_warnings(document, None, plan_or_analysis)
        text = content.analysis_page(plan_or_analysis, *_tokenizer_of(plan_or_analysis, tokenizer), document, warnings)
    with whole_file(Path(path)) as file:
        file.write(text)
    return tuple(warnings)


def _refuse_sources(path: Path, analysis: Analysis | None) -> None:
    """Refuse to write over the data that `analysis` was made of."""
    if analysis is not None:
        refuse_overwriting(path, [source["path"] for source in analysis.manifest.get("sources", [])])


def _document(tuning: Tuning | str | Path) -> TuningDocument:
    return tuning_document(tuning) if isinstance(tuning, Tuning) else read_tuning_document(Path(tuning))


def _tokenizer_of(analysis: Analysis, given: str | Path | None) -> tuple[RecordTokenizer | None, str | None]:
    """The tokenizer that decodes examples of `analysis`; or, where none is given and it cannot be had, why.

    Neither for a bare file of lengths.
    """
    if not analysis.manifest.get("sources"):
        return None, None
    if not analysis.has_tokens:
        return None, "the analysis has no tokens."
    try:
        return open_tokenizer(analysis, given), None
    except ChunkplanError as error:
        if given is not None:
            raise
        return None, f"{error}. {error.hint[:1].upper()}{error.hint[1:]}."


def _analysis_of(plan: Plan, given: str | Path | None) -> tuple[Analysis | None, str | None]:
    """Load the analysis of `plan`; or return None, where none is given and it cannot be had, and why."""
    try:
        return load_same_analysis(plan, given), None
    except ChunkplanError as error:
        if given is not None:
            raise
        return None, f"Lengths before are not shown: {error}."
