"""Losses of a whole step: of the log-probabilities of its target tokens, whichever ranks and chunks these are in.

One forward of every chunk, which keeps no activations, gives the log-probabilities. The derivatives of the loss by
these are all that the backwards need to know of it: they weigh the cross-entropies of tokens, so that the step is as
exact, chunk by chunk, as a step of cross-entropy. Only numbers of target tokens cross processes.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.errors import UsageError
from chunkplan_runtime.feed.stream import NO_TARGET, ChunkTensors, RankWork


@dataclass(frozen=True)
class TargetTokens:
    """The target tokens of all ranks in a step, by sequence and position, with what the model gives each of them.

    `log_probs` and `entropies` [num_target_tokens], in at least float32. `sequence_ids` int64 [num_sequences]: numbers
    of sequences in the analysis, in order; one that a step has twice is there twice. `which` int64 [num_target_tokens]:
    the place of each token's sequence among these. `positions` int64 [num_target_tokens]: of the tokens in their
    sequences. `reference` [num_target_tokens]: log-probabilities of the model without its adapters; None if not asked
    for.
    """

    log_probs: Tensor
    entropies: Tensor
    sequence_ids: Tensor
    which: Tensor
    positions: Tensor
    reference: Tensor | None = None

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` [num_target_tokens] by sequence, [num_sequences]."""
        return values.new_zeros(len(self.sequence_ids)).index_add(0, self.which, values)


#: `loss(tokens)` -> the loss of a step, a single number that autograd can differentiate by `tokens.log_probs`, and by
#: `tokens.entropies` where these are in it. Each process calls it with the same tokens.
StepLoss = Callable[[TargetTokens], Tensor]

#: By chunk_id losses of tokens, or their weights: [num_tokens], or [num_tokens, n].
OfChunks = dict[int, Tensor]

#: Of target tokens the sequences [n], the positions [n] and the losses [n] or [n, 2 or 3].
Columns = tuple[Int64Array, Int64Array, npt.NDArray[np.floating[Any]]]
_NONE: Columns = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.float32)


def step_weights(
    loss: StepLoss,
    works: Sequence[RankWork],
    losses: Sequence[OfChunks],
    gather: Callable[[Columns], list[Columns]],
    process: int = 0,
) -> tuple[float, list[OfChunks]]:
    """The value of a loss in a step, and its derivatives by the losses of tokens, for each of `works`.

    Args:
        works: of the data-parallel ranks of this process.
        losses: of each, by chunk, cross-entropies and entropies [num_tokens, 2], or [num_tokens, 3] with the
            cross-entropies of a reference; of no chunks on a stage that does not know them.
        gather: gives what each process has given it, by process; it is called once.
        process: the number of this one.

    Derivatives are [num_tokens] by cross-entropies, or [num_tokens, 2] with those by entropies. Raises UsageError:
    `loss` does not return a number that depends on log-probabilities.
    """
    chunks = [(rank, chunk_id) for rank, found in enumerate(losses) for chunk_id in found]
    tensors = [works[rank].tensors[chunk_id] for rank, chunk_id in chunks]
    rows = [_target_rows(each) for each in tensors]
    own = target_columns(works, losses)
    everyone = gather(own)
    before = sum(len(ids) for ids, *_ in everyone[:process])
    order, is_first, columns = by_sequence(everyone)
    device = losses[chunks[0][0]][chunks[0][1]].device if chunks else torch.device("cpu")
    ids, positions, values = (torch.from_numpy(column).to(device) for column in columns)
    firsts = torch.from_numpy(is_first).to(device)
    with torch.enable_grad():
        log_probs, entropies = (-values[:, 0]).requires_grad_(), values[:, 1].clone().requires_grad_()
        reference = -values[:, 2] if values.shape[1] > 2 else None
        of_sequences = firsts.cumsum(0) - 1
        value = _called(loss, TargetTokens(log_probs, entropies, ids[firsts], of_sequences, positions, reference))
        by_log_prob, by_entropy = torch.autograd.grad(value.sum(), (log_probs, entropies), allow_unused=True)
    derivatives = torch.zeros_like(log_probs) if by_log_prob is None else -by_log_prob
    if by_entropy is not None:
        derivatives = torch.stack([derivatives, by_entropy], 1)
    places = torch.from_numpy(np.argsort(order)[before : before + len(own[0])]).to(device)
    weights: list[OfChunks] = [{} for _ in works]
    parts = torch.split(derivatives[places], [len(each) for each in rows])
    for (rank, chunk_id), chunk, of_rows, part in zip(chunks, tensors, rows, parts, strict=True):
        weights[rank][chunk_id] = part.new_zeros(len(chunk.labels), *part.shape[1:])
        weights[rank][chunk_id].index_add_(0, of_rows.to(device), part)
    return value.item(), weights


