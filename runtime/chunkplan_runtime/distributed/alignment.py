"""Lets processes that gather weights layer by layer, for every chunk, always gather the same layer at the same time.

Processes that share weights take part in each other's gathers: a forward gathers the layers from first to last, a
backward from last to first. With K 1 every chunk has one forward that its backward follows at once; what differs is how
many of these pairs there are, and how many forwards of dependent chunks (`forward_kv`) come between. Processes that
have fewer run a padding token, forward or forward and backward, at the same time.

Where processes share a chunk, they exchange heads or pages of it within each of its layers, between two gathers. They
do so at the same time too, so that nobody waits for ever and all launch gathers and exchanges in one order: whatever
comes before a shared chunk is alike on all that share it (docs/context-parallel.md), and of two processes that have
the same to do next either both do it or both run a padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.execution.executor import Around

#: What a padding runs: a forward, or a forward and its backward.
Padding = Literal["forward", "pair"]


class Aligned:
    """Before each action of a step, runs the `paddings` that come next, by calling `run`."""

    def __init__(self, paddings: Iterable[Sequence[Padding]], run: Callable[[Padding], None]) -> None:
        self._paddings = iter(paddings)
        self._run = run

    def around(self, inner: Around) -> Around:
        """What `Executor.run` enters around an action: the paddings, then `inner`."""

        @contextmanager
        def padded(action: Action) -> Iterator[None]:
            self.finish()
            with inner(action):
                yield

        return padded

    def finish(self) -> None:
        """Run the paddings that come next: those of the next action, or after the last action the last ones."""
        for padding in next(self._paddings):
            self._run(padding)


def paddings_of(processes: Sequence[Sequence[Action]], where: str) -> list[list[list[Padding]]]:
    """The paddings that each process runs before each of its actions, and after its last one.

    Raises:
        UsageError: a forward is not followed by its backward at once.
    """
    next_action = [0] * len(processes)
    paddings: list[list[list[Padding]]] = [[[] for _ in range(len(actions) + 1)] for actions in processes]
    while True:
        coming = [
            actions[place].op if place < len(actions) else None
            for actions, place in zip(processes, next_action, strict=True)
        ]
        if not any(coming):
            return paddings
        is_forward = "forward_kv" in coming
        for process, op in enumerate(coming):
            if op is None or (op == "forward_kv") != is_forward:
                paddings[process][next_action[process]].append("forward" if is_forward else "pair")
                continue
            if not is_forward:
                _check_pair(processes[process][next_action[process] :], where)
            next_action[process] += 1 if is_forward else 2


def _check_pair(actions: Sequence[Action], where: str) -> None:
    forward, *rest = actions[:2]
    if not rest or (rest[0].op, rest[0].chunk_id) != ("backward", forward.chunk_id):
        raise UsageError(
            f"the forward of chunk {forward.chunk_id} is not followed by its backward",
            where=where,
            hint="for --reshard build the plan with `--k 1`, or leave --reshard out",
        )
