"""Chrome traces of simulations, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkplan.files.json_file import write_json
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.planfile.plan import Chunk
from chunkplan.schedule.timeline import Simulation

#: One letter an op, in the order of `operations.OPS`.
LETTERS = "FfRBIW"

#: An event of the Chrome trace format: a name (`ph` M), a complete event (X), a counter (C), or where an arrow starts
#: (s) and ends (f). `ts` and, of complete events, `dur` are in microseconds; `cat` is an op, "waiting" or "sent"; `pid`
#: and `tid` are a simulation and a stage. Both ends of an arrow have its `id`; `bp` says that it ends at the action it
#: is in.
TraceEvent = Mapping[str, Any]


def write_trace(path: str | Path, simulations: Sequence[Simulation], *, content_hash: str | None = None) -> None:
    """Write a Chrome trace of `simulations`, a process each, to `path`: whole or not at all.

    Example: `chunkplan.write_trace("trace.json", [chunkplan.simulate_plan("plan")])`

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
    title = f"{simulation.title}: {simulation.schedule}"
    events = [_event("process_name", "M", 0, process, 0, {"name": title})]
    for stage in range(simulation.pp):
        events.append(_event("thread_name", "M", 0, process, stage, {"name": f"stage {stage}"}))
        events.append(_event("thread_sort_index", "M", 0, process, stage, {"sort_index": stage}))
    for stage in range(simulation.pp):
        events += _stage_events(simulation, process, stage)
    return [*events, *_arrows(simulation, process)]


def _stage_events(simulation: Simulation, process: int, stage: int) -> Iterator[TraceEvent]:
    actions = simulation.actions
    for action in range(actions.stages[stage], actions.stages[stage + 1]):
        chunk, op = simulation.chunks[actions.chunk_ids[action]], int(actions.ops[action])
        start, end, waits = (
            _microseconds(simulation, ticks[action]) for ticks in (simulation.starts, simulation.ends, simulation.waits)
        )
        if waits:
            name = "waits for other ranks" if simulation.has_slots else f"waits for ranks {ranks_of(chunk)}"
            args = {"chunk": chunk.chunk_id}
            yield _event(name, "X", round(start - waits, 3), process, stage, args, cat="waiting", dur=waits)
        args = {
            "chunk": chunk.chunk_id,
            "virtual_stage": int(actions.virtual_stages[action]),
            "group": chunk.group_id,
            "part": None if chunk.group_id is None else f"{chunk.group_index + 1} of {chunk.group_size}",
            "tokens": chunk.num_tokens,
            "prefix": chunk.prefix_tokens,
            "sequences": ", ".join(map(str, dict.fromkeys(each.sequence_id for each in chunk.segments))),
            "critical": action in simulation.is_critical,
        }
        if chunk.cp_size > 1:  # the exchange is part of the action
            args |= {
                "ranks": ranks_of(chunk),
                **{name: getattr(chunk, name) for name in ("cp_size", "cp_heads", "cp_tokens")},
                "exchange_us": _microseconds(simulation, simulation.exchange_of_actions[action]),
                "waited_us": waits,
            }
        name, dur = f"{LETTERS[op]} {chunk.chunk_id}", round(end - start, 3)
        yield _event(name, "X", start, process, stage, args, cat=OPS[op], dur=dur)
    for ticks, retained, kept in simulation.held[stage]:
        for name, tokens in (("retained tokens", retained), ("KV tokens", kept)):
            at = _microseconds(simulation, ticks)
            yield _event(f"stage {stage}: {name}", "C", at, process, stage, {"tokens": tokens})


def _arrows(simulation: Simulation, process: int) -> Iterator[TraceEvent]:
    """Draw what a stage sends to another one: from the last nanosecond of an action to the start of the next."""
    actions, stage_of = simulation.actions, simulation.stage_of.tolist()
    for ops, way in ((FORWARDS, 1), (BACKWARDS, -1)):
        codes = [OPS.index(op) for op in ops]
        places = {
            (int(simulation.model_stages[place]), int(actions.chunk_ids[place])): place
            for place in range(simulation.ends.size)
            if actions.ops[place] in codes
        }
        for (model_stage, chunk), sender in places.items():
            receiver = places.get((model_stage + way, chunk))
            if receiver is None or stage_of[sender] == stage_of[receiver]:
                continue
            start, end, arrives = (
                _microseconds(simulation, ticks)
                for ticks in (simulation.starts[sender], simulation.ends[sender], simulation.starts[receiver])
            )
            name, number = f"{ops[0]} of chunk {chunk}", (process << 32) + sender  # an action sends once
            sent = max(start, round(end - 0.001, 3))
            yield _event(name, "s", sent, process, stage_of[sender], {}, cat="sent", id=number)
            yield _event(name, "f", arrives, process, stage_of[receiver], {}, cat="sent", id=number, bp="e")


def ranks_of(chunk: Chunk) -> str:
    """The ranks that share `chunk`, as the first and the last of them."""
    return f"{chunk.cp_first_rank}-{chunk.cp_first_rank + chunk.cp_size - 1}"


def _microseconds(simulation: Simulation, ticks: int) -> float:
    """Convert ticks to microseconds, rounded to the nanosecond so that adjacent events neither overlap nor separate."""
    return round(int(ticks) / simulation.ticks, 3)


def _event(
    name: str, ph: str, ts: float, process: int, stage: int, args: Mapping[str, Any], **more: str | float
) -> TraceEvent:
    return {"name": name, "ph": ph, "ts": ts, "pid": process, "tid": stage, "args": args, **more}
