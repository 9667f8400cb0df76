"""Sequences that begin alike: rollouts of prompts, and traces that branch at any token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from chunkplan import PlanConfig, build
from chunkplan.cost.model import CostModel
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.plan import Plan
from tests.support.plain import plain_cost

Sequences = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def rollouts(random: np.random.Generator, prompts: list[int], each: int, most: int) -> Sequences:
    """`each` answers of 1 to `most` tokens, which are the targets, to prompts of so many tokens; shuffled."""
    found: Sequences = []
    for length in prompts:
        prompt = random.integers(0, 1000, length)
        for size in random.integers(1, most + 1, each).tolist():
            answer = random.integers(0, 1000, size)
            found.append((np.concatenate([prompt, answer]), np.arange(length + size) >= length))
    return [found[place] for place in random.permutation(len(found))]


def traces(random: np.random.Generator, count: int, most: int) -> Sequences:
    """Sequences, each of which goes on from a token of an earlier one, or is a part of it; a few from none."""
    found: Sequences = []
    for _ in range(count):
        ids, target = np.empty(0, np.int64), np.empty(0, bool)
        if found and random.random() < 0.9:
            ids, target = found[random.integers(len(found))]
            stop = int(random.integers(1, ids.size + 1))
            ids, target = ids[:stop], target[:stop]
        own = int(random.integers(0 if ids.size else 1, most + 1))
        found.append(
            (np.concatenate([ids, random.integers(0, 4, own)]), np.concatenate([target, random.random(own) < 0.5]))
        )
    for _, target in found:
        target[0] = False
    return found


def build_trees(folder: Path, sequences: Sequences, cost: CostModel | None = None, **options: Any) -> Plan:
    """A plan of `sequences`, which share prefixes, in `folder`, beside its analysis."""
    (folder / "analysis").mkdir(parents=True)
    writer = AnalysisWriter(folder / "analysis")
    for record, (ids, target) in enumerate(sequences):
        writer.add(0, record, np.asarray(ids, np.int32), np.asarray(target, bool))
    sources = [{"path": "rollouts.jsonl", "schema": "text", "records": len(sequences)}]
    writer.finish(exact=True, sources=sources, rejected={}, max_token_id=999)
    config = PlanConfig(**{"share_prefixes": True, "chunk_size": 64, "k": 2, "global_batch": 16, **options})
    return build(folder / "analysis", folder / "plan", config, cost=cost or plain_cost())
