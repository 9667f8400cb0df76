"""The loss: cross-entropy of target tokens, without ever holding the logits of a chunk.

Loss and gradient are computed together, a block of positions at a time, when a chunk runs backward: the head runs once
forward and once backward, and what a chunk in flight keeps of its loss is its final hidden states. How many positions
a block has is for `chunkplan.cost.sums` to say, which counts their logits: the gradient of all of the head is made, and
added to its sum, for every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from chunkplan.cost.sums import LOGIT_BYTES, tokens_at_once
from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.feed.labels import NO_TARGET
from chunkplan_runtime.models.compiled import Refusable
from chunkplan_runtime.models.model import Head


def token_losses(head: Head, hidden: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """The cross-entropy of every position [num_tokens], 0 without a target, in at least float32; no gradients.

    labels [num_tokens] lie on the CPU, so that nobody waits for a GPU to count them.
    """
    losses = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))  # [num_tokens]
    with torch.no_grad():
        for rows, targets in _blocks(labels, vocab_size, hidden.device):
            losses[rows], *_ = _exponentials(head(hidden[rows]), targets)
    return losses


def losses_and_gradient(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    vocab_size: int,
    scale: float,
    label_smoothing: float = 0.0,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """The losses of `token_losses`, and the gradient [num_tokens, hidden_size] of `scale` times their sum for `hidden`.

    `label_smoothing`: the share of a target that is spread over all entries of the vocabulary, in losses and gradient.
    `compiled`: what is made of logits is one kernel, that reads them three times, and not one for each operator.
    Gradients of the head's own parameters are added to their `.grad`.
    """
    losses = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))  # [num_tokens]
    gradient = torch.zeros_like(hidden)  # [num_tokens, hidden_size]
    compiled = compiled and _compiled()[0].why_not is None
    logit_bytes = 2 * hidden.itemsize if compiled else LOGIT_BYTES
    for rows, targets in _blocks(labels, vocab_size, hidden.device, logit_bytes):
        block = hidden[rows].detach().requires_grad_()  # [rows, hidden_size]
        logits = head(block)  # [rows, vocab_size]
        with_gradient = _compiled()[1] if compiled and len(targets) > 1 else _with_gradient
        losses[rows], of_logits = with_gradient(logits.detach(), targets, scale, label_smoothing)
        torch.autograd.backward(logits, of_logits)
        del logits, of_logits  # before there are others
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


def _blocks(
    labels: Tensor, vocab_size: int, device: torch.device, logit_bytes: int = LOGIT_BYTES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions with a target and their labels, on `device`, as many at once as their logits allow."""
    rows = torch.nonzero(labels != NO_TARGET).flatten()  # [num_target_tokens]
    for block in torch.split(rows, tokens_at_once(vocab_size, logit_bytes)) if len(rows) else ():
        yield block.to(device, non_blocking=True), labels[block].long().to(device, non_blocking=True)


def _with_gradient(logits: Tensor, targets: Tensor, scale: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """Losses [rows], and the gradient of `scale` times their sum: the softmax less each entry's share of the target.

    It is made in the place of the exponentials, as autograd would not do: beside the logits there is no more than
    these, and the gradient where its dtype is narrower.
    """
    losses, gradient, totals = _exponentials(logits, targets, smoothing)
    gradient *= (scale / totals)[:, None]
    if smoothing:
        gradient -= scale * smoothing / logits.shape[1]
    at_targets = torch.arange(len(targets), device=targets.device), targets
    of_targets = gradient[at_targets] - scale * (1 - smoothing)  # before they are rounded
    gradient = gradient.to(logits.dtype)
    gradient[at_targets] = of_targets.to(logits.dtype)
    return losses, gradient


@cache
def _compiled() -> tuple[Refusable, Callable[..., tuple[Tensor, Tensor]]]:
    """`_as_formula` of any number of rows but one, which a compiler takes for another kind of tensor."""
    losses = Refusable("losses are made")
    return losses, partial(losses.run, torch.compile(_as_formula, dynamic=True), _with_gradient)


def _as_formula(logits: Tensor, targets: Tensor, scale: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """`_with_gradient`, without any place in memory: for a compiler, that makes none but for what is returned."""
    values = logits.to(wide(logits.dtype))
    values = values - values.amax(1, keepdim=True)
    exponentials = values.exp()
    totals = exponentials.sum(1, keepdim=True)
    aims = values.gather(1, targets[:, None])
    if smoothing:
        aims = (1 - smoothing) * aims + smoothing * values.mean(1, keepdim=True)
    hits = (torch.arange(logits.shape[1], device=logits.device) == targets[:, None]).to(values.dtype)
    gradient = exponentials * (scale / totals) - hits * (scale * (1 - smoothing)) - scale * smoothing / logits.shape[1]
    return (totals.log() - aims)[:, 0], gradient.to(logits.dtype)


def _exponentials(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [rows] in at least float32, and what they are of: exponentials [rows, vocab_size] and their sums [rows].

    Those of each row are over the largest one, which keeps them finite.
    """
    values = logits.to(wide(logits.dtype), copy=True)
    values -= values.amax(1, keepdim=True)
    aims = values.gather(1, targets[:, None])[:, 0]
    if smoothing:
        aims = (1 - smoothing) * aims + smoothing * values.mean(1)
    totals = values.exp_().sum(1)
    return totals.log() - aims, values, totals
