"""Megatron Core (`dev`): `DefaultDynamicCPScheduler`, groups that change with every micro-batch."""

from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "shared", "megatron.core"


def plan(step: Step) -> Plan:
    """Plan groups of ranks."""
    scheduler = DefaultDynamicCPScheduler(step.cap, 1, step.ranks, None)
    return scheduler.get_groups_and_subsamples(list(enumerate(step.lengths)))
