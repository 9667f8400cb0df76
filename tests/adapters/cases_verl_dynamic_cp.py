"""verl takes micro-batches of our scheduler of dynamic context parallelism on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.dynamic_cp_scheduler import (
    DCP_GROUP_LEADER,
    DCP_LOCAL_NUM_TOKENS,
    DCP_SAMPLE_IDS,
    DynamicCPScheduler,
    get_megatron_dynamic_cp_scheduler_cls,
)

from chunkplan.adapters.megatron import ChunkplanScheduler


class Ranks:
    """The group of all ranks, as one of them sees it."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 2), (4, 2), (3, 2)])
def test_every_sample_is_led_once_and_its_tokens_are_all_on_the_ranks_of_its_group(dp: int, cp: int) -> None:
    lengths = np.random.default_rng(dp).lognormal(3, 1, 40).astype(int).clip(1, 64 * dp * cp).tolist()
    inputs = torch.nested.as_nested_tensor([torch.arange(each) for each in lengths], layout=torch.jagged)
    batch = TensorDict({"input_ids": inputs, "sample": torch.arange(len(lengths))}, batch_size=[len(lengths)])
    assert get_megatron_dynamic_cp_scheduler_cls() is ChunkplanScheduler
    scheduler = DynamicCPScheduler(max_seqlen_per_dp_cp_rank=64, dp_size=dp, cp_size=cp)
    led: list[int] = []
    tokens = 0
    counts = set()
    for rank in range(dp * cp):
        micro_batches = scheduler.schedule(batch, Ranks(dp * cp, rank), tp_size=1)
        counts.add(len(micro_batches))
        for each in micro_batches:
            ids = tensordict_utils.get_non_tensor_data(each, DCP_SAMPLE_IDS, None)
            assert each["sample"].tolist() == ids
            led += ids if tensordict_utils.get_non_tensor_data(each, DCP_GROUP_LEADER, None) else []
            tokens += tensordict_utils.get_non_tensor_data(each, DCP_LOCAL_NUM_TOKENS, None)
    assert sorted(led) == list(range(len(lengths))) and tokens == sum(lengths) and len(counts) == 1
