"""Writes docs/balance.md from benchmarks/measured/balance, the newest output of `python -m benchmarks.balance`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from page_writing import code, paragraph, table, write_page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.balance.__main__ import summary  # noqa: E402

MEASURED = ROOT / "benchmarks" / "measured" / "balance"
HEAD = ("entry", "version", "end", "best", "rounds", "best", "ms", "faults")


def parts() -> Iterator[str]:
    """The page, from top to bottom."""
    found = json.loads(max(MEASURED.glob("*.json")).read_text(encoding="utf-8"))
    steps, entries = found["steps"], found["entries"]
    yield "# Balance of a step, beside other planners"
    yield paragraph(
        f"""One optimizer step is planned by us and by others, each called as installed, and timed by one
        [cost model](cost-model.md) (H100). Steps: three frozen files of lengths x 8, 16, 32, 64 ranks x caps of 8,192
        and 32,768 tokens x 1, 4 stages x three models; {len(steps["whole"])} with every sequence on one rank,
        {len(steps["shared"])} in which ranks may share it."""
    )
    yield code('python -m benchmarks.balance --only whole "dp 8," --entries trl chunkplan_whole', "sh")
    yield paragraph(
        """*End*, *rounds*: when the last rank is done, over a proved bound (`benchmarks/balance/scoring.py`), median to
        worst, where ranks wait for each other at the end, or after every micro-batch; trainers do one or the other, or
        some of both. Pipelines run all forwards, then all backwards. *Best*: steps in which no other is done sooner.
        Plans with a fault do not count: a micro-batch above the cap, a token left out, ranks with unequal numbers of
        micro-batches. *ms*: to plan a step, processor time, median."""
    )
    for track, results in steps.items():
        rows = []
        for name, _, end, end_worst, end_best, rounds, rounds_worst, rounds_best, ms, faults in summary(track, results):
            pairs = ((end, end_worst), (rounds, rounds_worst))
            spans = [f"{middle}-{worst}" if middle else "" for middle, worst in pairs]
            rows.append([name, entries[name]["version"] or "", spans[0], end_best, spans[1], rounds_best, ms, faults])
        yield f"## {track.capitalize()}"
        yield table(HEAD, rows)
    certified = {dp: [0, 0] for dp in (8, 16)}
    for name, of_step in steps["whole"].items():
        for dp, counts in certified.items():
            if f"dp {dp}," in name and "pp 1," in name:
                counts[0] += of_step["chunkplan_whole"]["after_step"] <= 1.02
                counts[1] += 1
    yield paragraph(
        f"""On one stage ours is at most 2% over the bound at the end in {certified[8][0]} of {certified[8][1]} whole
        steps on 8 ranks, {certified[16][0]} of {certified[16][1]} on 16. On four it tries up to six numbers of
        micro-batches. `transformers` has no cap. {found["machine"]["processor"]}."""
    )
    yield "## Add an entry"
    yield paragraph(
        """Put a file of at most 40 lines into `benchmarks/balance/entries`; if its import fails it is left out.
        `plan(step)` gives `[micro_batches][ranks]` lists of places in `step.lengths`; `step.work` has times:"""
    )
    yield code(
        'from planner import assign\n\nTRACK, PACKAGE = "whole", "planner"\n\n\ndef plan(step):\n'
        "    return assign(step.lengths, step.ranks, step.cap)",
        "python",
    )


if __name__ == "__main__":
    write_page("balance.md", parts())
