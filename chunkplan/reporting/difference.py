"""Compares two plans, or two analyses: the Python twin of `chunkplan diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import polars as pl

from chunkplan.errors import UsageError
from chunkplan.lengths import length_report
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_plan_or_analysis
from chunkplan.planfile.manifest import SourceEntry
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import short_repr
from chunkplan.reporting.per_step import plan_chunks
from chunkplan.reporting.plan_memory import plan_memory
from chunkplan.summary import summary_of

# Match the sources of two analyses: by path, and moved ones by content.


class ComparedSource(TypedDict):
    """The compared entries of a source; None where its manifest does not have one."""

    path: str
    content_hash: str | None
    schema: str | None
    records: int
    rejected: int | None
    num_sequences: int | None
    num_tokens: int | None


@dataclass(frozen=True)
class SourceChange:
    """A source that is not the same in both analyses; `before` or `after` is None where it is not there.

    One that is "moved" has the same content under another path.
    """

    change: Literal["added", "removed", "changed", "moved"]
    before: ComparedSource | None
    after: ComparedSource | None


def compare_sources(before: Iterable[SourceEntry], after: Iterable[SourceEntry]) -> tuple[SourceChange, ...]:
    """Find the sources of two manifests that are not the same in both, in the order of `before`, then of `after`."""
    old, new = _by_place(before), _by_place(after)
    added = {place: source for place, source in new.items() if place not in old}
    found = []
    for place, source in old.items():
        if place in new:
            if source != new[place]:
                found.append(SourceChange("changed", source, new[place]))
            continue
        moved_to = next((other for other in added if _same_content(added[other], source)), None)
        if moved_to is None:
            found.append(SourceChange("removed", source, None))
        else:
            found.append(SourceChange("moved", source, added.pop(moved_to)))
    return (*found, *(SourceChange("added", None, source) for source in added.values()))


def _same_content(one: ComparedSource, other: ComparedSource) -> bool:
    return one["content_hash"] is not None and one["content_hash"] == other["content_hash"]


def _by_place(sources: Iterable[SourceEntry]) -> dict[tuple[str, int], ComparedSource]:
    """Key sources by path and their number among those of that path: a file that is named twice is two sources."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], ComparedSource] = {}
    for source in sources:
        path = source["path"]
        found[path, seen[path]] = {
            "path": path,
            "content_hash": source.get("content_hash"),
            "schema": source["schema"],
            "records": source["records"],
            "rejected": source.get("rejected"),
            "num_sequences": source.get("num_sequences"),
            "num_tokens": source.get("num_tokens"),
        }
        seen[path] += 1
    return found


Verdict = Literal["identical", "equal content, other manifest", "different"]
Unit = Literal["count", "share", "ratio", "us", "bytes"]

#: A manifest, or an object in it, whatever its entries are: all of them are compared.
Manifest = Mapping[str, Any]

_PLAN_NUMBERS: dict[str, Unit] = {
    "num_steps": "count",
    "num_sequences": "count",
    "num_tokens": "count",
    "num_target_tokens": "count",
    "longest_sequence": "count",
    "num_chunks": "count",
    "num_zero_loss": "count",
    "num_optimal_steps": "count",
    "token_fill": "share",
    "heaviest_over_mean": "ratio",
    "heaviest_over_work": "ratio",
    "num_exceeding_steps": "count",
    "exceeding_share": "share",
    "num_shared_sequences": "count",
    "shared_work_share": "share",
    "recompute_share": "share",
    "peak_retained_tokens": "count",
    "total_us": "us",
    "reduction_us": "us",
    "total_lower_bound_us": "us",
    "memory_bytes": "bytes",
}


@dataclass(frozen=True)
class Side:
    """One of the two: where it is, its content hash, whether lengths are exact, the share of the records or None."""

    path: str
    content_hash: str
    exact: bool
    sample: float | None