def load_loss(named: str) -> StepLoss:
    """The function NAME of a Python file, from FILE:NAME; raises UsageError: there is none, or the file raises."""
    path, _, name = named.rpartition(":")
    hint = "for example own_loss.py:loss, of a file with `def loss(tokens): return -tokens.log_probs.mean()`"
    if not Path(path).is_file():
        raise UsageError(f"--loss: there is no file {path or named!r}", hint=f"give FILE:NAME, {hint}")
    try:
        found = runpy.run_path(path).get(name)
    except Exception as error:
        message = f"--loss: {type(error).__name__}: {error}"
        raise UsageError(message, where=path, hint=f"`python {path}` shows where") from error
    if not callable(found):
        raise UsageError(f"--loss: there is no function {name!r}", where=path, hint=hint)
    return cast(StepLoss, found)


def target_columns(works: Sequence[RankWork], losses: Sequence[OfChunks]) -> Columns:
    """The target tokens of ranks, of which `losses` has some by chunk, in the order of ranks and chunks there."""
    pairs = zip(works, losses, strict=True)
    return _joined([_columns(work.tensors[chunk_id], found[chunk_id]) for work, found in pairs for chunk_id in found])


def _target_rows(tensors: ChunkTensors) -> Tensor:
    """Tokens of a chunk that predict targets, each as often as sequences have it: int64 [n] on the CPU."""
    return tensors.rows[tensors.labels[tensors.rows] != NO_TARGET]


def _columns(tensors: ChunkTensors, losses: Tensor) -> Columns:
    rows, spans = _target_rows(tensors), tensors.of_sequences
    ids = np.repeat([span.sequence_id for span in spans], [span.stop - span.start for span in spans])
    positions = tensors.position_ids[0, rows].numpy().astype(np.int64) + 1
    is_target = (tensors.labels[tensors.rows] != NO_TARGET).numpy()
    return ids[is_target], positions, losses[rows.to(losses.device)].cpu().numpy()


def _joined(parts: Sequence[Columns]) -> Columns:
    ids, positions, losses = zip(*([each for each in parts if len(each[0])] or [_NONE]), strict=True)
    return np.concatenate(ids), np.concatenate(positions), np.concatenate(losses)


def by_sequence(everyone: Sequence[Columns]) -> tuple[Int64Array, BoolArray, Columns]:
    """The order of target tokens by sequence and position, which of them begin a sequence, and the columns in order.

    Of a sequence that is there twice, tokens of one position belong to the first and to the second one.
    """
    ids, positions, losses = _joined(everyone)
    order = np.lexsort((positions, ids))
    numbers = np.arange(len(order))
    same = np.r_[False, (np.diff(ids[order]) == 0) & (np.diff(positions[order]) == 0)]
    occurrence = numbers - np.maximum.accumulate(np.where(same, 0, numbers))
    order = order[np.lexsort((positions[order], occurrence, ids[order]))]
    ids, positions = ids[order], positions[order]
    is_first = np.r_[True, (np.diff(ids) != 0) | (np.diff(positions) <= 0)][: len(ids)]
    return order, is_first, (ids, positions, losses[order])


def _called(loss: StepLoss, tokens: TargetTokens) -> Tensor:
    try:
        value: object = loss(tokens)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if frame.filename != __file__][:1] or frames[-1:]
        message = f"the loss of the step raised {type(error).__name__}: {error}"
        hint = "`tokens` is a chunkplan_runtime.TargetTokens: log_probs, entropies, which, sequence_ids, positions"
        raise UsageError(message, where=f"{place[0].filename}:{place[0].lineno}", hint=hint) from error
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    raise UsageError(
        f"the loss of the step is {given}, expected one number that depends on `tokens.log_probs`",
        hint="reduce it by .sum() or .mean(), and do not detach log_probs on the way",
    )
