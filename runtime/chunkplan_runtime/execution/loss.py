"""The loss: cross-entropy of target tokens, without ever holding the logits of a chunk.

Loss and gradient are computed together, a block of positions at a time, when a chunk runs backward: the head runs once
forward and once backward, and what a chunk in flight keeps of its loss is its final hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.feed.labels import NO_TARGET
from chunkplan_runtime.models.model import Head

#: Logits alive at once, in numbers: 0.5 GB of float32, as much again for their gradient.
LOGITS_AT_ONCE = 2**27


def token_losses(head: Head, hidden: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """The cross-entropy of every position [num_tokens], 0 without a target, in at least float32; no gradients.

    labels [num_tokens] lie on the CPU, so that nobody waits for a GPU to count them.
    """
    losses = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))  # [num_tokens]
    with torch.no_grad():
        for rows, targets in _blocks(labels, vocab_size, hidden.device):
            losses[rows] = _cross_entropy(head, hidden[rows], targets)
    return losses


def losses_and_gradient(
    head: Head, hidden: Tensor, labels: Tensor, vocab_size: int, scale: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The losses of `token_losses`, and the gradient [num_tokens, hidden_size] of `scale` times their sum for `hidden`.

    `label_smoothing`: the share of a target that is spread over all entries of the vocabulary, in losses and gradient.
    Gradients of the head's own parameters are added to their `.grad`.
    """
    losses = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))  # [num_tokens]
    gradient = torch.zeros_like(hidden)  # [num_tokens, hidden_size]
    for rows, targets in _blocks(labels, vocab_size, hidden.device):
        block = hidden[rows].detach().requires_grad_()  # [rows, hidden_size]
        block_losses = _cross_entropy(head, block, targets, label_smoothing)  # [rows]
        torch.autograd.backward(block_losses.sum() * scale)
        losses[rows] = block_losses.detach().to(losses.dtype)  # some heads give float32 whatever their weights are
        assert block.grad is not None
        gradient[rows] = block.grad
    return losses, gradient


def use_head(head: Head, hidden: Tensor, vocab_size: int) -> None:
    """Give the head's parameters a gradient of zero, where no chunk of a step has a target that would give them one.

    A weight without a gradient is left out of its process's reduction, which then is not that of the others. `hidden`
    are hidden states like those that the head gets.
    """
    row, label = torch.zeros_like(hidden[:1]), torch.zeros(1, dtype=torch.int32)
    losses_and_gradient(head, row, label, vocab_size, scale=0.0)


def _blocks(labels: Tensor, vocab_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions with a target and their labels, on `device`, as many at once as their logits allow."""
    rows = torch.nonzero(labels != NO_TARGET).flatten()  # [num_target_tokens]
    for block in torch.split(rows, max(1, LOGITS_AT_ONCE // vocab_size)) if len(rows) else ():
        yield block.to(device, non_blocking=True), labels[block].long().to(device, non_blocking=True)


def _cross_entropy(head: Head, hidden: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    logits = head(hidden)  # [rows, vocab_size]
    return F.cross_entropy(logits.to(wide(logits.dtype)), labels, reduction="none", label_smoothing=label_smoothing)
