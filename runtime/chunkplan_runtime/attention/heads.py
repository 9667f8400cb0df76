"""Processes that share heads: tokens for heads before attention, and back after it.

This is the way of DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all for queries, keys and values together, and one
for the output. Each is the transpose of the other, so the gradients go the opposite ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.layout import Exchanges, Run, SharedPart


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges of heads for tokens in a layer, among the processes that share the heads of a part of a sequence."""

    exchanges: Exchanges
    part: SharedPart
    layer: int

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Give tokens for heads: [heads, own tokens, dim] each -> [heads / h, tokens of all in order, dim] each."""
        given: tuple[Tensor, ...] = _Exchange.apply(self, True, *tensors)  # type: ignore[no-untyped-call]
        return given

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Give heads for tokens: [heads / h, tokens of all in order, dim] -> [heads, own tokens, dim]."""
        given: tuple[Tensor, ...] = _Exchange.apply(self, False, tensor)  # type: ignore[no-untyped-call]
        return given[0]

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """Select the heads of this process from [heads]: [heads / h]."""
        return of_heads.view(len(self.part.heads), -1)[self._place]

    def scatter_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same as `to_heads`, without a graph. At most two copies of the exchanged tensors exist at once."""
        h, num_tokens, slices = len(self.part.heads), tensors[0].shape[1], self._slices
        by_process = [each.reshape(h, -1, *each.shape[1:]).transpose(1, 2).flatten(2) for each in tensors]
        widths = [each.shape[2] for each in by_process]  # of [h, num_tokens, heads / h x dim] each
        rows = torch.cat(by_process, 2).flatten(0, 1)  # [h x num_tokens, width]
        del by_process
        received = self._exchange(rows, [num_tokens] * h, self._counts)  # [tokens of all, width]
        del rows
        parts = zip(torch.split(_reordered(received, slices, sorted(slices)), widths, 1), tensors, strict=True)
        return tuple(part.view(len(part), -1, each.shape[2]).transpose(0, 1) for part, each in parts)

    def gather_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same as `to_tokens`, for many tensors at once and without a graph."""
        h, num_tokens, slices = len(self.part.heads), self._counts[self._place], self._slices
        flat = [each.transpose(0, 1).flatten(1) for each in tensors]  # [tokens of all, heads / h x dim]
        widths = [each.shape[1] for each in flat]
        rows = torch.cat(flat, 1)  # [tokens of all, width]
        del flat
        rows = _reordered(rows, sorted(slices), slices)
        received = self._exchange(rows, self._counts, [num_tokens] * h)  # [h x own tokens, width]
        del rows
        by_tensor = zip(torch.split(received.view(h, num_tokens, -1), widths, 2), tensors, strict=True)
        return tuple(
            part.reshape(h, num_tokens, -1, each.shape[2]).transpose(1, 2).flatten(0, 1) for part, each in by_tensor
        )  # [heads, own tokens, dim]

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        span = self.part.span
        what = f"exchanging heads of tokens {span.start} to {span.stop} of sequence {span.sequence_id} in layer"
        with self.exchanges.waiting(f"{what} {self.layer} with", self.part.heads):
            return self.exchanges.all_to_all(rows, sent, received, self.part.heads)

    @property
    def _place(self) -> int:
        return self.part.heads.index(self.exchanges.layout.replica)

    @property
    def _counts(self) -> list[int]:
        return [sum(stop - start for start, stop in slices) for slices in self.part.slices]

    @property
    def _slices(self) -> list[Run]:
        """Slices of all processes, in the order in which rows are exchanged."""
        return [each for slices in self.part.slices for each in slices]


def _reordered(rows: Tensor, slices: list[Run], wanted: list[Run]) -> Tensor:
    """Rows of tokens in slices [start, stop) one after another, in the order that is wanted."""
    if slices == wanted:
        return rows
    by_slice = dict(zip(slices, torch.split(rows, [stop - start for start, stop in slices]), strict=True))
    return torch.cat([by_slice[each] for each in wanted])


class _Exchange(torch.autograd.Function):
    """Tokens for heads or back; the gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.scatter_heads(tensors) if to_heads else exchange.gather_heads(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.exchange.gather_heads if ctx.to_heads else ctx.exchange.scatter_heads
        return None, None, *back(gradients)
