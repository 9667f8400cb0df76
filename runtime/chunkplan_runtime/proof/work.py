"""What a proof runs: a few sequences, in chunks of all kinds, and what each of one or more stages does with these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkplan.planfile.plan import Action, Chunk, Segment
from chunkplan_runtime.feed.stream import NO_TARGET, ChunkTensors, RankWork, shifted_labels
from chunkplan_runtime.sharing import Span

#: The number of tokens of each sequence. The longest goes far beyond the window of a small model.
LENGTHS = (9, 7, 41, 5, 23)

#: What each chunk has of them, (sequence, start, stop): whole ones, parts of split ones, and both.
CHUNKS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 9), (1, 0, 7)),
    ((2, 0, 16),),
    ((2, 16, 32),),
    ((2, 32, 41), (3, 0, 5)),
    ((4, 0, 12),),
    ((4, 12, 23),),
)

#: By K, the actions of every stage: forward, forward without keeping activations, recompute, backward.
ORDERS = {1: "F0 B0 f1 f2 F3 B3 R2 B2 R1 B1 f4 F5 B5 R4 B4", 2: "F0 B0 f1 F2 F3 B3 B2 R1 B1 F4 F5 B5 B4"}

#: Where some of the chunks that run forward twice keep what attention gave.
KEPT_ATTENTION = {2: "gpu", 4: "host"}

_OPS = {"F": "forward", "f": "forward_kv", "R": "recompute", "B": "backward"}


class Sequence(NamedTuple):
    """Tokens of a sequence, int32 [num_tokens], and which of them are targets, bool [num_tokens]."""

    tokens: Tensor
    target: Tensor


def random_sequences(vocab_size: int) -> list[Sequence]:
    """Sequences of `LENGTHS`, in which two of three tokens are targets, the same in every process."""
    random = torch.Generator().manual_seed(0)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(0, vocab_size, (length,), generator=random, dtype=torch.int32)
        target = torch.rand(length, generator=random) < 2 / 3
        target[0], target[-1] = False, True
        found.append(Sequence(tokens, target))
    return found


def work_of(sequences: list[Sequence], k: int) -> RankWork:
    """What a rank does with the chunks of `sequences`, of each of which `k` may hold activations."""
    parts = {name: [each for each in CHUNKS if each[0][0] == name] for name in range(len(sequences))}
    labels = [torch.from_numpy(shifted_labels(each.tokens.numpy(), each.target.numpy())) for each in sequences]
    chunks, tensors = {}, {}
    for chunk_id, segments in enumerate(CHUNKS):
        spans, offset = [], 0
        for name, start, stop in segments:
            is_split = len(parts[name]) > 1
            spans.append(Span(name, start, stop, LENGTHS[name], offset, name if is_split else None))
            offset += stop - start
        cut = [slice(start, stop) for _, start, stop in segments]
        ids = torch.cat([sequences[name].tokens[here] for (name, *_), here in zip(segments, cut, strict=True)])
        positions = torch.cat([torch.arange(start, stop, dtype=torch.int32) for _, start, stop in segments])
        targets = torch.cat([labels[name][here] for (name, *_), here in zip(segments, cut, strict=True)])
        tensors[chunk_id] = ChunkTensors(ids[None], positions[None], targets, tuple(spans))
        group = next((span.group_id for span in spans if span.is_split), None)
        chunks[chunk_id] = Chunk(
            chunk_id=chunk_id,
            group_id=group,
            group_index=0 if group is None else parts[group].index(segments),
            group_size=1 if group is None else len(parts[group]),
            num_tokens=offset,
            num_target_tokens=int((targets != NO_TARGET).sum()),
            prefix_tokens=segments[0][1],
            keeps_activations=True,
            cost=0.0,
            segments=tuple(Segment(*segment) for segment in segments),
            kept_attention=KEPT_ATTENTION.get(chunk_id, ""),
        )
    actions = [Action(_OPS[word[0]], int(word[1:]), 0) for word in ORDERS[k].split()]
    return RankWork(0, 0, actions, chunks, tensors)


class ThreadGather:
    """Gathers a value of each of several threads, once, as `distributed.job.Job.all_gather_object` does."""

    def __init__(self, num_threads: int) -> None:
        self._barrier = Barrier(num_threads)
        self._values: list[Any] = []

    def __call__(self, value: Any) -> list[Any]:
        """The values of all threads, when all have called it."""
        self._values.append(value)
        self._barrier.wait()
        return self._values

    def close(self) -> None:
        """Say that a thread failed: those that wait for it fail too."""
        self._barrier.abort()


class ThreadLinks:
    """Links between two stages that run in two threads of one process, as `execution.links.Links` are between two."""

    def __init__(self, queues: dict[str, SimpleQueue[Any]]) -> None:
        self._queues = queues

    @contextmanager
    def open(self, *_: Any) -> Iterator[None]:
        """There is nothing to wait for at the end."""
        yield

    def send(self, name: str, virtual_stage: int, chunk_id: int, tensor: Tensor) -> None:
        """Give hidden states or a gradient to the other thread."""
        self._queues[name].put(tensor)

    def receive(self, name: str, *_: int) -> Tensor:
        """Wait for what the other thread gives next."""
        tensor: Tensor | None = self._queues[name].get()
        if tensor is None:
            raise RuntimeError("the other stage failed")
        return tensor

    def close(self) -> None:
        """Say that nothing more will come: the other thread failed."""
        for queue in self._queues.values():
            queue.put(None)
