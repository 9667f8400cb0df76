"""A profile as earlier releases had it: one rate of attention, and launches that nothing hides."""

from __future__ import annotations

from functools import partial

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from tests.support.places import GOLDEN

PLAIN = load_hardware(GOLDEN / "h100.toml")

#: A cost model on it.
plain_cost = partial(CostModel, hardware=PLAIN)
