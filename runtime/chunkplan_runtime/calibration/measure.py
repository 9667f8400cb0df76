"""Times chunks of given sizes and prefixes, run by the executor as a plan would have them, to fit the cost model to.

Every chunk is run as `forward_kv`, `recompute` and `backward`. One without a prefix is standalone: a whole sequence,
and again as eight packed ones. One with a prefix is a part of a long sequence whose earlier parts ran forward before,
and which one more part follows, that runs backward before: as it is amid any long sequence. What the earlier parts
would still have to do is left undone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from chunkplan.cost.calibrate import ChunkTime
from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action, Chunk, Segment
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.sharing import Span

#: Sequences in a packed chunk.
PACKED = 8


@dataclass(frozen=True)
class Probe:
    """A chunk to time: its segments' tokens, of which the first sees `prefix_tokens`, in parts of the same size."""

    segments: tuple[int, ...]
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Measured:
    """Times of probes, in their order, and the probes that did not fit the memory."""

    chunks: list[ChunkTime]
    left_out: list[Probe]


class _EnoughError(Exception):
    """What is to be timed has been: the rest of the actions is not done."""


def first_layers(config: Any, num_layers: int) -> Any:
    """The transformers config of a model that has the first layers of `config` only."""
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = num_layers
    if getattr(cut, "layer_types", None):
        cut.layer_types = cut.layer_types[:num_layers]
    return cut


def make_probes(chunk_sizes: Sequence[int], prefixes: Sequence[int]) -> list[Probe]:
    """Of each size a whole sequence, a packed chunk, and a part behind each prefix, which is rounded up to whole parts.

    Raises:
        UsageError: there are fewer than three sizes, or one is too small to be packed.
    """
    sizes = sorted(set(chunk_sizes))
    if len(sizes) < 3 or sizes[0] < 2 * PACKED:
        raise UsageError(
            f"--chunk-sizes is {','.join(map(str, sizes))}, expected three or more, from {2 * PACKED}",
            hint="for example 1024,4096,16384: the times of fewer, or of smaller ones, do not tell rates apart",
        )
    probes = []
    for size in sizes:
        shares = [size // PACKED + (place < size % PACKED) for place in range(PACKED)]
        probes += [Probe((size,)), Probe(tuple(shares))]
        probes += [
            Probe((size,), prefix) for prefix in sorted({-(-prefix // size) * size for prefix in prefixes} - {0})
        ]
    return probes


def measure(
    model: CausalLM,
    probes: Sequence[Probe],
    *,
    repeats: int,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    show: Callable[[ChunkTime], None] = lambda chunk: None,
) -> Measured:
    """Time `probes` `repeats` times each, in turns, so that a device that slows down does so for all of them.

    Before, each runs once unmeasured, where it does not take long: without its prefix. A probe that does not fit the
    memory of a GPU is left out. `report` is called with the runs done and those to do, `show` with each chunk as soon
    as it is measured.
    """
    times: dict[Probe, list[tuple[int, int]]] = {probe: [] for probe in probes}
    left_out: list[Probe] = []
    rounds = [[probe for probe in probes if not probe.prefix_tokens], *[list(probes)] * repeats]
    total, done = sum(map(len, rounds)), 0
    for number, probes_of_round in enumerate(rounds):
        for probe in probes_of_round:
            if probe not in left_out:
                try:
                    found = time_probe(model, probe, seed)
                except torch.OutOfMemoryError:
                    left_out.append(probe)
            if probe in left_out:
                torch.cuda.empty_cache()  # now that what the error held on to is let go
            elif number:
                times[probe].append(found)
                if number == repeats:
                    show(_median(probe, times[probe]))
            done += 1
            report(done, total)
    return Measured([_median(probe, times[probe]) for probe in probes if probe not in left_out], left_out)


def _median(probe: Probe, times: list[tuple[int, int]]) -> ChunkTime:
    forward_kv, train = np.array(times, np.float64).T
    middle = float(np.median(train))
    return ChunkTime(
        segments=probe.segments,
        prefix_tokens=probe.prefix_tokens,
        forward_kv_ns=float(np.median(forward_kv)),
        train_ns=middle,
        spread=float(np.median(np.abs(train - middle))) / middle,
    )


def time_probe(model: CausalLM, probe: Probe, seed: int = 0) -> tuple[int, int]:
    """Time a probe: nanoseconds of its `forward_kv`, and of its `recompute` and `backward` together."""
    work, chunk_id = _work(probe, model.vocab_size, seed)
    times: dict[str, int] = {}

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        if action.chunk_id != chunk_id:
            yield
            return
        wait(model.device)
        started = perf_counter_ns()
        yield
        wait(model.device)
        times[action.op] = perf_counter_ns() - started
        if action.op == "backward":
            raise _EnoughError

    with suppress(_EnoughError):
        RankExecutor(model).run(work, sum(probe.segments), around)
    return times["forward_kv"], times["recompute"] + times["backward"]


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _work(probe: Probe, vocab_size: int, seed: int) -> tuple[RankWork, int]:
    """The chunks that a probe needs and their actions, and which chunk it is."""
    size = sum(probe.segments)
    num_before = probe.prefix_tokens // size
    spans_of: list[tuple[Span, ...]]
    if num_before:
        num_parts = num_before + 2
        starts = range(0, num_parts * size, size)
        spans_of = [(Span(0, start, start + size, num_parts * size, chunk_start=0, group_id=0),) for start in starts]
    else:
        starts_in_chunk = np.cumsum([0, *probe.segments[:-1]]).tolist()
        segments = enumerate(zip(probe.segments, starts_in_chunk, strict=True))
        spans_of = [tuple(Span(place, 0, tokens, tokens, chunk_start) for place, (tokens, chunk_start) in segments)]
    chunks = {
        part: Chunk(
            chunk_id=part,
            group_id=spans[0].group_id,
            group_index=part,
            group_size=len(spans_of),
            num_tokens=size,
            num_target_tokens=size,
            prefix_tokens=spans[0].start,
            keeps_activations=False,
            cost=0.0,
            segments=tuple(Segment(span.sequence_id, span.start, span.stop) for span in spans),
        )
        for part, spans in enumerate(spans_of)
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {part: _tensors(spans, vocab_size, random) for part, spans in enumerate(spans_of)}
    actions = [Action("forward_kv", part, 0) for part in chunks]
    for part in reversed(range(num_before, len(chunks))):
        actions += [Action("recompute", part, 0), Action("backward", part, 0)]
    return RankWork(step=0, dp_rank=0, actions=actions, chunks=chunks, tensors=tensors), num_before


def _tensors(spans: tuple[Span, ...], vocab_size: int, random: torch.Generator) -> ChunkTensors:
    """Random tokens, all of them targets: the cost model has every token in the head."""
    shape = (1, spans[-1].chunk_stop)
    return ChunkTensors(
        input_ids=torch.randint(vocab_size, shape, generator=random),
        position_ids=torch.cat([torch.arange(span.start, span.stop) for span in spans])[None],
        labels=torch.randint(vocab_size, shape, generator=random)[0],
        spans=spans,
    )
