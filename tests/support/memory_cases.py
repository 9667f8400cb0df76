"""What processes do in tests of memory: run a step, and look at what a stage holds between its actions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chunkplan.planfile.plan import Action
from chunkplan_runtime.execution.executor import Executor
from chunkplan_runtime.feed.stream import RankWork
from chunkplan_runtime.models.model import new_model, read_config
from tests.support.distributed_cases import make_stage, open_for_its_stages


@dataclass
class Observed:
    """Of a stage, the most tokens at once: retained, of inputs of chunks that will run again, and of KV; and leaks."""

    retained: int = 0
    inputs: int = 0
    kv: int = 0
    leaks: list[str] = field(default_factory=list)


@dataclass
class _Saved:
    tensor: Tensor


def observe_memory(rank: int, *, plan: Path, config: Path, kv_offload: bool = False) -> Observed:
    """Run the first step of `plan`."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float64, seed=1)
    stage = make_stage(rank, opened, analysis, model, kv_offload=kv_offload)
    (work,) = stage.work(0).ranks
    watch = _Watch(stage.executor, work)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda saved: saved.tensor):
        stage.executor.run(work, 1, watch.around)
    watch.look()
    return watch.observed


class _Watch:
    def __init__(self, executor: Executor, work: RankWork) -> None:
        self._executor, self._work = executor, work
        self.observed = Observed()
        self._at_work: Action | None = None
        self._done: set[int] = set()
        self._refs: list[tuple[Action, Any]] = []

    def pack(self, tensor: Tensor) -> _Saved:
        """Called whenever a graph saves a tensor."""
        saved = _Saved(tensor)
        assert self._at_work is not None
        self._refs.append((self._at_work, weakref.ref(saved)))
        return saved

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """What is there when an action begins and ends."""
        self.look(action)
        self._at_work = action
        if action.chunk_id in self._executor.inputs:
            self._refs.append((action, weakref.ref(self._executor.inputs[action.chunk_id])))
        yield
        self.observed.kv = max(self.observed.kv, self._executor.store.num_tokens)
        if action.op == "backward":
            self._done.add(action.chunk_id)

    def look(self, action: Action | None = None) -> None:
        """At what is held; `action` is about to be done."""
        held = {*self._executor.in_flight}
        if action is not None and action.op in ("forward", "recompute"):
            held.add(action.chunk_id)
        seen, chunks = self.observed, self._work.chunks
        seen.retained = max(seen.retained, sum(chunks[each].num_tokens for each in held))
        seen.inputs = max(seen.inputs, sum(chunks[each].num_tokens for each in self._executor.inputs.keys() - held))
        leaked = [each for each, ref in self._refs if each.chunk_id in self._done and ref() is not None]
        kept = [each for each, ref in self._refs if each.op == "forward_kv" and isinstance(ref(), _Saved)]
        held_still = [each for each in self._done if each in held or each in self._executor.inputs]
        seen.leaks += [f"{each} before {action}" for each in (*leaked, *kept, *held_still)]
        if action is None and not self._executor.store.is_empty:
            seen.leaks.append("the store is not empty")
