"""Drop-in functions for `verl.utils.seqlen_balancing` of verl 0.9, put in place by `install()`."""

from __future__ import annotations

from typing import Any

from chunkplan.adapters.balance import balance, balance_in_fewest, spread


def install() -> None:
    """Put the functions of this module in place of verl's: call it in every process before training begins."""
    from verl.utils import seqlen_balancing

    seqlen_balancing.get_seqlen_balanced_partitions = get_seqlen_balanced_partitions
    seqlen_balancing.rearrange_micro_batches = rearrange_micro_batches


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partitions of the places in `seqlen_list`, ascending in each, whose largest sum is as small as possible.

    Raises:
        AssertionError: as verl's: too few items, or no multiple of `k_partitions` where all get as many.
        ValueError: an item is no number from 0.
    """
    num_items = len(seqlen_list)
    assert k_partitions >= 1 and k_partitions % 1 == 0, f"k_partitions:[{k_partitions}] is no whole number from 1"
    assert num_items >= k_partitions, f"number of items:[{num_items}] < k_partitions:[{k_partitions}]"
    assert not equal_size or num_items % k_partitions == 0, f"{num_items} % {k_partitions} != 0"
    found = balance([1] * num_items, seqlen_list, k_partitions, 1, num_items, equal_sequences=equal_size)
    assert found is not None  # there is no cap that could be in the way
    return [micro_batch for (micro_batch,) in found]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Micro-batches of a TensorDict, none of more than `max_token_len` tokens, and the rows of each.

    As few as hold the rows, of work as even as that allows; `force_group_size` consecutive rows stay together.

    Raises:
        AssertionError: a row is longer than `max_token_len`, or rows are no multiple of `force_group_size`.
        ValueError: on every process of `dp_group`: there are not enough rows on one of them for as many micro-batches
            as another needs, or a group of rows is too long, or a row has no tokens.
    """
    import torch
    from torch import distributed
    from verl.utils import seqlen_balancing, tensordict_utils
    from verl.utils.device import get_device_name

    input_ids = batch["input_ids"]
    lengths = input_ids.offsets().diff() if input_ids.is_nested else batch["attention_mask"].sum(dim=1)
    assert len(lengths), "the batch has no rows; leave it out"
    widest = int(lengths.max()) if input_ids.is_nested else batch["attention_mask"].shape[-1]
    assert max_token_len >= widest, (
        f"max_token_len must be greater than the sequence length. Got {max_token_len=} and max_seq_len={widest}"
    )
    assert len(lengths) % force_group_size == 0, (
        f"Batch size {len(lengths)} must be divisible by force_group_size {force_group_size}"
    )
    lengths = lengths.long().cpu()
    work = seqlen_balancing.calculate_workload(lengths).view(-1, force_group_size).sum(dim=1).tolist()
    tokens = lengths.view(-1, force_group_size).sum(dim=1).tolist()

    multiple = num_batches_divided_by or 1
    found = None
    if lengths.min() >= 1 and max(tokens) <= max_token_len:
        found = balance_in_fewest(tokens, work, 1, max_token_len, least=min_num_micro_batch or 1, multiple=multiple)
    count, is_lost = (0, 1) if found is None else (len(found[0]), 0)
    fewest_rows = len(tokens)
    if distributed.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        agreed = torch.tensor([count, is_lost, -fewest_rows], device=get_device_name())
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=dp_group)
        count, is_lost, fewest_rows = (int(each) for each in agreed.tolist())
        fewest_rows = -fewest_rows
    if is_lost or count > fewest_rows:
        raise ValueError(
            f"cannot satisfy max_token_len {max_token_len} with the same number of micro-batches on all ranks: "
            f"{count or 'too many'} are needed, and a rank has {fewest_rows} groups of {force_group_size} rows (here "
            f"groups have up to {max(tokens)} tokens, rows {lengths.min()} or more); raise max_token_len, or leave out "
            "rows without tokens"
        )
    groups = spread(tokens, work, count, max_token_len)
    if use_dynamic_bsz_balance:  # lighter ones at both ends, where the bubbles of a pipeline are
        groups.sort(key=lambda group: (-sum(work[each] for each in group), group[0]))
        groups = groups[::2][::-1] + groups[1::2]
    rows = [
        [row for group in each for row in range(group * force_group_size, (group + 1) * force_group_size)]
        for each in groups
    ]
    return [tensordict_utils.index_select_tensor_dict(batch, each) for each in rows], rows
