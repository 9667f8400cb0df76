"""Megatron Core (`dev`): `DpBalancedScheduler`, which packs sequences in their order."""

from megatron.core.datasets.data_schedule import DpBalancedScheduler

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "megatron.core"


def plan(step: Step) -> Plan:
    """Without context parallelism."""
    scheduler = DpBalancedScheduler(step.cap, 1, step.ranks, None)
    return scheduler.get_groups_and_subsamples(list(enumerate(step.lengths)))
