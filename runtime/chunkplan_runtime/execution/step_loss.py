"""Losses of a whole step: of the log-probabilities of its target tokens, whichever ranks and chunks these are in.

One forward of every chunk, which keeps no activations, gives the log-probabilities. The derivatives of the loss by
these are all that the backwards need to know of it: they weigh the cross-entropies of tokens, so that the step is as
exact, chunk by chunk, as a step of cross-entropy. Only numbers of target tokens cross processes.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.config.losses import LOSSES
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan_runtime.feed.samples import OF_SEQUENCES, StepSamples
from chunkplan_runtime.feed.stream import NO_TARGET, ChunkTensors, RankWork


@dataclass(frozen=True)
class TargetTokens:
    """The target tokens of all ranks in a step, by sequence and position, with what the model gives each of them.

    `log_probs` and `entropies` [num_target_tokens], in at least float32. `sequence_ids` int64 [num_sequences]: numbers
    of sequences in the analysis, in order; one that a step has twice is there twice. `which` int64 [num_target_tokens]:
    the place of each token's sequence among these. `positions` int64 [num_target_tokens]: of the tokens in their
    sequences.

    `reference` [num_target_tokens]: log-probabilities by a reference model: those of the data, of a folder of scores,
    or of the model without its adapters; None if there are none or they were not asked for. Of the data, None where it
    has none: `group` int64 (sequences that have the same one belong together), `label` bool (whether an answer is
    chosen or desirable), `reward`, `advantage` [num_sequences]; `advantages`, `old_log_probs` [num_target_tokens].
    """

    log_probs: Tensor
    entropies: Tensor
    sequence_ids: Tensor
    which: Tensor
    positions: Tensor
    reference: Tensor | None = None
    group: Tensor | None = None
    label: Tensor | None = None
    reward: Tensor | None = None
    advantage: Tensor | None = None
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` [num_target_tokens] by sequence, [num_sequences]."""
        return values.new_zeros(len(self.sequence_ids)).index_add(0, self.which, values)

    def means(self, values: Tensor) -> Tensor:
        """Means of `values` [num_target_tokens] by sequence, [num_sequences]."""
        return self.sums(values) / self.sums(torch.ones_like(values))


#: Numbers that say how training goes, by name, such as "rewards/margins".
Metrics = Mapping[str, Tensor | float]

#: `loss(tokens)` -> the loss of a step, a single number that autograd can differentiate by `tokens.log_probs`, and by
#: `tokens.entropies` where these are in it; or this and metrics. Each process calls it with the same tokens.
StepLoss = Callable[[TargetTokens], Tensor | tuple[Tensor, Metrics]]

#: Of target tokens of this process, by their sequences [n] and positions [n], numbers [n].
AtTokens = Callable[[Int64Array, Int64Array], npt.NDArray[Any]]

#: By chunk_id losses of tokens, or their weights: [num_tokens], or [num_tokens, n].
OfChunks = dict[int, Tensor]

#: Of target tokens the sequences [n], the positions [n] and the losses and other numbers [n] or [n, 2 or more].
Columns = tuple[Int64Array, Int64Array, npt.NDArray[np.floating[Any]]]
_NONE: Columns = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.float32)


class Weighed(NamedTuple):
    """The value of a loss in a step, of each rank the weights of the losses of tokens, and metrics."""

    value: float
    weights: list[OfChunks]
    metrics: dict[str, float]


