"""NeMo-RL: `ModifiedFirstFitDecreasingPacker`, its default, with a number of bins that the ranks divide."""

from nemo_rl.data.packing import PackingAlgorithm, get_packer

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "nemo_rl"


def plan(step: Step) -> Plan:
    """Deal its bins to the ranks in turn, as `shard_by_batch_size` does."""
    packer = get_packer(
        PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING,
        step.cap,
        min_bin_count=step.ranks,
        bin_count_multiple=step.ranks,
    )
    bins = packer.pack(step.lengths)
    return [bins[first : first + step.ranks] for first in range(0, len(bins), step.ranks)]
