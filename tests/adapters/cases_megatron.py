"""Bad input of the scheduler for Megatron, and what it gives where it can."""

from __future__ import annotations

import pytest
from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler, scheduler_map

from chunkplan.adapters.megatron import ChunkplanScheduler


def scheduler(ranks: int = 4, group: int | None = None) -> ChunkplanScheduler:
    assert DefaultDynamicCPScheduler is scheduler_map["default_dynamic_cp"] is ChunkplanScheduler
    return DefaultDynamicCPScheduler(64, 1, ranks, group)


@pytest.mark.parametrize(
    ("lengths", "group", "kind", "message"),
    [
        ([5, 0], None, ValueError, r"lengths\[1\] is 0, expected 1 .*; leave out sequences"),
        ([5, -2], None, ValueError, r"lengths\[1\] is -2, expected 1"),
        ([5, 2.5], None, ValueError, "no list of whole numbers; give the tokens"),
        ([5, 257], None, AssertionError, "Sequence length 257 requires CP size 5, but only 4 DPxCP ranks"),
        ([5], 2, ValueError, "no micro-batches of 1 sequences on 4 ranks .* multiple of 2 .*; use more sequences"),
    ],
)
def test_bad_input_is_refused(lengths: list[int], group: int | None, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        scheduler(group=group).get_groups_and_subsamples(list(enumerate(lengths)))


def test_more_ranks_than_sequences_share_them_and_nothing_has_no_micro_batches() -> None:
    assert scheduler().get_groups_and_subsamples([("a", 9)]) == [[["a"]] * 4]
    assert scheduler().get_groups_and_subsamples([]) == []
