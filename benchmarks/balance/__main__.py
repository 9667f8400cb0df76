"""Measures how evenly planners spread the sequences of a step, and how fast they plan.

    python -m benchmarks.balance                                    # all entries that are installed, a few minutes
    python -m benchmarks.balance --only whole "pp 1" --entries trl verl
    python -m benchmarks.balance --output benchmarks/measured/balance/DATE.json

An entry is a file in benchmarks/balance/entries; one whose package is missing is left out. Times of plans are those of
the cost model, the same on any machine. Milliseconds are processor time of the second call, imports before.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from benchmarks.balance.instances import MODELS, TRACKS, Step, steps
from benchmarks.balance.scoring import Score, score
from benchmarks.machine import machine

ENTRIES = Path(__file__).parent / "entries"


def entries(names: Iterable[str] = ()) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The entries that can be imported, by name, and why others cannot."""
    found, missing = {}, {}
    for path in sorted(ENTRIES.glob("[a-z]*.py")):
        if not names or path.stem in names:
            try:
                found[path.stem] = import_module(f"benchmarks.balance.entries.{path.stem}")
            except ImportError as error:
                missing[path.stem] = f"no module {error.name}" if error.name else str(error)
    return found, missing


def measure(step: Step, entry: ModuleType) -> dict[str, Any]:
    """Plan a step twice, and score the second plan; or why there is none."""
    try:
        entry.plan(step)
        start = time.process_time()
        plan = entry.plan(step)
        milliseconds = 1e3 * (time.process_time() - start)
        return {"milliseconds": round(milliseconds, 2), **_rounded(score(step, plan))}
    except (AssertionError, ValueError) as error:
        return {"refused": str(error)[:100]}


def _rounded(found: Score) -> dict[str, float]:
    return {field: round(value, 4) for field, value in found._asdict().items()}


def summary(track: str, results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each entry of a track: of its plans without a fault the median and the worst, and what others break.

    *Best* are the steps in which no other entry has a plan without a fault that is done sooner, by one part in 10,000.
    """
    rows = []
    for name in dict.fromkeys(name for each in results.values() for name in each):
        own = [each[name] for each in results.values() if name in each and "refused" not in each[name]]
        faultless = [row for row in own if is_faultless(row)]
        cells = [name, str(len(faultless))]
        for field in ("after_step", "after_rounds"):
            values = [row[field] for row in faultless]
            best = sum(is_best(each, name, field) for each in results.values())
            cells += [f"{median(values):.3f}" if values else "", f"{max(values):.3f}" if values else "", str(best)]
        faults = [("broken_caps", "caps"), ("dropped_tokens", "tokens"), ("unequal_counts", "counts")]
        broken = [f"{word} in {count}" for field, word in faults if (count := sum(bool(row[field]) for row in own))]
        refused = len(results) - len(own)
        broken += [f"refused {refused}"] if refused else []
        rows.append([*cells, f"{median(row['milliseconds'] for row in own):.1f}", ", ".join(broken)])
    return rows


def is_faultless(row: dict[str, Any]) -> bool:
    """True if a plan keeps the cap, has all tokens, and as many micro-batches on every rank."""
    return not any(row.get(field, True) for field in ("broken_caps", "dropped_tokens", "unequal_counts"))


def is_best(of_step: dict[str, Any], name: str, field: str) -> bool:
    """True if the plan of an entry has no fault, and of those without one none is done sooner."""
    rows = {other: row for other, row in of_step.items() if is_faultless(row)}
    return name in rows and rows[name][field] <= 1.0001 * min(row[field] for row in rows.values())


COLUMNS = ("entry", "steps", "end", "worst", "best", "round", "worst", "best", "ms", "faults")


def main() -> None:
    """Measure what the command line asks for, print it, and write it."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="steps with these in their names")
    parser.add_argument("--entries", nargs="+", default=[], metavar="NAME", help="of these alone")
    parser.add_argument("--output", type=Path, help="a file to write everything to, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found, missing = entries(options.entries)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for track in TRACKS:
        results[track] = {
            step.name: {name: measure(step, entry) for name, entry in found.items() if track == entry.TRACK}
            for step in steps(track)
            if all(word in step.name for word in options.only)
        }
        if not results[track]:
            continue
        title = f"{track}: {len(results[track])} steps; time over the bound, waiting at the end and after each round"
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for column in COLUMNS:
            last = column == COLUMNS[-1]
            table.add_column(column, justify="left" if column in ("entry", "faults") else "right", no_wrap=not last)
        for row in summary(track, results[track]):
            table.add_row(*row)
        Console().print(table)
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}")
    if options.output:
        document = {
            "machine": machine("numpy", "numba"),
            "models": MODELS,
            "entries": {name: {"package": each.PACKAGE, "version": _version(each)} for name, each in found.items()},
            "left_out": missing,
            "steps": results,
        }
        lines = json.dumps(document, separators=(",", ":"))
        for track in TRACKS:
            lines = lines.replace(f'"{track}, ', f'\n"{track}, ')
        options.output.write_text(lines + "\n", encoding="utf-8")


def _version(entry: ModuleType) -> str | None:
    return getattr(import_module(entry.PACKAGE), "__version__", None)


if __name__ == "__main__":
    main()