@dataclass(frozen=True)
class Entry:
    """An entry of the manifests that differs, with dots in its name where it lies inside another; None: not there."""

    section: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Number:
    """A number of both; None where there is none. Shares are from 0 to 1, `us` are microseconds.

    Of plans `memory_bytes` is what the fullest GPU holds at its fullest moment.
    """

    name: str
    unit: Unit
    before: float | None
    after: float | None


@dataclass(frozen=True)
class SameSteps:
    """Number of steps that hold the same sequences as the step of the same number, out of those of the longer plan."""

    num_same: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two plans or two analyses side by side.

    `verdict` goes by the content hashes, which `validate` checks, and by the manifests; where the analysis of two plans
    lies makes no difference if it is the same one. `entries` are those that differ, `numbers` all that are compared,
    differ or not. Of plans with the same data, `same_steps` compares the sequences of their steps. Of analyses,
    `sources` has those that are not the same in both, and `rejected` the records by reason.
    """

    kind: Literal["plan", "analysis"]
    verdict: Verdict
    before: Side
    after: Side
    entries: tuple[Entry, ...]
    numbers: tuple[Number, ...]
    same_steps: SameSteps | None = None
    sources: tuple[SourceChange, ...] = ()
    rejected: tuple[Number, ...] = ()

    __repr__ = short_repr

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for one JSON document."""
        return asdict(self)


def diff(before: str | Path, after: str | Path) -> Difference:
    """Compare two plan folders, or two analyses: folders or bare files of lengths.

    Example: `chunkplan.diff("plan", "plan-of-4")`

    Raises:
        UsageError: one is not there, or one is a plan and the other an analysis.
        DataError: one is damaged.
    """
    left, right = load_plan_or_analysis(before), load_plan_or_analysis(after)
    if isinstance(left, Plan) and isinstance(right, Plan):
        return _diff_plans(left, right)
    if isinstance(left, Analysis) and isinstance(right, Analysis):
        return _diff_analyses(left, right)
    [plan, analysis] = [left, right] if isinstance(left, Plan) else [right, left]
    raise UsageError(
        f"{plan.path} is a plan, {analysis.path} an analysis", hint="compare two plans, or two analyses with each other"
    )


def _diff_plans(before: Plan, after: Plan) -> Difference:
    manifests: tuple[Manifest, Manifest] = before.manifest, after.manifest
    if _is_same_data(before, after):
        manifests = _without_place(before.manifest), _without_place(after.manifest)
    return Difference(
        kind="plan",
        verdict=_verdict(before, after, *manifests),
        before=_side(before),
        after=_side(after),
        entries=_entries(_plan_sections, *manifests),
        numbers=_numbers(_PLAN_NUMBERS, _plan_numbers(before), _plan_numbers(after)),
        same_steps=_same_steps(before, after),
    )


def _diff_analyses(before: Analysis, after: Analysis) -> Difference:
    numbers = _analysis_numbers(before), _analysis_numbers(after)
    rejected = before.manifest.get("rejected", {}), after.manifest.get("rejected", {})
    reasons = dict.fromkeys([*rejected[0], *rejected[1]], 0)
    return Difference(
        kind="analysis",
        verdict=_verdict(before, after, before.manifest, after.manifest),
        before=_side(before),
        after=_side(after),
        entries=_entries(_analysis_sections, before.manifest, after.manifest),
        numbers=_numbers(dict.fromkeys(numbers[0], "count"), *numbers),
        sources=compare_sources(before.manifest.get("sources", []), after.manifest.get("sources", [])),
        rejected=_numbers(dict.fromkeys(reasons, "count"), *({**reasons, **counts} for counts in rejected)),
    )


def _is_same_data(before: Plan, after: Plan) -> bool:
    return bool(before.manifest["analysis"]["content_hash"] == after.manifest["analysis"]["content_hash"])


def _without_place(manifest: Manifest) -> Manifest:
    """Leave out where the analysis of a plan lies: if it is the same one, that is no difference."""
    return {**manifest, "analysis": {name: value for name, value in manifest["analysis"].items() if name != "path"}}


