"""TRL: `pack_dataset`, best-fit decreasing, its rows dealt to the ranks in turn."""

import datasets
from trl import pack_dataset

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "trl"

datasets.disable_progress_bars()
datasets.disable_caching()


def plan(step: Step) -> Plan:
    """Tokens of a sequence are its number: TRL packs tokens, and says nothing of where they are from."""
    tokens = datasets.Dataset.from_dict({"input_ids": [[each] * size for each, size in enumerate(step.lengths)]})
    rows = [sorted(set(row)) for row in pack_dataset(tokens, step.cap, "bfd")["input_ids"]]
    rows += [[] for _ in range(-len(rows) % step.ranks)]
    return [rows[first : first + step.ranks] for first in range(0, len(rows), step.ranks)]
