"""What outlives a chunk: keys, values and their gradients of the split sequences in flight.

A sequence takes its place for its whole length at first use and gives it back when its first part has done its
backward; one that occurs twice in a step is two groups and takes two places. Writes go to the slice of the part, so
that writing twice (forward, then recompute) changes nothing. The gradient of a part's KV is the sum of what all later
parts sent to it: it is complete when, and only when, backwards run in descending order, which is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chunkplan.errors import DataError


@dataclass(frozen=True)
class Span:
    """Where a segment lies: tokens [start, end) of a sequence of `length` are tokens [first, last) of its chunk.

    `group_id` is that of the chunk.
    """

    sequence_id: int
    start: int
    end: int
    length: int
    first: int
    group_id: int | None = None

    @property
    def last(self) -> int:
        """One past the segment's last token in the chunk."""
        return self.first + self.end - self.start

    @property
    def is_split(self) -> bool:
        """Whether the sequence has tokens in other chunks too."""
        return self.end - self.start < self.length

    @property
    def occurrence(self) -> tuple[int, int | None]:
        """Tells a split sequence in flight from any other, also from itself where a step has it more than once."""
        return self.sequence_id, self.group_id


@dataclass
class _Layer:
    """[kv_heads, length, head_dim] each; the gradients are allocated by the first backward."""

    key: Tensor
    value: Tensor
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


@dataclass
class _Sequence:
    length: int
    layers: dict[int, _Layer] = field(default_factory=dict)
    forwarded: int = 0  # tokens [0, forwarded) have their KV here
    complete_from: int = 0  # tokens [complete_from, length) have begun or done their backward


class StateStore:
    """KV and dKV by occurrence of a sequence and layer. Only split sequences enter it."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[int, int | None], _Sequence] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is in flight."""
        return not self._sequences

    def num_bytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(
            tensor.nbytes
            for sequence in self._sequences.values()
            for layer in sequence.layers.values()
            for tensor in (layer.key, layer.value, layer.grad_key, layer.grad_value)
            if tensor is not None
        )

    def start_forward(self, span: Span) -> None:
        """Say that a part is about to run forward.

        Raises:
            DataError: an earlier part has not.
        """
        sequence = self._sequences.setdefault(span.occurrence, _Sequence(span.length, complete_from=span.length))
        if span.start > sequence.forwarded:
            raise _out_of_order(span, "forward", f"tokens from {sequence.forwarded} to {span.start} had none")
        sequence.forwarded = max(sequence.forwarded, span.end)

    def start_backward(self, span: Span) -> None:
        """Say that a part is about to run backward.

        Raises:
            DataError: a later part has not, or this one has already.
        """
        sequence = self._sequences.get(span.occurrence)
        if sequence is None or span.end != sequence.complete_from:
            raise _out_of_order(span, "backward", "a later part has none yet, or this one had its own")
        sequence.complete_from = span.start

    def finish_backward(self, span: Span) -> None:
        """Say that a part has run backward; with the first part the sequence gives back its memory."""
        if span.start == 0:
            del self._sequences[span.occurrence]

    def write(self, span: Span, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the KV of a part: [kv_heads, num_tokens, head_dim] each."""
        sequence = self._sequences[span.occurrence]
        if layer not in sequence.layers:
            shape = (key.shape[0], sequence.length, key.shape[2])
            sequence.layers[layer] = _Layer(key.new_empty(shape), value.new_empty(shape))
        held = sequence.layers[layer]
        held.key[:, span.start : span.end] = key
        held.value[:, span.start : span.end] = value

    def read(self, span: Span, layer: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """Views of the KV of `tokens` of the sequence."""
        held = self._sequences[span.occurrence].layers[layer]
        return held.key[:, tokens], held.value[:, tokens]

    def gradient(self, span: Span, layer: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """Views of the KV gradients of `tokens`, to read or to add to: float32, or float64 when the KV is."""
        held = self._sequences[span.occurrence].layers[layer]
        if held.grad_key is None or held.grad_value is None:
            # bfloat16 would lose what many small contributions add up to.
            dtype = torch.promote_types(held.key.dtype, torch.float32)
            held.grad_key = torch.zeros_like(held.key, dtype=dtype)
            held.grad_value = torch.zeros_like(held.value, dtype=dtype)
        return held.grad_key[:, tokens], held.grad_value[:, tokens]


@dataclass(frozen=True)
class ChunkContext:
    """What the attention of a chunk has to know beyond its tensors. The spans lie side by side and cover the chunk."""

    spans: Sequence[Span]
    store: StateStore


def _out_of_order(span: Span, what: str, why: str) -> DataError:
    return DataError(
        f"the {what} of tokens {span.start} to {span.end} of sequence {span.sequence_id} is out of order: {why}",
        where="schedule.parquet",
        hint="`chunkplan validate` names what is wrong with the plan; build it again",
    )
