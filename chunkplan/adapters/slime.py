"""A drop-in `build_dp_schedule` for `slime.utils.dp_schedule` of slime, put in place by `install()`."""

from __future__ import annotations

from typing import Any

from chunkplan.adapters.balance import balance, balance_in_fewest, token_counts


def install() -> None:
    """Put the function of this module in place of slime's: call it before rollouts are scheduled."""
    from slime.utils import dp_schedule

    dp_schedule.build_dp_schedule = build_dp_schedule


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Ranks and micro-batches of the samples of some rollouts: no micro-batch is over the cap, unless of one sample.

    As slime's: each step has `global_batch_size` rollouts, the last ones are left out; ranks have as many
    micro-batches, with virtual stages a multiple of their group. Here ranks are always even, and the cap holds with
    `balance_by_flops` too.

    Returns:
        The samples of each rank; of each of its micro-batches the places among these; the micro-batches of a rank in
        each step; the rollouts of each step.

    Raises:
        AssertionError: as slime's: there are too few rollouts, or too few samples in a step for its ranks.
        ValueError: a length is no whole number from 1.
    """
    dp, cp, vpp = (train_parallel_config[name] for name in ("dp_size", "cp_size", "vpp_size"))
    multiple = train_parallel_config["microbatch_group_size_per_vp_stage"] if vpp > 1 else 1
    size = args.max_tokens_per_gpu if args.use_dynamic_batch_size else args.micro_batch_size
    name = "max_tokens_per_gpu" if args.use_dynamic_batch_size else "micro_batch_size"
    assert isinstance(size, int) and size >= 1, f"{name} is {size}, expected a whole number from 1"
    assert global_batch_size >= 1, f"global_batch_size is {global_batch_size}, expected 1 or more"
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of.values())
    num_steps = len(rollouts) // global_batch_size
    assert num_steps >= 1, f"num_rollouts ({len(rollouts)}) < global_batch_size ({global_batch_size})"
    token_counts(total_lengths)

    partitions: list[list[int]] = [[] for _ in range(dp)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp)]
    num_microbatches = []
    for step in range(num_steps):
        of_step = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        samples = [sample for rollout in of_step for sample in rollout]
        where = f"step {step}: {len(samples)} samples"
        assert len(samples) >= dp, f"{where} < dp_size {dp}; each step needs at least one sample per rank"
        lengths = [total_lengths[sample] for sample in samples]
        work = _work(lengths, args)
        if args.use_dynamic_batch_size:
            cap = size * cp
            tokens = [min(length, cap) for length in lengths]  # a longer one has a micro-batch to itself
            found = balance_in_fewest(tokens, work, dp, cap, multiple=multiple)
            assert found is not None, (
                f"{where} do not make a multiple of {multiple} micro-batches on {dp} ranks; use a larger "
                "global_batch_size, or fewer ranks"
            )
        else:
            count = -(-len(samples) // size)
            assert count % (dp * multiple) == 0, (
                f"{where} in {count} micro-batches, no multiple of {dp} x {multiple}; change global_batch_size"
            )
            found = balance([1] * len(samples), work, dp, count // dp, size)
            assert found is not None  # the samples fill micro-batches of `size`, whatever their lengths
        num_microbatches.append(len(found[0]))
        found.sort(key=lambda micro_batches: -sum(work[place] for each in micro_batches for place in each))
        for rank, micro_batches in enumerate(found):
            for micro_batch in reversed(micro_batches):  # light ones first
                first = len(partitions[rank])
                partitions[rank] += [samples[place] for place in micro_batch]
                micro_batch_indices[rank].append(list(range(first, len(partitions[rank]))))
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * num_steps


def _work(lengths: list[int], args: Any) -> list[int]:
    """The FLOPs of each sample where slime is asked to balance these, else its tokens."""
    if not (args.balance_data or args.balance_by_flops):
        return lengths
    from slime.utils.flops_utils import calculate_fwd_flops

    return [calculate_fwd_flops([length], args) for length in lengths]
