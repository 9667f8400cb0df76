"""The invariants of steps by name: which sequences are in each, and how many; see `checks_chunks`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.arrays import Int64Array, sum_runs
from chunkplan.errors import UsageError
from chunkplan.planning.selection import check_selection
from chunkplan.validation.chunk_columns import ChunkColumns, Violation


def check_steps(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Steps run 0.. without gaps over all epochs; batches are as configured; only an epoch's last one may be short.

    Of groups steps are as full as whole groups allow.
    """
    steps, config, num_steps = columns.steps, columns.config, columns.num_steps
    try:
        check_selection(columns.analysis, config)
    except UsageError as error:
        yield Violation("", f"the plan's config does not fit the analysis: {error.message}")
    num_beginnings = columns.per_chunk((columns.start == 0) & (columns.end > 0))  # [num_chunks]
    actual = sum_runs(num_beginnings, columns.step_chunks)  # [num_steps], occurrences, each by its first segment
    if (group := columns.analysis.group) is not None:
        yield from _check_group_steps(columns, actual, group)
        return
    full, rest = np.divmod(np.array([size for size, _ in columns.epochs], np.int64), config.global_batch)
    is_kept = (rest > 0) & (config.last_batch == "keep")
    per_epoch = full + is_kept
    if per_epoch.size < config.epochs or per_epoch.sum() != num_steps:
        more = " or more" if per_epoch.size < config.epochs else ""
        yield Violation("", f"{num_steps} steps, expected {per_epoch.sum()}{more}")
    epochs = np.repeat(np.arange(per_epoch.size), per_epoch)
    bad = (steps["step"] != np.arange(num_steps)) | (steps["epoch"] != epochs)
    yield columns.at_step(bad, lambda row: "step or epoch is out of order")
    is_short = np.diff(epochs, append=-1).astype(bool) & is_kept[epochs]
    expected = np.where(is_short, rest[epochs], config.global_batch)
    yield columns.at_step(
        (actual != expected) | (steps["num_sequences"] != expected),
        lambda row: f"{actual[row]} sequences ({steps['num_sequences'][row]} stated), expected {expected[row]}",
    )


def _check_group_steps(columns: ChunkColumns, actual: Int64Array, group: Int64Array) -> Iterator[Violation | None]:
    """The same where sequences come in groups: a step has as many as fit, and an epoch leaves out no more than a step.

    `actual`: sequences of each step, int64 [num_steps]; `group`: as in `Analysis`.
    """
    steps, config = columns.steps, columns.config
    yield columns.at_step(
        (actual != steps["num_sequences"]) | (actual < 1) | (actual > config.global_batch),
        lambda row: f"{actual[row]} sequences ({steps['num_sequences'][row]} stated), at most {config.global_batch}",
    )
    epochs = steps["epoch"].astype(np.int64)
    bad = (steps["step"] != np.arange(columns.num_steps)) | ~np.isin(np.diff(epochs, prepend=0), (0, 1))
    yield columns.at_step(bad, lambda row: "step or epoch is out of order")
    of_sequences = np.bincount(group)[group].astype(np.int32)  # [num_sequences], of the group of each
    first = columns.segments[columns.step_chunks[:-1]]
    largest = np.maximum.reduceat(columns.per_segment(of_sequences), first)  # [num_steps]
    room, is_last = config.global_batch - actual, np.diff(epochs, append=-1) != 0
    yield columns.at_step(
        ~is_last & (room >= np.roll(largest, -1)),
        lambda row: f"{actual[row]} sequences, and every group of the next step would fit too",
    )
    found = np.bincount(epochs, actual, len(columns.epochs)).astype(np.int64)
    for epoch, (size, _) in enumerate(columns.epochs):
        smallest = int(of_sequences[columns.occurrences(epoch) > 0].min(initial=config.global_batch))
        least = size if config.last_batch == "keep" else size - (config.global_batch - smallest)
        if not least <= found[epoch] <= size:
            yield Violation("", f"epoch {epoch} has {found[epoch]} sequences, expected {size}")
        if config.last_batch == "drop" and found[epoch] == size:
            ends = is_last & (epochs == epoch)
            yield columns.at_step(ends & (room >= smallest), lambda row: f"a short step of {actual[row]} sequences")
    if len(columns.epochs) < config.epochs or found.size > config.epochs:
        yield Violation("", f"steps of {len(columns.epochs)} epochs, expected {config.epochs}")


def check_whole_groups(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Sequences of one group are in one step, as often as each other."""
    group = columns.analysis.group
    if group is None:
        return
    begins = np.flatnonzero((columns.start == 0) & (columns.end > 0))
    ids, step = columns.sequence_id[begins], columns.chunks["step"][columns.chunk_of(begins)].astype(np.int64)
    keys, counts = np.unique(step * group.size + ids, return_counts=True)  # of each sequence in each step
    of_step, sequence = np.divmod(keys, group.size)
    places, which = np.unique(of_step * group.size + group[sequence], return_inverse=True)  # each group in each step
    most = np.zeros(places.size, np.int64)
    np.maximum.at(most, which, counts)
    expected = most * np.bincount(group)[places % group.size]
    broken = places[np.bincount(which, counts, places.size) != expected]
    yield columns.at(
        columns.holds(begins[np.isin(step * group.size + group[ids], broken)]),
        lambda row: "a sequence without the others of its pair or group, which belong in the same step",
    )


def check_equal_chunks(columns: ChunkColumns) -> Iterator[Violation | None]:
    """All ranks of a step have as many chunks and sequences as the configuration asks for, none empty."""
    config, num_chunks = columns.config, np.diff(columns.rank_chunks).reshape(columns.num_steps, -1)
    most = num_chunks.max(axis=1, keepdims=True)
    expected = np.full_like(most, config.micro_batches) if isinstance(config.micro_batches, int) else most
    wrong = np.argwhere((num_chunks != expected) & (config.equal_chunks or config.micro_batches is not None)).tolist()
    for step, rank in wrong[:1]:
        message = f"{num_chunks[step, rank]} chunks, expected {expected[step, 0]} on every rank of the step"
        yield Violation("", message, step, rank, count=len(wrong))
    if config.micro_batches is not None:
        yield columns.at(np.diff(columns.segments) == 0, lambda row: "a micro-batch without a sequence")
    if config.equal_sequences:
        sizes = sum_runs(np.diff(columns.segments), columns.rank_chunks).reshape(num_chunks.shape)
        yield columns.at_step((sizes != sizes[:, :1]).any(axis=1), lambda row: f"unequal {sizes[row]} sequences")
