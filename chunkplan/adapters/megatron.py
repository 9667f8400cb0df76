"""A scheduler of dynamic context parallelism for Megatron Core (`dev`), and so for verl 0.9.1 and Megatron-Bridge.

`install()` puts it in place of `DefaultDynamicCPScheduler`, whose data movement it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.datasets import data_schedule

from chunkplan.adapters.balance import token_counts
from chunkplan.cost.model import CostModel
from chunkplan.planning.rounds import group_sizes, group_times, plan_rounds


class ChunkplanScheduler(data_schedule.DefaultDynamicCPScheduler):  # type: ignore[misc]
    """Megatron's scheduler with groups and micro-batches of `plan_rounds`.

    `cost`: the model by whose times ranks are even, for all instances; a 7B model on H100s unless `install` sets one.
    """

    cost = CostModel()

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """The ids of the sequences of each rank in each micro-batch, `[micro_batches][ranks]` lists, none empty.

        Raises:
            AssertionError: as Megatron's: a sequence needs more ranks than there are.
            ValueError: a length is no whole number from 1; or there are too few sequences for micro-batches that are a
                multiple of those of a virtual stage.
        """
        if not sample_id_seqlens:
            return []
        ids = [sample for sample, _ in sample_id_seqlens]
        tokens = token_counts([length for _, length in sample_id_seqlens])
        ranks, cap = self.dp_size * self.cp_size, self.max_seqlen_per_dp_cp_rank
        assert tokens.max() <= ranks * cap, (
            f"Sequence length {tokens.max()} requires CP size {-(-tokens.max() // cap)}, "
            f"but only {ranks} DPxCP ranks are available."
        )
        plan = plan_rounds(
            tokens,
            group_times(self.cost, tokens, group_sizes(ranks, self.min_cp_size)),
            ranks,
            cap,
            round_time=self.cost.chunk_ns,
            multiple=self.microbatch_group_size_per_vp_stage or 1,
            least_size=self.min_cp_size,
            most_sequences=self.max_num_seqs,
        )
        if plan is None:
            raise ValueError(
                f"found no micro-batches of {tokens.size} sequences on {ranks} ranks of {cap} tokens that are a "
                f"multiple of {self.microbatch_group_size_per_vp_stage or 1} and leave no rank empty; use more "
                "sequences a step, or fewer ranks"
            )
        return [[[ids[place] for place in rank] for rank in micro_batch] for micro_batch in plan]


def install(cost: CostModel | None = None) -> None:
    """Put the scheduler in place of Megatron's, and even ranks out by `cost`: call it before the data are loaded."""
    ChunkplanScheduler.cost = cost or ChunkplanScheduler.cost
    data_schedule.DefaultDynamicCPScheduler = ChunkplanScheduler
    data_schedule.scheduler_map["default_dynamic_cp"] = ChunkplanScheduler
