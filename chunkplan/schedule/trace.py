"""What stages do over time as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from chunkplan.files.json_file import write_json
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.planfile.plan import Chunk
from chunkplan.schedule.simulated import Simulation

#: One letter an op, in the order of `operations.OPS`.
LETTERS = "FfRBIW"


class _Required(TypedDict):
    name: str
    ph: Literal["M", "X", "C", "s", "f"]
    ts: float
    pid: int
    tid: int
    args: Mapping[str, str | int | float | bool | None]


class TraceEvent(_Required, total=False):
    """An event of the Chrome trace format: a name (`M`), a complete event (`X`), a counter (`C`), or where an arrow
    starts (`s`) and ends (`f`).

    `ts` and, of complete events, `dur` are in microseconds; `cat` is an op, "waiting" or "sent"; `pid` and `tid` are a
    simulation and a stage. Both ends of an arrow have its `id`; `bp` says that it ends at the action it is in.
    """

    cat: str
    dur: float
    id: int
    bp: str


def write_trace(path: str | Path, simulations: Sequence[Simulation], *, content_hash: str | None = None) -> None:
    """Write a Chrome trace of `simulations`, a process each, to `path`: whole or not at all.

    `content_hash` is that of the plan they are of, which stands in the trace.

    Raises:
        UsageError: `path` cannot be written.
    """
    events = [event for process, simulation in enumerate(simulations) for event in trace_events(simulation, process)]
    events.sort(key=lambda event: event["ts"])
    of_plan = {} if content_hash is None else {"otherData": {"plan": content_hash}}
    write_json(Path(path), {"traceEvents": events, "displayTimeUnit": "ms", **of_plan})


def trace_events(simulation: Simulation, process: int = 0) -> list[TraceEvent]:
    """The events of the Chrome trace format: names, the actions and counters of one stage after the other, and arrows.

    A stage is a thread: complete events (`X`), named by `LETTERS` and chunk, that do not overlap. Before an action for
    which ranks meet comes an event while the stage waits for the others, if it does. Counters (`C`) of each stage are
    its "retained tokens" and its "KV tokens", see `Simulation.held`. Times are in microseconds; where the unit of the
    simulation is "tokens", one of these counts as one.

    Arrows (`s`, `f`) go from the forward of a chunk on a stage to that on the next one, and from backward to backward
    the other way.
    """
    named = [_name(process, 0, "process_name", name=f"{simulation.title}: {simulation.schedule}")]
    for stage in range(simulation.pp):
        named.append(_name(process, stage, "thread_name", name=f"stage {stage}"))
        named.append(_name(process, stage, "thread_sort_index", sort_index=stage))
    done = [event for stage in range(simulation.pp) for event in _stage_events(simulation, process, stage)]
    return [*named, *done, *_arrows(simulation, process)]


def _stage_events(simulation: Simulation, process: int, stage: int) -> Iterator[TraceEvent]:
    actions = simulation.actions
    for action in range(actions.stages[stage], actions.stages[stage + 1]):
        chunk = simulation.chunks[actions.chunk_ids[action]]
        op = int(actions.ops[action])
        start, end = (_microseconds(simulation, ticks[action]) for ticks in (simulation.starts, simulation.ends))
        waits = _microseconds(simulation, simulation.waits[action])
        if waits:
            yield {
                "name": "waits for other ranks" if simulation.has_slots else f"waits for ranks {ranks_of(chunk)}",
                "cat": "waiting",
                "ph": "X",
                "ts": round(start - waits, 3),
                "dur": waits,
                "pid": process,
                "tid": stage,
                "args": {"chunk": chunk.chunk_id},
            }
        yield {
            "name": f"{LETTERS[op]} {chunk.chunk_id}",
            "cat": OPS[op],
            "ph": "X",
            "ts": start,
            "dur": round(end - start, 3),
            "pid": process,
            "tid": stage,
            "args": {
                "chunk": chunk.chunk_id,
                "virtual_stage": int(actions.virtual_stages[action]),
                "group": chunk.group_id,
                "part": None if chunk.group_id is None else f"{chunk.group_index + 1} of {chunk.group_size}",
                "tokens": chunk.num_tokens,
                "prefix": chunk.prefix_tokens,
                "sequences": ", ".join(map(str, dict.fromkeys(each.sequence_id for each in chunk.segments))),
                "critical": action in simulation.is_critical,
                **(_shared(simulation, chunk, action) if chunk.cp_size > 1 else {}),
            },
        }
    for ticks, retained, kept in simulation.held[stage]:
        for name, tokens in (("retained tokens", retained), ("KV tokens", kept)):
            yield {
                "name": f"stage {stage}: {name}",
                "ph": "C",
                "ts": _microseconds(simulation, ticks),
                "pid": process,
                "tid": stage,
                "args": {"tokens": tokens},
            }


def _arrows(simulation: Simulation, process: int) -> Iterator[TraceEvent]:
    """Draw what a stage sends to another one: from the last nanosecond of an action to the start of the next."""
    actions = simulation.actions
    for ops, way in ((FORWARDS, 1), (BACKWARDS, -1)):
        codes = [OPS.index(op) for op in ops]
        places = {
            (int(simulation.model_stages[place]), int(actions.chunk_ids[place])): place
            for place in range(simulation.ends.size)
            if actions.ops[place] in codes
        }
        for (model_stage, chunk), sender in places.items():
            receiver = places.get((model_stage + way, chunk))
            if receiver is None or simulation.stage_of[sender] == simulation.stage_of[receiver]:
                continue
            start, end, arrives = (
                _microseconds(simulation, ticks)
                for ticks in (simulation.starts[sender], simulation.ends[sender], simulation.starts[receiver])
            )
            arrow: TraceEvent = {
                "name": f"{ops[0]} of chunk {chunk}",
                "cat": "sent",
                "id": (process << 32) + sender,  # an action sends once
                "ph": "s",
                "ts": max(start, round(end - 0.001, 3)),
                "pid": process,
                "tid": int(simulation.stage_of[sender]),
                "args": {},
            }
            yield arrow
            yield {**arrow, "ph": "f", "bp": "e", "ts": arrives, "tid": int(simulation.stage_of[receiver])}


def ranks_of(chunk: Chunk) -> str:
    """The ranks that share `chunk`, as the first and the last of them."""
    return f"{chunk.cp_first_rank}-{chunk.cp_first_rank + chunk.cp_size - 1}"


def _shared(simulation: Simulation, chunk: Chunk, action: int) -> dict[str, str | int | float]:
    """What is to say of an action with a chunk that ranks share; the exchange is part of the action."""
    return {
        "ranks": ranks_of(chunk),
        "cp_size": chunk.cp_size,
        "cp_heads": chunk.cp_heads,
        "cp_tokens": chunk.cp_tokens,
        "exchange_us": _microseconds(simulation, simulation.exchange_of_actions[action]),
        "waited_us": _microseconds(simulation, simulation.waits[action]),
    }


def _microseconds(simulation: Simulation, ticks: int) -> float:
    """To the nanosecond, so that what touches in the simulation neither overlaps nor comes apart."""
    return round(int(ticks) / simulation.ticks, 3)


def _name(process: int, thread: int, kind: str, **args: str | int) -> TraceEvent:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": args}
