"""What stages hold after each action, by the one table that says what every op adds and releases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chunkplan.operations import OPS
from chunkplan.planfile.chunks import chunks_without_segments, read_chunks
from chunkplan.planning.chunks import slice_of
from chunkplan.reporting.plan_report import plan_report
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.holdings import (
    ACTIVATIONS,
    CHANGES,
    INPUTS,
    KV,
    KV_GRADIENTS,
    LAST_LAYER,
    PENDING,
    START,
    kv_tokens,
    peak_retained,
    peak_snapshots,
    stage_holdings,
)
from tests.support.small_plans import built, by_tokens


@pytest.mark.parametrize("backward", [("backward",), ("backward_input", "backward_weight")])
@pytest.mark.parametrize("forward", [("forward",), ("forward_kv", "recompute")])
def test_whatever_a_chunk_goes_through_nothing_of_it_is_held_at_the_end(
    forward: tuple[str, ...], backward: tuple[str, ...]
) -> None:
    life = [OPS.index(op) for op in (*forward, *backward)]
    held = CHANGES[life].reshape(-1, 5).cumsum(axis=0)
    assert not held[-1].any()
    assert held.min() == 0
    waits = int(forward[0] == "forward_kv")
    assert held.max(axis=0).tolist() == [1, waits, 1, int(len(backward) == 2), waits]
    assert np.all(held[:, PENDING] <= held[:, ACTIVATIONS])


def test_a_group_is_held_as_its_actions_say() -> None:
    """Chunks of 8 and 5 tokens on the second of two stages; the first is recomputed, and a standalone one of 3."""
    done = [("forward", 0), ("backward", 0), ("forward_kv", 1), ("forward", 2), ("backward", 2), ("recompute", 1)]
    done.append(("backward", 1))
    stages = np.array([0, 0, len(done)])
    actions = Actions(
        np.array([OPS.index(op) for op, _ in done], np.int8),
        np.array([chunk for _, chunk in done], np.int32),
        np.zeros(len(done), np.int32),
        stages,
    )
    chunks = chunks_without_segments([0, 3], [3, 8, 5], [-1, 0, 0], [True, False, True])
    held = stage_holdings(chunks, kv_tokens(chunks), actions, 0, 1, 2)
    assert held[:, START, ACTIVATIONS].tolist() == [3, 3, 0, 5, 5, 8, 8]
    assert held[:, START, INPUTS].tolist() == [0, 0, 8, 8, 8, 0, 0]
    assert held[:, START, KV].tolist() == [0, 0, 8, 13, 13, 13, 13]
    assert not held[-1, 1].any()
    assert peak_retained(chunks, actions).tolist() == [0, 8]
    for kind, most in ((ACTIVATIONS, 8), (INPUTS, 8), (KV, 13), (LAST_LAYER, 5), (KV_GRADIENTS, 13)):
        assert peak_snapshots(chunks, actions, by_tokens(np.tile(np.eye(8)[kind], (2, 1))))[0, 1, kind] == most


@pytest.mark.parametrize(
    ("gradient_bytes", "moment"),
    [
        (1, [10, 0, 25, 0, 0, 0, 0, 0]),  # two chunks, before the backward of the last one
        (3, [5, 0, 25, 0, 0, 0, 5, 25]),  # as that one ends
    ],
)
def test_gradients_of_keys_come_as_the_activations_of_the_last_chunk_go(gradient_bytes: int, moment: list[int]) -> None:
    """Five chunks of 5 tokens, K 2, after a standalone one: never are all gradients and both chunks there."""
    done = [("forward", 0), ("backward", 0), *(("forward_kv", chunk) for chunk in (1, 2, 3)), ("forward", 4)]
    done += [("forward", 5), ("backward", 5), ("backward", 4)]
    done += [(op, chunk) for chunk in (3, 2, 1) for op in ("recompute", "backward")]
    actions = Actions(
        np.array([OPS.index(op) for op, _ in done], np.int8),
        np.array([chunk for _, chunk in done], np.int32),
        np.zeros(len(done), np.int32),
        np.array([0, len(done)]),
    )
    chunks = chunks_without_segments([0, 6], [5] * 6, [-1, *[0] * 5], [True, False, False, False, True, True])
    token_bytes = np.array([[10.0, 0, 1, 0, 0, 0, 1, gradient_bytes]])
    assert peak_snapshots(chunks, actions, by_tokens(token_bytes))[0, 0].tolist() == moment


WAYS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4), (6, 2)]


@pytest.mark.parametrize(("size", "heads"), WAYS)
@pytest.mark.parametrize("tokens", [64, 1000, 4099])
def test_a_rank_that_shares_a_chunk_keeps_as_much_of_keys_and_values_as_it_has_tokens(
    size: int, heads: int, tokens: int
) -> None:
    """By pages it keeps those of its own tokens; by heads, some of the heads' of all tokens of its group of ranks."""
    own = [
        sum(end - start for start, end in (slice_of(tokens, size, heads, member, half) for half in halves(size, heads)))
        for member in range(size)
    ]
    assert sum(own) == tokens
    for member, num_tokens in enumerate(own):
        group = own[member // heads * heads : (member // heads + 1) * heads]
        kept = sum(group) / heads  # tokens times the share of the heads
        assert abs(num_tokens - kept) < len(halves(size, heads))
        assert abs(num_tokens - tokens / size) <= 2 * len(halves(size, heads))


def halves(size: int, heads: int) -> range:
    return range(1 if size == heads else 2)


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_ranks_that_share_a_sequence_hold_its_keys_and_values_together(tmp_path: Path, dp: int) -> None:
    """K 1: activations are of one chunk of ChunkSize whatever the number of ranks, keys and values of all chunks."""
    tokens = 100_000
    plan = built(tmp_path, [tokens], chunk_size=2000, k=1, dp=dp, epochs=1, cp="auto")
    chunks = read_chunks(plan.chunks())
    assert np.all(chunks.cp_size == dp)
    held = np.add.reduceat(kv_tokens(chunks)[START], chunks.rank_chunks[:-1])
    assert held.sum() == tokens
    num_chunks = np.diff(chunks.rank_chunks)
    assert np.all(np.abs(held - tokens / dp) <= 2 * num_chunks)
    memory = plan_report(plan).memory
    assert memory is not None
    shape = plan.cost.shape
    kept = memory.memory.kv / (shape.total(lambda layer: layer.cached_width) * plan.cost.num_bytes)
    assert kept == pytest.approx(held.max())
    assert plan_report(plan).summary.peak_retained_tokens <= 2000
