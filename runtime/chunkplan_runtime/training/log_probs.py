"""Log-probabilities of the tokens of sequences in memory, in chunks, for whatever a trainer makes a loss of.

To autograd they are one operation. Its backward runs the chunks forward and backward, weighed by the gradients that
come in, as the step of a plan with a loss of the whole step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.cost.model import CostModel
from chunkplan.errors import UsageError
from chunkplan_runtime.execution.step_loss import OfChunks, TargetTokens, by_sequence, step_weights, target_columns
from chunkplan_runtime.feed.stream import RankWork, chunk_tensors

#: The cost model that steps are planned by: one object for all, as its rates are cached.
_COST = CostModel()


@dataclass(frozen=True)
class TokenLogProbs:
    """The target tokens of sequences, one sequence after another: [num_target_tokens] each, in at least float32.

    `log_probs` and `entropies` have a gradient where weights have one. Where more was asked for there are also, without
    one: `log_sum_squares`, the logarithm of the sum of squared probabilities; `mean_logits`, over the vocabulary; and
    `is_top`, true where no token is likelier.
    """

    log_probs: Tensor
    entropies: Tensor
    log_sum_squares: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top: Tensor | None = None


def plan_work(
    sequences: Sequence[tuple[Tensor, Tensor]], vocab_size: int, step: int, **options: Any
) -> tuple[RankWork, int]:
    """The work of one rank in a step of these sequences, planned now, and the number of its targets.

    Of a sequence there are token ids and targets [length], true where a token's prediction counts, which the first
    one's does not. `options`: those of
    `plan_step`. Raises UsageError: sequences and targets do not go together, or an option is not what it may be.
    """
    from chunkplan.planning.step import plan_step  # the planner, which executing a plan does not need

    tokens, masks = list[Int32Array](), list[BoolArray]()
    for number, (ids, mask) in enumerate(sequences):
        if (
            ids.ndim != 1
            or ids.shape != mask.shape
            or not len(ids)
            or mask.dtype != torch.bool
            or ids.is_floating_point()
        ):
            raise UsageError(
                f"sequence {number} has tokens of shape {tuple(ids.shape)}, {ids.dtype}, and targets of "
                f"{tuple(mask.shape)}, {mask.dtype}",
                hint="give of each sequence one token id at least, and a bool for each: [length] and [length]",
            )
        tokens.append(ids.detach().cpu().numpy().astype(np.int32))
        masks.append(mask.cpu().numpy() & (np.arange(len(ids)) > 0))
    lengths = np.array([len(each) for each in tokens])
    planned = plan_step(lengths, dp=1, cost=_COST, targets=masks, tokens=tokens, step=step, **options)

    def gather(ids: Int64Array, starts: Int64Array, stops: Int64Array) -> tuple[Int32Array, BoolArray]:
        runs = list(zip(ids.tolist(), starts.tolist(), stops.tolist(), strict=True))
        found = [np.empty(0, np.int32), *(tokens[number][start:stop] for number, start, stop in runs)]
        wanted = [np.empty(0, np.bool_), *(masks[number][start:stop] for number, start, stop in runs)]
        return np.concatenate(found), np.concatenate(wanted)

    chunks = {chunk.chunk_id: chunk for chunk in planned.chunks[0]}
    how = gather, lambda ids, *_: lengths[ids], vocab_size, Path("memory")
    tensors = chunk_tensors([*chunks.values()], planned.prefixes, *how)
    return RankWork(step, 0, planned.actions[0, 0], chunks, tensors), planned.num_target_tokens


def named(columns: Tensor) -> TokenLogProbs:
    """The columns of `entropies` or `readings` [num_target_tokens, 2 or 5] by their names."""
    losses, entropies, *more = columns.unbind(1)
    return TokenLogProbs(-losses, entropies, *more[:2], *(each > 0 for each in more[2:]))


def in_order(work: RankWork, values: OfChunks, device: torch.device) -> TokenLogProbs:
    """The results of `entropies` or `readings` for the target tokens of chunks, by sequence and position."""
    *_, (_, _, columns) = by_sequence([target_columns([work], [values])])
    return named(torch.from_numpy(columns).to(device))


def weights_of(
    work: RankWork, values: OfChunks, by_log_prob: Tensor | None, by_entropy: Tensor | None
) -> list[OfChunks]:
    """The weights of tokens that gradients by log-probabilities and entropies come to; None: there is no such one."""

    def loss(tokens: TargetTokens) -> Tensor:
        terms = zip((tokens.log_probs, tokens.entropies), (by_log_prob, by_entropy), strict=True)
        return torch.stack([(given * gradient).sum() for given, gradient in terms if gradient is not None]).sum()

    pairs = {chunk_id: each[:, :2] for chunk_id, each in values.items()}
    return step_weights(loss, [work], [pairs], lambda own: [own])[1]


def attached(found: TokenLogProbs, backward: Callable[[Tensor | None, Tensor | None], None]) -> TokenLogProbs:
    """`found`, whose log-probabilities and entropies have autograd call `backward` with their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    operation: Any = _Attached
    log_probs, entropies = operation.apply(anchor, found.log_probs, found.entropies, backward)
    return replace(found, log_probs=log_probs, entropies=entropies)


class _Attached(torch.autograd.Function):
    """Hands on values, and in its backward their gradients to a function that adds to `.grad` of weights itself."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, log_probs: Tensor, entropies: Tensor, backward: Any) -> tuple[Tensor, Tensor]:
        """Implements `torch.autograd.Function.forward`."""
        ctx.in_chunks = backward
        ctx.set_materialize_grads(False)
        return log_probs.clone(), entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        """Implements `torch.autograd.Function.backward`."""
        if any(each is not None for each in gradients):
            ctx.in_chunks(*gradients)
        return None, None, None, None
