"""Bad batches of verl are refused by the exceptions of its own function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import rearrange_micro_batches


@pytest.mark.parametrize(
    ("lengths", "options", "kind", "message"),
    [
        ([5, 70], {}, AssertionError, "max_token_len must be greater than the sequence length"),
        ([5, 6, 7], {"force_group_size": 2}, AssertionError, "Batch size 3 must be divisible by force_group_size 2"),
        ([50, 60], {"force_group_size": 2}, ValueError, r"groups have up to 110 tokens.*raise max_token_len"),
        ([5, 0], {}, ValueError, "rows 0 or more.*leave out rows without tokens"),
        ([5, 6], {"min_num_micro_batch": 3}, ValueError, "a rank has 2 groups of 1 rows"),
        ([5, 6, 7], {"num_batches_divided_by": 4}, ValueError, "a rank has 3 groups of 1 rows"),
        ([], {}, AssertionError, "no rows"),
    ],
)
def test_bad_batches_are_refused(
    lengths: list[int], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    width = max(lengths, default=1)
    mask = torch.arange(width)[None] < torch.tensor(lengths, dtype=torch.long)[:, None]
    batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=[len(lengths)])
    with pytest.raises(kind, match=message):
        rearrange_micro_batches(batch, 64, **options)
