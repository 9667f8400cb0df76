"""Timeline of the stages of a rank, and results derived from it: bubbles, memory, the critical path."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel
from chunkplan.cost.states import reduction_ns
from chunkplan.layers import STRAIGHT, StagePlacement, family_of, model_stage_of, split_layers, stage_parts
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, rows_of_chunks
from chunkplan.planfile.plan import Chunk
from chunkplan.schedule.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Actions
from chunkplan.schedule.bounds import jobs_of, makespan_bound, unit_bound
from chunkplan.schedule.holdings import ACTIVATIONS, END, KV, START, kv_tokens, peak_retained, stage_holdings
from chunkplan.schedule.simulate import step_graph


class StepRanks(NamedTuple):
    """Ranks that are simulated together, all of a step or one alone, consecutive in `chunks`.

    `ends` int64 [num_actions]: those of `simulate`, or where ranks meet in slots for what `slot_ops` says
    (`slots.slot_ops_of`), of `ends_in_slots`.
    """

    chunks: Chunks
    times: ChunkTimes
    actions: Actions
    ends: Int64Array
    slot_ops: Int8Array | None = None


class Waiting(NamedTuple):
    """Starts of actions and the dependencies that determined them, [num_actions] each.

    `starts`, `arrivals` int64: when each starts, and when its stage is free and what it waits for has arrived; it
    starts then, or later where it waits for other ranks. `came_from` int64: the place of the action that came just
    then, -1 where there is none: of its stage, where both came at once. `meets` int64: see `StepGraph`.
    """

    starts: Int64Array
    arrivals: Int64Array
    came_from: Int64Array
    meets: Int64Array


def waiting_of(ranks: StepRanks, pp: int, placement: StagePlacement = STRAIGHT) -> Waiting:
    """The waits of the actions of ranks of `pp` stages; `placement`: that of model stages."""
    played = step_graph(ranks.chunks, ranks.actions, ranks.times, 0, ranks.chunks.rank_chunks.size - 1, pp, placement)
    sent = np.where(played.depends_on < 0, 0, ranks.ends[played.depends_on] + played.links)
    before = np.arange(ranks.ends.size) - 1
    before[ranks.actions.stages[:-1]] = -1
    free = np.where(before < 0, 0, ranks.ends[before])
    came_from = np.where(free >= sent, before, played.depends_on)
    return Waiting(ranks.ends - played.durations, np.maximum(free, sent), came_from, played.rendezvous)


def critical_path(ranks: StepRanks, pp: int, last: int, placement: StagePlacement = STRAIGHT) -> list[int]:
    """Indices into `ranks.actions` of the critical path to the action `last`, in order of time.

    Every action starts when its stage is free and its inputs have arrived, so one of the two ends, or arrives, just in
    time. The path is walked back over these from `last` to an action that starts at 0; if both are just in time, it
    stays on the stage. A shared action starts when the last of its ranks arrives: the walk goes on with the earlier
    actions of that rank, on its own stages. Of the ranks' simultaneous actions that of the rank of `last` is on the
    path, which so visits other ranks only where these alone are waited for. In a slot it goes on with the longest
    action, and from there with whatever that slot has waited for. Between two actions of the path is the transfer over
    a link, so their times and those of the links add up to the end of `last`.
    """
    actions, ends, slot_ops = ranks.actions, ranks.ends, ranks.slot_ops
    starts, arrivals, came_from, meets = waiting_of(ranks, pp, placement)
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    slots = np.full(ends.size, -1, np.int64)
    if slot_ops is not None:
        met = slot_ops[actions.ops].astype(np.int64)
        slots = np.where(met < 0, -1, met * ranks.times.durations.shape[1] + actions.virtual_stages)
    own = np.flatnonzero((row // pp == row[last] // pp) & (meets >= 0))
    stand_in = dict(zip(meets[own].tolist(), own.tolist(), strict=True))
    action, path = last, list[int]()
    together = np.empty(0, np.int64)
    while True:
        on_stage = row % pp == row[action] % pp
        if slots[action] >= 0:  # those in a slot end together: the longest
            together = np.flatnonzero(on_stage & (ends == ends[action]) & (slots == slots[action]))
            action = int(together[np.argmin(starts[together])])
        same = stand_in.get(int(meets[action]), action)
        if starts[same] == starts[action] and ends[same] == ends[action]:
            action = same
        path.append(action)
        start = starts[action]
        if start <= 0:
            return path[::-1]
        if arrivals[action] == start:
            before = int(came_from[action])
        elif slot_ops is not None and (over := np.flatnonzero(on_stage & (ends == start))).size:
            before = int(over[0])  # the slot before it, or what somebody else has done before theirs
        else:
            if slots[action] < 0:  # all that share the chunk
                together = np.flatnonzero(meets == meets[action])
            before = int(came_from[together[np.argmax(arrivals[together])]])
        assert before >= 0 and starts[before] <= start, "an action that starts later than it has to"
        action = before


_NO_LIMIT = 2**62

#: The better bound takes time with the square of the chunks.
_FEW = 1 << 12


class PathAction(NamedTuple):
    """An action on a critical path: `place` is its index among those of its rank, `op` that in `OPS`, times are ticks.

    `rank` is its place among those that are simulated together.
    """

    rank: int
    stage: int
    place: int
    op: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated timeline of the chunks of `table` on `pp` stages.

    All times are in `unit`: "microseconds", or, where `cost` is None, "tokens": that of a token's forward through a
    stage, whose backward takes twice as long. Only `times`, `starts`, `ends` (int64 [num_actions]) and `proved_ticks`,
    a lower bound that a search has proved, are in ticks, of which `ticks` are a unit. `title` says what is simulated.

    If the rank depends on others, by shared chunks or slots, `step` has the actions of all ranks of its step, and
    `rank` is its index among them. `exchange` is the part of `times.durations` that is exchange with other ranks, or
    None. `stage_layers` and `dp`: as in `PlanConfig`. `extra_forward`: time, in `unit`, of forwards that the loss adds
    to the step, before everything else.
    """

    title: str
    schedule: str
    pp: int
    virtual_stages: int
    cost: CostModel | None = field(repr=False)
    table: Chunks = field(repr=False)
    times: ChunkTimes = field(repr=False)
    actions: Actions = field(repr=False)
    ends: Int64Array = field(repr=False)
    proved_ticks: int = 0
    step: StepRanks | None = field(default=None, repr=False)
    rank: int = 0
    exchange: Int64Array | None = field(default=None, repr=False)
    stage_layers: tuple[int, ...] | None = None
    dp: int = 1
    extra_forward: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document; `actions` in order of stage, then time."""
        names = ("title", "schedule", "pp", "virtual_stages", "unit", "makespan", "reduction", "lower_bound", "bubble")
        lists = (
            *("bubble_per_stage", "busy_per_stage", "waiting_per_stage", "waiting_for_ranks_per_stage"),
            *("exchange_per_stage", "peak_retained_tokens", "peak_kv_tokens"),
        )
        return {
            **{
                name: getattr(self, name)
                for name in (*names, "recompute_share", *lists, "critical_path", "critical_ranks")
            },
            **({"extra_forward": self.extra_forward} if self.extra_forward else {}),
            "chunks": [
                {name: value for name, value in chunk.to_dict().items() if name not in ("num_target_tokens", "cost")}
                for chunk in self.chunks
            ],
            "actions": [
                {
                    "stage": int(self.stage_of[action]),
                    "op": OPS[self.actions.ops[action]],
                    "chunk_id": int(self.actions.chunk_ids[action]),
                    "virtual_stage": int(self.actions.virtual_stages[action]),
                    "start": self.in_unit(self.starts[action]),
                    "end": self.in_unit(self.ends[action]),
                    "waited_for_ranks": self.in_unit(self.waits[action]),
                    "exchange": self.in_unit(self.exchange_of_actions[action]),
                    "critical": action in self.is_critical,
                }
                for action in range(self.ends.size)
            ],
        }

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The rows of `table`, in the words of plan files. Segments name sequences of the plan, or lengths by place."""
        return rows_of_chunks(self.table)

    @property
    def unit(self) -> Literal["tokens", "microseconds"]:
        """The unit of times."""
        return "tokens" if self.cost is None else "microseconds"

    @property
    def ticks(self) -> int:
        """Ticks in a unit of time."""
        return self.virtual_stages if self.cost is None else 1000

    def in_unit(self, ticks: int) -> float:
        """Convert `ticks` to the unit, as a whole number where it is one."""
        whole, rest = divmod(int(ticks), self.ticks)
        return int(ticks) / self.ticks if rest else whole

    @property
    def makespan(self) -> float:
        """End of the last stage."""
        return self.in_unit(self._makespan)

    @property
    def reduction(self) -> float:
        """Time after the last rank is done to reduce gradients and gather updated weights."""
        if self.cost is None:
            return 0
        layers = self.stage_layers or split_layers(self.cost.shape.num_layers, self.pp * self.virtual_stages)
        return self.in_unit(reduction_ns(self.cost, dp=self.dp, pp=self.pp, layers=layers, placement=self.placement))

    @property
    def shares_chunks(self) -> bool:
        """True if the rank shares chunks with others."""
        return bool(np.any(self.table.cp_size > 1))

    @property
    def has_slots(self) -> bool:
        """True if ranks meet in slots, as they share gradients or weights."""
        return self.step is not None and self.step.slot_ops is not None

    @property
    def placement(self) -> StagePlacement:
        """Placement of model stages on pipeline stages."""
        return family_of(self.schedule).placement._replace(virtual_stages=self.virtual_stages)

    @property
    def lower_bound(self) -> float:
        """A lower bound on any order of the same chunks, with backwards split or whole as here."""
        jobs = jobs_of(self.table, self.times, self.pp)  # of virtual stages, on the first ones
        if self.virtual_stages == 1 and BACKWARD_INPUT not in self.actions.ops and self.table.num_tokens.size <= _FEW:
            bound = makespan_bound(self.table, self.times, jobs, _NO_LIMIT)
        else:
            after = 0 if BACKWARD_INPUT in self.actions.ops else jobs.after.min(axis=1)  # a weight half can be the last
            bound = int(np.max(jobs.before.min(axis=1) + self._busy + after))
        if self.placement.turns:
            bound = max(bound, unit_bound(self.table, self.times))
        return self.in_unit(max(bound, self.proved_ticks))

    @property
    def bubble(self) -> float:
        """Share of the time of all stages that is not useful, 0..1: idle or recomputing, but not waiting for ranks."""
        return 1 - float((self._useful + self._for_ranks).sum()) / (self.pp * max(self._makespan, 1))

    @property
    def bubble_per_stage(self) -> list[float]:
        """The `bubble` of each stage."""
        return [1 - float(used) / max(self._makespan, 1) for used in self._useful + self._for_ranks]

    @property
    def busy_per_stage(self) -> list[float]:
        """Share of the time in which each stage is busy, 0..1."""
        return [float(busy) / max(self._makespan, 1) for busy in self._busy]

    @property
    def recompute_share(self) -> float:
        """Share of recomputing in all work, 0..1."""
        return 1 - float(self._useful.sum()) / max(int(self._busy.sum()), 1)

    @property
    def waiting_per_stage(self) -> list[dict[str, float]]:
        """Idle time of each stage: before its first action, between actions, after its last one.

        That in which it waits for other ranks is not in it: see `waiting_for_ranks_per_stage`.
        """
        waiting = []
        for stage in range(self.pp):
            own = slice(*self.actions.stages[stage : stage + 2])
            start, end = int((self.starts - self.waits)[own][0]), int(self.ends[own][-1])
            between = end - start - int(self._busy[stage]) - int(self._for_ranks[stage])
            times = {"before": start, "between": between, "after": self._makespan - end}
            waiting.append({name: self.in_unit(ticks) for name, ticks in times.items()})
        return waiting

    @property
    def waiting_for_ranks_per_stage(self) -> list[float]:
        """Time in which each stage could work but waits for other ranks: for those that share a chunk or a slot to
        arrive, or for the slowest in a slot."""
        return [self.in_unit(ticks) for ticks in self._for_ranks]

    @property
    def exchange_per_stage(self) -> list[float]:
        """Time of each stage's actions spent on exchange between ranks in the layers of shared chunks.

        It is part of the actions, so that stages are busy then.
        """
        return [self.in_unit(ticks) for ticks in np.add.reduceat(self.exchange_of_actions, self.actions.stages[:-1])]

    @property
    def peak_retained_tokens(self) -> list[int]:
        """The most tokens whose activations each stage retains at once; a virtual stage counts as its share of one."""
        peaks = peak_retained(self.table, self.actions)
        return [-(-int(peak) // self.virtual_stages) for peak in peaks]

    @property
    def peak_kv_tokens(self) -> list[int]:
        """The most tokens in chunks of split sequences whose keys and values each stage holds at once."""
        return [max(kept for _, _, kept in held) for held in self.held]

    @property
    def critical_path(self) -> dict[str, float]:
        """Time on the critical path by op, in `unit`, and `link`, the time between stages."""
        by_op = dict.fromkeys(OPS, 0)
        for action in self.critical_actions:
            by_op[OPS[action.op]] += action.end - action.start
        times = {**by_op, "link": self._makespan - sum(by_op.values())}
        return {name: self.in_unit(ticks) for name, ticks in times.items()}

    @property
    def critical_ranks(self) -> dict[int, float]:
        """Time of the critical path on each rank that it is on, in `unit`, ascending; `link` belongs to none."""
        by_rank: dict[int, int] = {}
        for action in self.critical_actions:
            by_rank[action.rank] = by_rank.get(action.rank, 0) + action.end - action.start
        return {rank: self.in_unit(by_rank[rank]) for rank in sorted(by_rank)}

    @cached_property
    def critical_actions(self) -> list[PathAction]:
        """Actions on the critical path of the rank, in order of time; where ranks meet, also those of other ranks."""
        ranks, first_rank = (self._alone, self.rank) if self.step is None else (self.step, 0)
        stages = ranks.actions.stages
        last = int(stages[(self.rank - first_rank) * self.pp]) + int(np.argmax(self.ends))
        starts = waiting_of(ranks, self.pp, self.placement).starts
        found = []
        for place in critical_path(ranks, self.pp, last, self.placement):
            rank, stage = divmod(int(np.searchsorted(stages, place, side="right")) - 1, self.pp)
            op, start, end = (int(column[place]) for column in (ranks.actions.ops, starts, ranks.ends))
            own = place - int(stages[rank * self.pp])
            found.append(PathAction(first_rank + rank, stage, own, op, start, end))
        return found

    @cached_property
    def is_critical(self) -> frozenset[int]:
        """Indices into `actions` of those on the critical path that this rank runs."""
        return frozenset(action.place for action in self.critical_actions if action.rank == self.rank)

    @property
    def _alone(self) -> StepRanks:
        return StepRanks(self.table, self.times, self.actions, self.ends)

    @cached_property
    def _waiting(self) -> Waiting:
        return waiting_of(self._alone, self.pp, self.placement)

    @property
    def starts(self) -> Int64Array:
        """Start of each action, int64 [num_actions]."""
        return self._waiting.starts

    @cached_property
    def waits(self) -> Int64Array:
        """Ticks each action waits for other ranks, int64 [num_actions]: for those that share its chunk, its slot, or
        the slowest action in that."""
        return np.zeros_like(self.ends) if self.step is None else self.starts - self._waiting.arrivals

    @cached_property
    def exchange_of_actions(self) -> Int64Array:
        """Part of each action that is exchange with other ranks, in ticks, int64 [num_actions]."""
        if self.exchange is None:
            return np.zeros_like(self.ends)
        exchange: Int64Array = self.exchange[self.actions.ops, self.model_stages, self.actions.chunk_ids]
        return exchange

    @cached_property
    def stage_of(self) -> Int64Array:
        """The stage of each action, int64 [num_actions]."""
        return np.repeat(np.arange(self.pp), np.diff(self.actions.stages))

    @cached_property
    def model_stages(self) -> Int64Array:
        """The model stage of each action, int64 [num_actions]."""
        return model_stage_of(self.stage_of, self.actions.virtual_stages.astype(np.int64), self.pp, self.placement)

    @cached_property
    def held(self) -> list[list[tuple[int, int, int]]]:
        """Changes of each stage's memory: (ticks, tokens with activations, tokens with keys and values).

        Activations of a chunk are held from the start of its forward or recompute to the end of its backward. Keys and
        values of a group are held from the start of each chunk's forward to the end of the first chunk's backward; they
        count once, whatever the virtual stages.
        """
        kv, held = kv_tokens(self.table), []
        for stage in range(self.pp):
            own = slice(*self.actions.stages[stage : stage + 2])
            by_time = {0: (0, 0)}
            for start, end, tokens in zip(
                self.starts[own].tolist(),
                self.ends[own].tolist(),
                stage_holdings(self.table, kv, self.actions, 0, stage, self.pp).tolist(),
                strict=True,
            ):
                by_time[start] = tokens[START][ACTIVATIONS], tokens[START][KV]
                by_time[end] = tokens[END][ACTIVATIONS], tokens[END][KV]
            held.append(
                [(ticks, -(-retained // self.virtual_stages), kept) for ticks, (retained, kept) in by_time.items()]
            )
        return held

    @property
    def _makespan(self) -> int:
        return int(self.ends.max())

    @cached_property
    def _for_ranks(self) -> Int64Array:
        waiting: Int64Array = np.add.reduceat(self.waits, self.actions.stages[:-1])
        return waiting

    @cached_property
    def _busy(self) -> Int64Array:
        busy: Int64Array = np.add.reduceat(self.ends - self.starts, self.actions.stages[:-1])
        return busy

    @cached_property
    def _useful(self) -> Int64Array:
        both = (self.times.durations[FORWARD] + self.times.durations[BACKWARD]).sum(axis=1)
        return np.array([sum(own) for own in stage_parts(both.tolist(), self.pp, self.placement)], np.int64)
