"""Configurations and texts for tests of what a plan takes of an analysis."""

from __future__ import annotations

from hypothesis import strategies as st

from chunkplan.config.plan import PlanConfig
from chunkplan.planning.selection import expected_copies


def config(**options):
    return PlanConfig(chunk_size=1, k=1, **options)


def numbered(num_texts, first=0):
    """Texts that differ."""
    return [[first + text, 5] for text in range(num_texts)]


def held_out(analysis, holdout):
    return expected_copies(analysis, config(holdout=holdout, part="eval"), 0) > 0


def mix(weight, seed=0, **others):
    return config(mix={"data/a.jsonl": weight}, seed=seed, **others)


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=30)

shares = st.floats(0, 1, exclude_min=True, exclude_max=True)

numbers = st.integers(1, 40)