def step_weights(
    loss: StepLoss,
    works: Sequence[RankWork],
    losses: Sequence[OfChunks],
    gather: Callable[[Columns], list[Columns]],
    process: int = 0,
    samples: StepSamples | None = None,
    reference: AtTokens | None = None,
) -> Weighed:
    """The value of a loss in a step, and its derivatives by the losses of tokens, for each of `works`.

    Args:
        works: of the data-parallel ranks of this process.
        losses: of each rank, by chunk, cross-entropies and entropies [num_tokens, 2], or [num_tokens, 3] with the
            cross-entropies of a reference; of no chunks on a stage that does not know them.
        gather: gives what each process has given it, by process; it is called once.
        process: the number of this one.
        samples: what the sequences of the step have beside tokens.
        reference: gives log-probabilities of the reference, where `losses` has none.

    Derivatives are [num_tokens] by cross-entropies, or [num_tokens, 2] with those by entropies. Raises UsageError:
    `loss` does not return a number that depends on log-probabilities; DataError: a group is in several steps.
    """
    chunks = [(rank, chunk_id) for rank, found in enumerate(losses) for chunk_id in found]
    tensors = [works[rank].tensors[chunk_id] for rank, chunk_id in chunks]
    rows = [_target_rows(each) for each in tensors]
    readers = _readers(samples, reference)
    own = _with_columns(target_columns(works, losses), [*readers.values()])
    everyone = gather(own)
    before = sum(len(ids) for ids, *_ in everyone[:process])
    order, is_first, columns = by_sequence(everyone)
    device = losses[chunks[0][0]][chunks[0][1]].device if chunks else torch.device("cpu")
    ids, positions, values = (torch.from_numpy(column).to(device) for column in columns)
    firsts = torch.from_numpy(is_first).to(device)
    more: dict[str, Tensor | None] = {}
    if values.shape[1] > 2 + len(readers):
        more["reference"] = -values[:, 2]
    more |= dict(zip(readers, values.T[values.shape[1] - len(readers) :], strict=True))
    if samples is not None:
        found = {name: samples.at_sequences(name, columns[0][is_first]) for name in OF_SEQUENCES}
        more |= {name: None if each is None else _as_tensor(each, values) for name, each in found.items()}
    with torch.enable_grad():
        log_probs, entropies = (-values[:, 0]).requires_grad_(), values[:, 1].clone().requires_grad_()
        tokens = TargetTokens(log_probs, entropies, ids[firsts], firsts.cumsum(0) - 1, positions, **more)
        value, metrics = _called(loss, tokens)
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
    return Weighed(value.item(), weights, {name: float(each) for name, each in metrics.items()})


def _readers(samples: StepSamples | None, reference: AtTokens | None) -> dict[str, AtTokens]:
    """Functions that give numbers of this process's target tokens, by their names in `TargetTokens`."""
    found = dict[str, AtTokens]()
    if samples is not None:
        if samples.cut is not None:
            raise DataError(
                f"a step has {samples.cut}, and its loss is of whole groups",
                hint="build the plan again",
            )
        found = {name: partial(samples.at_tokens, name) for name in samples.of_tokens}
    return found if reference is None else {**found, "reference": reference}


def _as_tensor(numbers: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Numbers on the device of a tensor, real ones in its dtype."""
    found = torch.from_numpy(numbers)
    return found.to(like) if found.is_floating_point() else found.to(like.device)


def _with_columns(columns: Columns, readers: Sequence[AtTokens]) -> Columns:
    ids, positions, values = columns
    more = [read(ids, positions).astype(values.dtype) for read in readers] if len(ids) else []
    return ids, positions, np.column_stack([values, *more]) if more else values


def load_loss(named: str) -> StepLoss:
    """The function NAME of a Python file, from FILE:NAME; raises UsageError: there is none, or the file raises."""
    path, _, name = named.rpartition(":")
    hint = "for example own_loss.py:loss, of a file with `def loss(tokens): return -tokens.log_probs.mean()`"
    if not Path(path).is_file():
        names = ", ".join(name for name in LOSSES if name != "own")
        raise UsageError(f"--loss: there is no file {path or named!r}", hint=f"give {names}; or FILE:NAME, {hint}")
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


def _called(loss: StepLoss, tokens: TargetTokens) -> tuple[Tensor, Metrics]:
    try:
        value: object = loss(tokens)
    except ChunkplanError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if frame.filename != __file__][:1] or frames[-1:]
        message = f"the loss of the step raised {type(error).__name__}: {error}"
        hint = "`tokens` is a chunkplan_runtime.TargetTokens: log_probs, entropies, which, sequence_ids, positions; "
        hint += "label, group, reward and others are None where the data has none"
        raise UsageError(message, where=f"{place[0].filename}:{place[0].lineno}", hint=hint) from error
    value, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        for name, each in metrics.items():
            if not isinstance(each, Tensor | float | int) or (isinstance(each, Tensor) and each.numel() != 1):
                shape = f" of shape {tuple(each.shape)}" if isinstance(each, Tensor) else ""
                told = f"the metric {name!r} of the loss is a {type(each).__name__}{shape}, expected one number"
                raise UsageError(told, hint="reduce it by .mean()")
        return value, metrics
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    raise UsageError(
        f"the loss of the step is {given}, expected one number that depends on `tokens.log_probs`",
        hint="reduce it by .sum() or .mean(), and do not detach log_probs on the way",
    )
