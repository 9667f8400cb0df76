"""The loss: cross-entropy summed over target tokens, without ever holding the logits of a chunk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Rows of logits alive at once: with a vocabulary of 150,000, float32, 0.6 GB each for logits and their gradient.
_ROWS = 1024

#: The label of a position that predicts nothing.
NO_TARGET = -100


def shifted_labels(input_ids: npt.NDArray[np.int32], target: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The label of every position of a sequence: the next token where that is a target, else `NO_TARGET`.

    The last position has none. For a segment, give one token more than it has: the target across its border counts.
    """
    labels = np.full(len(input_ids), NO_TARGET, np.int64)
    np.copyto(labels[:-1], input_ids[1:], where=target[1:])
    return labels


def cross_entropy_sum(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy of hidden states [num_tokens, hidden_size] with labels [num_tokens].

    Only positions with a target go through `head`, a block at a time; logits are at least float32 and are computed
    again in the backward. Without any target the result is a zero that still has a graph.
    """
    rows = torch.nonzero(labels != NO_TARGET).flatten()
    total = hidden[:0].sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    for block in torch.split(rows, _ROWS):
        total = total + checkpoint(
            _block_loss, head, hidden[block], labels[block], use_reentrant=False, preserve_rng_state=False
        )
    return total


def _block_loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")