def _verdict(before: Plan | Analysis, after: Plan | Analysis, left: Manifest, right: Manifest) -> Verdict:
    if before.content_hash != after.content_hash:
        return "different"
    return "identical" if left == right else "equal content, other manifest"


def _side(one: Plan | Analysis) -> Side:
    data = one.manifest["analysis"] if isinstance(one, Plan) else one.manifest
    return Side(str(one.path), one.content_hash, data["exact"], data.get("sample"))


def _plan_sections(manifest: Manifest) -> dict[str, Manifest]:
    counts = {name: count for name, count in manifest["selection"].items() if name != "sources"}
    return {
        "configuration": {"cp": "off"} | manifest["config"],
        "data": {**manifest["analysis"], **counts},
        "cost model": manifest["predictions"]["cost_model"],
        "written by": _written_by(manifest),
    }


def _analysis_sections(manifest: Manifest) -> dict[str, Manifest]:
    return {
        "data": {name: manifest.get(name) for name in ("kind", "exact", "sample")},
        "tokens": {name: manifest.get(name) for name in ("tokenizer", "template_hash", "max_token_id")},
        "options": manifest.get("options", {}),
        "written by": _written_by(manifest),
    }


def _written_by(manifest: Manifest) -> Manifest:
    return {name: manifest.get(name) for name in ("tool_version", "schema_version")}


def _entries(
    sections: Callable[[Manifest], dict[str, Manifest]], before: Manifest, after: Manifest
) -> tuple[Entry, ...]:
    left, right = sections(before), sections(after)
    found = []
    for section in left:
        old, new = _flat(left[section]), _flat(right[section])
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        found += [Entry(section, name, old.get(name), new.get(name)) for name in names]
    return tuple(found)


def _flat(values: Manifest, prefix: str = "") -> Manifest:
    """Flatten a manifest: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: Manifest = {}
    for name, value in values.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        flat = {**flat, **inner}
    return flat


def _numbers(
    units: Mapping[str, Unit], before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> tuple[Number, ...]:
    return tuple(Number(name, unit, before[name], after[name]) for name, unit in units.items())


def _plan_numbers(plan: Plan) -> dict[str, float | None]:
    chunks = plan_chunks(plan)
    found = plan_memory(plan, chunks.table)
    summary = summary_of(plan.steps(), chunks.frame, plan.manifest)
    return {**summary.to_dict(), "memory_bytes": found and found.memory.total}


def _analysis_numbers(analysis: Analysis) -> dict[str, float | None]:
    report = length_report(analysis)
    truncated = analysis.manifest.get("truncated", {"num_sequences": 0, "num_tokens": 0})
    return {
        **{name: getattr(report, name) for name in ("num_sequences", "num_tokens", "num_target_tokens", "mean_tokens")},
        **{f"quantile_{100 * quantile.share:g}": quantile.num_tokens for quantile in report.quantiles},
        "num_without_target": report.num_without_target,
        **{f"truncated_{name}": count for name, count in truncated.items()},
    }


def _same_steps(before: Plan, after: Plan) -> SameSteps | None:
    """Count the steps with the same sequences; None where the plans are of other data, whose ids mean other ones."""
    if not _is_same_data(before, after):
        return None
    left, right = _sequences_by_step(before), _sequences_by_step(after)
    both = left.join(right, on="step").filter(pl.col("sequence_ids") == pl.col("sequence_ids_right"))
    return SameSteps(both.height, max(left.height, right.height))


def _sequences_by_step(plan: Plan) -> pl.DataFrame:
    """Return each `step` with its `sequence_ids`, ascending; a sequence is there as often as the step holds it."""
    chunks = pl.DataFrame(pl.from_arrow(plan.chunks().select(["step", "segments"])))
    return (
        chunks.explode("segments")
        .unnest("segments")
        .filter(pl.col("start") == 0)
        .sort("step", "sequence_id")
        .group_by("step", maintain_order=True)
        .agg(sequence_ids="sequence_id")
    )
