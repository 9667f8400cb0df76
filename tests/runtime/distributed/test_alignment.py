"""Processes that gather weights for every chunk run forwards and backwards in the same order, padded where needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.distributed.alignment import Padding, paddings_of


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


def gathers(actions: list[Action], paddings: list[list[Padding]]) -> list[tuple[str, Action | None]]:
    """In which direction weights are gathered, one after another, and for which action; None for a padding."""
    order: list[tuple[str, Action | None]] = []
    for action, before in zip([*actions, None], paddings, strict=True):
        order += [(way, None) for padding in before for way in (["up"] if padding == "forward" else ["up", "down"])]
        if action is not None:
            order.append(("down" if action.op == "backward" else "up", action))
    return order


@st.composite
def processes(draw: st.DrawFn) -> list[list[int]]:
    """Group sizes of some processes."""
    return draw(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4))


@given(processes())
def test_all_gather_in_the_same_order(sizes: list[list[int]]) -> None:
    actions = [actions_of(own) for own in sizes]
    paddings = paddings_of(actions, "step 0")
    orders = [gathers(own, before) for own, before in zip(actions, paddings, strict=True)]
    assert len({tuple(way for way, _ in order) for order in orders}) == 1
    assert [[action for _, action in order if action] for order in orders] == actions
    if all(own == sizes[0] for own in sizes):
        assert not any(map(any, paddings)), "what is alike needs no padding"


@given(st.lists(st.integers(1, 4), max_size=3), processes(), processes())
def test_what_processes_share_they_do_at_the_same_gather(
    shared: list[int], members: list[list[int]], others: list[list[int]]
) -> None:
    """Shared chunks come first on all that share them, whatever these and others do after."""
    actions = [actions_of(shared + own) for own in members] + [actions_of(own) for own in others]
    paddings = paddings_of(actions, "step 0")
    orders = [gathers(own, before) for own, before in zip(actions, paddings, strict=True)][: len(members)]
    together = len(actions_of(shared))
    places = [[place for place, (_, action) in enumerate(order) if action][:together] for order in orders]
    assert all(own == places[0] for own in places)


def test_kept_chunks_are_refused() -> None:
    kept = [Action("forward", 0, 0), Action("forward", 1, 0), Action("backward", 1, 0), Action("backward", 0, 0)]
    with pytest.raises(UsageError, match="forward of chunk 0 is not followed by its backward"):
        paddings_of([kept, kept], "step 3")
