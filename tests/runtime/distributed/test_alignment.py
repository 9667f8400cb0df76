"""Processes that gather weights for every chunk run forwards and backwards in the same order, padded where needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.distributed.alignment import padding_forwards


def actions_of(group_sizes: list[int]) -> list[Action]:
    """Algorithm 2 with K = 1: of groups of so many chunks, 1 for a standalone one."""
    actions: list[Action] = []
    first = 0
    for size in group_sizes:
        chunks = range(first, first + size)
        actions += [Action("forward_kv", chunk, 0) for chunk in chunks[:-1]]
        for chunk in reversed(chunks):
            actions += [
                Action("forward" if chunk == chunks[-1] else "recompute", chunk, 0),
                Action("backward", chunk, 0),
            ]
        first += size
    return actions


def gathers(actions: list[Action], padding: list[int]) -> list[str]:
    """In which direction weights are gathered, one after another."""
    order: list[str] = []
    for action, before in zip(actions, padding, strict=False):
        order += ["up"] * before + ["down" if action.op == "backward" else "up"]
    return order + ["up"] * padding[-1]


@st.composite
def processes(draw: st.DrawFn) -> list[list[int]]:
    """Group sizes of some processes, of the same number of chunks in all."""
    total = draw(st.integers(1, 12))

    def groups() -> list[int]:
        sizes: list[int] = []
        while sum(sizes) < total:
            sizes.append(draw(st.integers(1, total - sum(sizes))))
        return sizes

    return [groups() for _ in range(draw(st.integers(1, 4)))]


@given(processes())
def test_all_gather_in_the_same_order(sizes: list[list[int]]) -> None:
    actions = [actions_of(own) for own in sizes]
    padding = padding_forwards(actions, "step 0")
    assert len({tuple(gathers(own, pad)) for own, pad in zip(actions, padding, strict=True)}) == 1
    if all(own == sizes[0] for own in sizes):
        assert not any(map(any, padding)), "what is alike needs no padding"


def test_unequal_counts_and_kept_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="different numbers of chunks"):
        padding_forwards([actions_of([1, 1]), actions_of([1])], "step 3")
    kept = [Action("forward", 0, 0), Action("forward", 1, 0), Action("backward", 1, 0), Action("backward", 0, 0)]
    with pytest.raises(UsageError, match="forward of chunk 0 is not followed by its backward"):
        padding_forwards([kept, kept], "step 3")
