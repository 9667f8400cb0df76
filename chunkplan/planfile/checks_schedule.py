"""The invariants of a schedule, for the stages of one rank in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chunkplan.planfile.order import BACKWARDS, FORWARDS, StuckError, execution_order
from chunkplan.planfile.plan import Action, Chunk
from chunkplan.planfile.schema import OPS

#: What is wrong, and the chunk it is wrong with, where there is one.
Complaint = tuple[str, int | None]


@dataclass(frozen=True)
class RankSchedule:
    """The chunks of a rank, in chunk_id order, and the actions of its stages."""

    chunks: list[Chunk]
    stages: list[list[Action]]
    config: dict[str, Any]

    def parts(self) -> list[tuple[int, int, list[Action]]]:
        """(stage, virtual_stage, its actions) of every model part, first to last."""
        num_virtual = 1 + max((action.virtual_stage for stage in self.stages for action in stage), default=0)
        return [
            (stage, virtual, [action for action in actions if action.virtual_stage == virtual])
            for virtual in range(num_virtual)
            for stage, actions in enumerate(self.stages)
        ]


def check_actions(rank: RankSchedule) -> Complaint | None:
    """Each chunk has exactly one first forward and one backward (or input before weight) on every model part."""
    num_actions = sum(map(len, rank.stages))
    for stage, everything in enumerate(rank.stages):
        for action in everything:
            if not 0 <= action.virtual_stage < num_actions:
                return f"stage {stage} names virtual stage {action.virtual_stage}", action.chunk_id
            if action.op not in OPS:
                return f"stage {stage} does `{action.op}`, expected one of {', '.join(OPS)}", action.chunk_id
    for stage, virtual, actions in rank.parts():
        seen: dict[int, list[str]] = {chunk.chunk_id: [] for chunk in rank.chunks}
        for action in actions:
            if action.chunk_id not in seen:
                return f"stage {stage} does `{action.op}` with a chunk that is not there", action.chunk_id
            seen[action.chunk_id].append(action.op)
        for chunk_id, ops in seen.items():
            kinds = [op for op in ops if op != "recompute"]
            whole = len(kinds) == 2 and kinds[0] in FORWARDS and kinds[1] == "backward"
            split = len(kinds) == 3 and kinds[0] in FORWARDS and kinds[1:] == ["backward_input", "backward_weight"]
            if not (whole or split):
                return f"model part ({stage}, {virtual}) does {ops}, expected one forward, then one backward", chunk_id
    return None


def check_recompute(rank: RankSchedule) -> Complaint | None:
    """keeps_activations exactly where the first op is `forward`; recompute exactly where not, right before backward."""
    keeps = {chunk.chunk_id: chunk.keeps_activations for chunk in rank.chunks}
    for stage, _, actions in rank.parts():
        previous = Action("", -1, 0)
        for action in actions:
            if action.op in FORWARDS and (action.op == "forward") != keeps[action.chunk_id]:
                return f"stage {stage} does `{action.op}`, keeps_activations says otherwise", action.chunk_id
            recomputed = previous.op == "recompute" and previous.chunk_id == action.chunk_id
            if action.op in BACKWARDS and recomputed == keeps[action.chunk_id]:
                wanted = "no recompute" if recomputed else "a recompute directly before its backward"
                return f"stage {stage}: expected {wanted}", action.chunk_id
            if previous.op == "recompute" and not (recomputed and action.op in BACKWARDS):
                return f"stage {stage} recomputes without a backward directly after", previous.chunk_id
            previous = action
        if previous.op == "recompute":
            return f"stage {stage} recomputes without a backward directly after", previous.chunk_id
    return None


def check_part_order(rank: RankSchedule) -> Complaint | None:
    """Part i+1 of a group forwards after part i, and part i backwards after part i+1, on every model part."""
    group_of = {chunk.chunk_id: chunk for chunk in rank.chunks if chunk.group_id is not None}
    for stage, _, actions in rank.parts():
        next_forward: dict[int, int] = {}
        next_backward: dict[int, int] = {}
        for action in actions:
            chunk = group_of.get(action.chunk_id)
            if chunk is None or chunk.group_id is None:
                continue
            if action.op in FORWARDS:
                if chunk.group_index != next_forward.get(chunk.group_id, 0):
                    return f"stage {stage} forwards part {chunk.group_index} before an earlier part", action.chunk_id
                next_forward[chunk.group_id] = chunk.group_index + 1
            elif action.op in BACKWARDS:
                if chunk.group_index != next_backward.get(chunk.group_id, chunk.group_size - 1):
                    return f"stage {stage} backwards part {chunk.group_index} before a later part", action.chunk_id
                next_backward[chunk.group_id] = chunk.group_index - 1
    return None


def check_holders(rank: RankSchedule) -> Complaint | None:
    """At most K chunks of a group hold activations on a stage, from forward or recompute to the last backward half."""
    group_of = {chunk.chunk_id: chunk.group_id for chunk in rank.chunks}
    for stage, _, actions in rank.parts():
        holders: dict[int, set[int]] = {}
        for action, releases in _with_release(actions):
            group = group_of[action.chunk_id]
            if group is None:
                continue
            holding = holders.setdefault(group, set())
            if action.op in ("forward", "recompute"):
                holding.add(action.chunk_id)
            if len(holding) > rank.config["k"]:
                return (
                    f"stage {stage}: {len(holding)} chunks hold activations, K is {rank.config['k']}",
                    action.chunk_id,
                )
            if releases:
                holding.discard(action.chunk_id)
    return None


def check_links(rank: RankSchedule) -> Complaint | None:
    """Both ends of every link between model parts name the same chunks in the same order."""
    parts = rank.parts()
    for (stage, _, sender), (receiver_stage, _, receiver) in pairwise(parts):
        for ops, what in ((FORWARDS, "activations"), (BACKWARDS, "gradients")):
            one = [action.chunk_id for action in sender if action.op in ops]
            other = [action.chunk_id for action in receiver if action.op in ops]
            for here, there in zip(one, other, strict=False):
                if here != there:
                    return f"stages {stage} and {receiver_stage} exchange {what} in different orders", here
    return None


def check_acyclic(rank: RankSchedule) -> Complaint | None:
    """The action graph over stages has an order in which everything finds what it waits for."""
    stages = [[(action.op, action.chunk_id, action.virtual_stage) for action in stage] for stage in rank.stages]
    try:
        for _ in execution_order(stages):
            pass
    except StuckError as error:
        return f"{error}: a deadlock", stages[error.stage][error.position][1]
    return None


def check_memory(rank: RankSchedule) -> Complaint | None:
    """No stage holds more tokens of activations than the plan's memory bound, where it has one."""
    bound = rank.config.get("memory_tokens")
    if bound is None:
        return None
    tokens = {chunk.chunk_id: chunk.num_tokens for chunk in rank.chunks}
    for stage, actions in enumerate(rank.stages):
        retained = 0
        for action, releases in _with_release(actions):
            if action.op in ("forward", "recompute"):
                retained += tokens[action.chunk_id]
            if retained > bound:
                return f"stage {stage} holds {retained} tokens of activations, the bound is {bound}", action.chunk_id
            if releases:
                retained -= tokens[action.chunk_id]
    return None


def _with_release(actions: list[Action]) -> list[tuple[Action, bool]]:
    """Each action, and whether it is the chunk's last backward half, which frees its activations."""
    return [(action, action.op in ("backward", "backward_weight")) for action in actions]


#: Run in this order; the first one that complains ends the checks of a rank, because the others rely on it.
SCHEDULE_CHECKS: dict[str, Callable[[RankSchedule], Complaint | None]] = {
    "actions": check_actions,
    "recompute": check_recompute,
    "part-order": check_part_order,
    "holders": check_holders,
    "links": check_links,
    "acyclic": check_acyclic,
    "memory": check_memory,
}
