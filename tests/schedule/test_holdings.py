"""What stages hold after each action, by the one table that says what every op adds and releases."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan.operations import OPS
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.holdings import (
    ACTIVATIONS,
    CHANGES,
    INPUTS,
    KV,
    START,
    fullest_moments,
    kv_tokens,
    peak_retained,
    stage_holdings,
)


@pytest.mark.parametrize("backward", [("backward",), ("backward_input", "backward_weight")])
@pytest.mark.parametrize("forward", [("forward",), ("forward_kv", "recompute")])
def test_whatever_a_chunk_goes_through_nothing_of_it_is_held_at_the_end(
    forward: tuple[str, ...], backward: tuple[str, ...]
) -> None:
    life = [OPS.index(op) for op in (*forward, *backward)]
    held = CHANGES[life].reshape(-1, 3).cumsum(axis=0)
    assert held[-1].tolist() == [0, 0, 0]
    assert held.min() == 0 and held.max(axis=0).tolist() == [1, int(forward[0] == "forward_kv"), 1]


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
    assert held[-1, 1].tolist() == [0, 0, 0]
    assert peak_retained(chunks, actions).tolist() == [0, 8]
    for kind, most in ((ACTIVATIONS, 8), (INPUTS, 8), (KV, 13)):
        assert fullest_moments(chunks, actions, np.tile(np.eye(3)[kind], (2, 1)))[0, 1, kind] == most
