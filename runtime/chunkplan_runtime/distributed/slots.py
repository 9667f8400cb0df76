"""What a process takes part in between its own actions: the slots of its stage in which others act.

A plan says in which slot of its stage each action is done where ranks share weights (docs/plan-format.md), and why
nobody waits for ever in them is in `chunkplan/schedule/alignment.py`. Processes walk through what is stored. What sums
gradients alone, and what goes forward alone, needs some of these slots, in the same order.

A process that runs several data-parallel ranks walks through the slots once for each of them: all processes run their
first ranks, then their second ones. A slot in which none of those acts is left out. So what holds of the plan holds of
each round, and nobody goes on to the next one before all of the last.

Where ranks share a chunk, they exchange heads or pages of it within each of its layers, between two fetches. They are
in the same slot then, so that all launch fetches, exchanges and sums in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from chunkplan.cost.model import Sharding
from chunkplan.errors import DataError
from chunkplan.operations import FORWARDS, MEETINGS
from chunkplan.planfile.plan import VALIDATE_HINT, Action, PlanStep
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.layout import RankLayout

#: What other processes do in a slot: its op, and the virtual stage.
Padding = tuple[str, int]


class Aligned:
    """Has a process take part in the slots between its actions, by calling `run` with each."""

    def __init__(self, paddings: Sequence[Sequence[Padding]], run: Callable[[Padding], None]) -> None:
        self._paddings = [list(before) for before in paddings]
        self._run = run
        self._next = 0

    def meet(self, action: Action | None) -> None:
        """Take part in all that comes before `action`, the next one; with None too, but it comes only later.

        A process that has sent something does so before it waits until that has arrived, as others may be unable to
        receive it before.
        """
        due = self._paddings[self._next]
        while due:
            self._run(due.pop(0))
        if action is not None:
            self._next += 1


def paddings_of(
    work: StepWork, layout: RankLayout, sharding: Sharding, *, only_forwards: bool = False
) -> list[list[Padding]]:
    """What the process of `layout` takes part in before each of its actions in a step, and after its last one.

    Raises:
        DataError: actions have no slots, or not such that processes can walk through them.
    """
    ops, rows = MEETINGS[sharding], layout.rows(work.plan.config.dp)
    paddings: list[list[Padding]] = [[]]
    for ranks in zip(*rows, strict=True):  # those that run at the same time, by process
        slots: dict[int, Padding] = {}
        for rank in ranks:
            for action, slot in _row(work.step, rank, layout.stage, only_forwards):
                if action.op in ops:
                    padding = ops[action.op], action.virtual_stage
                    if slots.setdefault(slot, padding) != padding:
                        raise _refusal(f"several ops in slot {slot}", work.step, rank, layout.stage)
        left = deque(sorted(slots))
        for action, slot in _row(work.step, ranks[layout.dp_rank], layout.stage, only_forwards):
            while left and left[0] < slot:
                paddings[-1].append(slots[left.popleft()])
            if action.op in ops:
                left.popleft()
            paddings.append([])
        paddings[-1] += [slots[slot] for slot in left]
    return paddings


def _row(step: PlanStep, rank: int, stage: int, only_forwards: bool) -> list[tuple[Action, int]]:
    """The actions of a stage of a rank with their slots."""
    actions, slots = step.actions.get((rank, stage), []), step.slots.get((rank, stage), [])
    if len(actions) != len(slots) or sorted({*slots}) != slots:
        raise _refusal("actions without slots that go up", step, rank, stage)
    pairs = zip(actions, slots, strict=True)
    return [pair for pair in pairs if not only_forwards or pair[0].op in FORWARDS]


def _refusal(message: str, step: PlanStep, rank: int, stage: int) -> DataError:
    return DataError(message, where=f"step {step.step}, rank {rank}, stage {stage}", hint=VALIDATE_HINT)
