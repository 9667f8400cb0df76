"""What stages do over time as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from chunkplan.files.json_file import write_json
from chunkplan.operations import OPS
from chunkplan.schedule.simulated import Simulation

#: One letter an op, in the order of `operations.OPS`.
LETTERS = "FfRBIW"


class _Required(TypedDict):
    name: str
    ph: Literal["M", "X", "C"]
    ts: float
    pid: int
    tid: int
    args: Mapping[str, str | int | bool | None]


class TraceEvent(_Required, total=False):
    """An event of the Chrome trace format: a name (`M`), a complete event (`X`) or a counter (`C`).

    `ts` and, of complete events, `dur` are in microseconds; `cat` is an op; `pid` and `tid` are a simulation and a
    stage.
    """

    cat: str
    dur: float


def write_trace(path: str | Path, simulations: Sequence[Simulation]) -> None:
    """Write a trace of `simulations`, a process each, to `path`: to a temporary name first, then renamed.

    Raises:
        UsageError: `path` cannot be written.
    """
    events = [event for process, simulation in enumerate(simulations) for event in trace_events(simulation, process)]
    events.sort(key=lambda event: event["ts"])
    write_json(Path(path), {"traceEvents": events, "displayTimeUnit": "ms"})


def trace_events(simulation: Simulation, process: int = 0) -> list[TraceEvent]:
    """The events of the Chrome trace format: names, then the actions and the counters of one stage after the other.

    A stage is a thread: complete events (`X`), named by `LETTERS` and chunk, that do not overlap. Counters (`C`) of
    each stage are its "retained tokens" and its "KV tokens", see `Simulation.held`. Times are in microseconds; where
    the unit of the simulation is "tokens", one of these counts as one.
    """
    named = [_name(process, 0, "process_name", name=f"{simulation.title}: {simulation.schedule}")]
    for stage in range(simulation.pp):
        named.append(_name(process, stage, "thread_name", name=f"stage {stage}"))
        named.append(_name(process, stage, "thread_sort_index", sort_index=stage))
    return named + [event for stage in range(simulation.pp) for event in _stage_events(simulation, process, stage)]


def _stage_events(simulation: Simulation, process: int, stage: int) -> Iterator[TraceEvent]:
    actions = simulation.actions
    for action in range(actions.stages[stage], actions.stages[stage + 1]):
        chunk = simulation.chunks[actions.chunk_ids[action]]
        op = int(actions.ops[action])
        start, end = (_microseconds(simulation, ticks[action]) for ticks in (simulation.starts, simulation.ends))
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
                "critical": action in simulation.is_critical,
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


def _microseconds(simulation: Simulation, ticks: int) -> float:
    """To the nanosecond, so that what touches in the simulation neither overlaps nor comes apart."""
    return round(int(ticks) / simulation.ticks, 3)


def _name(process: int, thread: int, kind: str, **args: str | int) -> TraceEvent:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": args}
