"""Does the actions of one rank in one step, in their order. After it the gradients are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Action, Chunk
from chunkplan_runtime.loss import cross_entropy_sum
from chunkplan_runtime.models import CausalLM
from chunkplan_runtime.state import ChunkContext, Span, StateStore
from chunkplan_runtime.stream import ChunkTensors, RankWork

#: Per op, what must have happened to a chunk before (nothing: None) for the op to come next.
_BEFORE = {
    "forward": (None,),
    "forward_kv": (None,),
    "recompute": ("forward_kv",),
    "backward": ("forward", "recompute"),
}


class Executor:
    """Runs chunks through a model on one process and one pipeline stage. Gradients are added to `.grad`."""

    def __init__(self, model: CausalLM) -> None:
        self.store = StateStore()
        self._model = model

    def run(self, work: RankWork, load: Callable[[Chunk], ChunkTensors], num_target_tokens: int) -> float:
        """Do all actions of `work`; returns its share of the loss, a mean over the step's `num_target_tokens`.

        Raises:
            UsageError: an op is not known here.
            DataError: the actions do not run every chunk forward and backward in an order that gives exact gradients.
        """
        self.store = StateStore()  # what a run that raised left behind must not reach this one
        where = f"step {work.step}, rank {work.dp_rank}"
        done: dict[int, str | None] = dict.fromkeys(work.chunks)
        in_flight: dict[int, tuple[Tensor, tuple[Span, ...]]] = {}
        loss = 0.0
        for action in work.actions:
            _check(action, done, where)
            chunk = work.chunks[action.chunk_id]
            if action.op == "forward_kv":
                with torch.no_grad():
                    self._forward(load(chunk))
            elif action.op == "backward":
                chunk_loss, spans = in_flight.pop(chunk.chunk_id)
                self._backward(chunk_loss, spans)
                loss += chunk_loss.item()
            else:
                tensors = load(chunk)
                hidden = self._forward(tensors)
                total = cross_entropy_sum(self._model.head, hidden, tensors.labels.to(hidden.device))
                in_flight[chunk.chunk_id] = total / max(num_target_tokens, 1), tensors.spans
            done[chunk.chunk_id] = action.op
        left = [chunk_id for chunk_id, op in done.items() if op != "backward"]
        if left:
            raise _broken(f"no backward of chunk {left[0]}", where)
        if not self.store.is_empty:
            raise _broken("a sequence is left without the backward of its first part", where)
        return loss

    def _forward(self, tensors: ChunkTensors) -> Tensor:
        """Final hidden states [num_tokens, hidden_size]."""
        for span in tensors.spans:
            if span.is_split:
                self.store.start_forward(span)
        return self._model.hidden_states(
            tensors.input_ids, tensors.position_ids, ChunkContext(tensors.spans, self.store)
        )

    def _backward(self, loss: Tensor, spans: tuple[Span, ...]) -> None:
        split = [span for span in spans if span.is_split]
        for span in split:
            self.store.start_backward(span)
        torch.autograd.backward(loss)
        for span in split:
            self.store.finish_backward(span)


def _check(action: Action, done: dict[int, str | None], where: str) -> None:
    if action.op not in _BEFORE or action.virtual_stage != 0:
        what = action.op if action.op not in _BEFORE else f"virtual stage {action.virtual_stage}"
        raise UsageError(f"{what} is not supported by this runtime", where=where, hint="build the plan with `--pp 1`")
    if action.chunk_id not in done:
        raise _broken(f"{action.op} of chunk {action.chunk_id}, which does not exist", where)
    before = done[action.chunk_id]
    if before not in _BEFORE[action.op]:
        raise _broken(f"{action.op} of chunk {action.chunk_id} after {before or 'nothing'}", where)


def _broken(message: str, where: str) -> DataError:
    return DataError(message, where=where, hint="`chunkplan validate` names what is wrong with the plan")
