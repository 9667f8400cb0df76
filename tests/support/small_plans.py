"""Small plans of every kind, of lengths that are split, packed and left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import MemoryRates
from chunkplan.planfile.plan import Plan, PlanStep
from tests.support.plain import plain_cost

LENGTHS = np.array([7, 900, 30, 64, 65, 128, 1, 300, 12, 250, 40, 2, 2000, 9, 99, 100, 33, 3, 700, 5, 21])
CONFIGS: dict[str, dict[str, Any]] = {
    "one rank, tails shared": {"k": 1},
    "pipelines": {"k": 2, "dp": 2, "pp": 2},
    "equal counts": {"k": 1, "dp": 3, "equal_chunks": True},
    "more ranks than sequences": {"k": 1, "dp": 8, "global_batch": 3},
    "interleaved": {"k": 2, "pp": 2, "schedule": "interleaved", "dp": 2},
    "a V": {"k": 1, "pp": 3, "schedule": "zero-bubble-v"},
}


def built(folder: Path, lengths: Any, cost: CostModel | None = None, **config: Any) -> Plan:
    np.save(folder / "lengths.npy", lengths)
    settings = {"chunk_size": 64, "global_batch": 7, "epochs": 2, "cp": "off", **config}
    cost = cost or plain_cost()
    return chunkplan.build(folder / "lengths.npy", folder / "plan", PlanConfig(**settings), cost=cost, workers=1)


def by_tokens(tokens: Any) -> MemoryRates:
    """What stages hold, if each token of a kind takes as much: `tokens` [pp, 8]."""
    each = np.asarray(tokens, np.float64)
    gradients = np.stack([each[:, 7], np.zeros(len(each)), np.full(len(each), np.inf)], axis=1)[:, None]
    return MemoryRates(each[:, :7].copy(), gradients, np.zeros((len(each), 1, 2)), 1, np.zeros(3), 1)


def with_late_rank(plan: Plan) -> PlanStep:
    """The step of a plan of two ranks, in which rank 1 does all that it has for itself before it meets rank 0."""
    [step] = plan.iter_steps()
    own = {chunk.chunk_id for chunk in step.chunks[1] if chunk.cp_size == 1}
    assert own and len(own) < len(step.chunks[1])
    late = sorted(step.actions[1, 0], key=lambda action: action.chunk_id not in own)
    return replace(step, actions={**step.actions, (1, 0): late})
