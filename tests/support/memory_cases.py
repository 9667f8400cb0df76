"""What processes do in tests of memory: run a step, and look at what a stage holds between its actions."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from chunkplan.planfile.plan import Action
from chunkplan_runtime.attention.heads import HeadExchange
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import RankWork
from chunkplan_runtime.kv import pages
from chunkplan_runtime.kv.store import GatheredMemory
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.products import ChunkKey
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
    def __init__(self, executor: RankExecutor, work: RankWork) -> None:
        self._executor, self._work = executor, work
        self.observed = Observed()
        self._at_work: Action | None = None
        self._done: set[ChunkKey] = set()
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
        if _place(action) in self._executor.inputs:
            self._refs.append((action, weakref.ref(self._executor.inputs[_place(action)])))
        yield
        sequences = self._executor.stores[0]._sequences.values()
        self.observed.kv = max(self.observed.kv, sum(sequence.forwarded for sequence in sequences))
        if action.op in ("backward", "backward_weight"):
            self._done.add(_place(action))

    def look(self, action: Action | None = None) -> None:
        """At what is held; `action` is about to be done."""
        held = self._executor.in_flight.keys() | self._executor.halves.kept.keys()
        if action is not None and action.op in ("forward", "recompute"):
            held.add(_place(action))
        seen, chunks = self.observed, self._work.chunks
        seen.retained = max(seen.retained, sum(chunks[each].num_tokens for _, each in held))
        seen.inputs = max(seen.inputs, sum(chunks[each].num_tokens for _, each in self._executor.inputs.keys() - held))
        leaked = [each for each, ref in self._refs if _place(each) in self._done and ref() is not None]
        kept = [each for each, ref in self._refs if each.op == "forward_kv" and isinstance(ref(), _Saved)]
        held_still = [each for each in self._done if each in held or each in self._executor.inputs]
        seen.leaks += [f"{each} before {action}" for each in (*leaked, *kept, *held_still)]
        if action is None and not all(store.is_empty for store in self._executor.stores):
            seen.leaks.append("the store is not empty")


def _place(action: Action) -> ChunkKey:
    return action.virtual_stage, action.chunk_id


def exchange_peaks(rank: int, *, plan: Path, config: Path, dtype: torch.dtype) -> Counter[str]:
    """The most bytes that exchanging heads, or pages, in a layer holds at once in the first step of `plan`."""
    opened, analysis = open_for_its_stages(plan)
    stage = make_stage(rank, opened, analysis, new_model(read_config(config), dtype, seed=1))
    made, fetch = _Made(), GatheredMemory.fetch
    held: list[Any] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*given: Any) -> Any:
            with made.within("heads", []) as held:
                found = call(*given)
                made.count("heads", held)
            return found

        return do

    def counted_fetch(*given: Any) -> Iterator[Any]:
        coming = fetch(*given)
        held[:] = [each for each in held if not each[0].expired()]
        for _ in range(2):  # it is on its way; it is there
            with made.within("pages", held):
                block = next(coming)
            yield block
            del block
        with made.within("pages", held):
            next(coming, None)

    (work,) = stage.work(0).ranks
    with (
        patch.object(HeadExchange, "scatter_heads", counted(HeadExchange.scatter_heads)),
        patch.object(HeadExchange, "gather_heads", counted(HeadExchange.gather_heads)),
        patch.object(GatheredMemory, "fetch", counted_fetch),
        made,
    ):
        stage.executor.run(work, 1)
    return made.most


class _Made(TorchDispatchMode):
    """Counts the memory of tensors that are made within an exchange, as long as they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self._what, self._held = "", []

    @contextmanager
    def within(self, what: str, held: list[Any]) -> Iterator[list[Any]]:
        """What is made in the block is of this exchange, which `held` so much before."""
        before = self._what, self._held
        self._what, self._held = what, held
        yield held
        self._what, self._held = before

    def count(self, what: str, held: list[Any]) -> None:
        """Look at what there is now."""
        for _ in range(30):
            alive = {ref.cdata: num_bytes for ref, num_bytes in held if not ref.expired()}
            if sum(alive.values()) <= self.most[what]:
                return
            time.sleep(0.002)  # gloo's threads let go of tensors only after those who wait for these go on
        self.most[what] = sum(alive.values())

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        found = function(*given, **(named or {}))
        if self._what and isinstance(found, Tensor) and not _is_of_the_store():
            storage = found.untyped_storage()
            is_view = any(storage._cdata == each.untyped_storage()._cdata for each in given if isinstance(each, Tensor))
            if not is_view:
                self._held.append((StorageWeakRef(storage), storage.nbytes()))
                self.count(self._what, self._held)
        return found


def _is_of_the_store() -> bool:
    """Whether a tensor is made by what keeps a process's own pages."""
    frame: Any = sys._getframe(2)
    while frame is not None and "chunkplan_runtime" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == pages.__file__
