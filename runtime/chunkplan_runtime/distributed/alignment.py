"""Lets processes that gather weights layer by layer, for every chunk, always gather the same layer at the same time.

Processes that share weights take part in each other's gathers: a forward gathers the layers from first to last, a
backward from last to first. Where chunk counts are equal and K is 1, every chunk has one forward that its backward
follows at once; what differs is how many forwards of dependent chunks (`forward_kv`) come between. Processes that have
fewer there run a padding token forward instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.execution.executor import Around


class Aligned:
    """Before each action of a step, runs as many `paddings` as come next, by calling `run`."""

    def __init__(self, paddings: Iterable[int], run: Callable[[], None]) -> None:
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
        for _ in range(next(self._paddings)):
            self._run()


def padding_forwards(processes: Sequence[Sequence[Action]], where: str) -> list[list[int]]:
    """How many padding forwards each process does before each of its actions, and after its last one.

    Raises:
        UsageError: they have unequal chunk counts, or a forward is not followed by its backward at once.
    """
    next_action = [0] * len(processes)
    padding = [[0] * (len(actions) + 1) for actions in processes]
    while True:
        coming = [
            actions[place].op if place < len(actions) else None
            for actions, place in zip(processes, next_action, strict=True)
        ]
        if "forward_kv" in coming:
            for process, op in enumerate(coming):
                if op == "forward_kv":
                    next_action[process] += 1
                else:
                    padding[process][next_action[process]] += 1
            continue
        if not any(coming):
            return padding
        if None in coming:
            raise UsageError(
                "the data-parallel ranks have different numbers of chunks",
                where=where,
                hint="for --reshard build the plan with `--equal-chunks`, or leave --reshard out",
            )
        for process, actions in enumerate(processes):
            forward, *rest = actions[next_action[process] : next_action[process] + 2]
            if not rest or (rest[0].op, rest[0].chunk_id) != ("backward", forward.chunk_id):
                raise UsageError(
                    f"the forward of chunk {forward.chunk_id} is not followed by its backward",
                    where=where,
                    hint="for --reshard build the plan with `--k 1`, or leave --reshard out",
                )
            next_action[process] += 2
