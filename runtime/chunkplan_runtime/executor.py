"""Does the actions of one rank in one step, in their order. After it the gradients are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.loss import NO_TARGET, losses_and_gradient, token_losses
from chunkplan_runtime.models import CausalLM
from chunkplan_runtime.offload import HostMemory
from chunkplan_runtime.pages import DeviceMemory, Memory
from chunkplan_runtime.state import StateStore
from chunkplan_runtime.stream import ChunkTensors, RankWork

#: Per op, what must have happened to a chunk before (nothing: None) for the op to come next.
_BEFORE = {
    "forward": (None,),
    "forward_kv": (None,),
    "recompute": ("forward_kv",),
    "backward": ("forward", "recompute"),
}

#: A page of keys and values has room for this many chunks: few kernel calls a layer, and little memory for each.
_PAGE_CHUNKS = 4

#: Entered around every action, to time it.
Around = Callable[[Action], AbstractContextManager[object]]


@dataclass(frozen=True)
class SequenceLoss:
    """The loss of one sequence in a step: summed over its `num_target_tokens`. A sequence may occur more than once."""

    sequence_id: int
    loss: float
    num_target_tokens: int


@dataclass(frozen=True)
class RankLoss:
    """What a rank lost in a step: `loss` is its share of the mean over the step's target tokens."""

    loss: float
    sequences: list[SequenceLoss]


class Executor:
    """Runs chunks through a model on one process and one pipeline stage. Gradients are added to `.grad`.

    `seed`: of dropout, which a chunk draws alike whenever it runs forward. `kv_offload`: keys, values and their
    gradients of split sequences lie in host memory.
    """

    def __init__(self, model: CausalLM, *, seed: int = 0, kv_offload: bool = False) -> None:
        self._model = model
        self._seed = seed
        self._kv_offload = kv_offload
        self._memory: Memory | None = None
        self.store = StateStore(page_tokens=1)

    def run(self, work: RankWork, num_target_tokens: int, around: Around = lambda action: nullcontext()) -> RankLoss:
        """Do all actions of `work`, whose share of the loss is one of the step's `num_target_tokens`.

        Raises:
            UsageError: an op is not known here.
            DataError: the actions do not run every chunk forward and backward in an order that gives exact gradients.
        """
        self._open(work)
        where = f"step {work.step}, rank {work.dp_rank}"
        done: dict[int, str | None] = dict.fromkeys(work.chunks)
        in_flight: dict[int, Tensor] = {}
        losses: dict[int, Tensor] = {}
        for action in work.actions:
            _check(action, done, where)
            chunk_id = action.chunk_id
            with around(action):
                if action.op == "forward_kv":
                    with torch.no_grad():
                        self._forward(work, chunk_id)
                elif action.op == "backward":
                    hidden = in_flight.pop(chunk_id)
                    losses[chunk_id] = self._backward(hidden, work.tensors[chunk_id], 1 / max(num_target_tokens, 1))
                else:
                    in_flight[chunk_id] = self._forward(work, chunk_id)
            done[chunk_id] = action.op
        left = [chunk_id for chunk_id, op in done.items() if op != "backward"]
        if left:
            raise _broken(f"no backward of chunk {left[0]}", where)
        if not self.store.is_empty:
            raise _broken("a sequence is left without the backward of its first part", where)
        return _collect(work, losses, num_target_tokens)

    def evaluate(self, work: RankWork, num_target_tokens: int) -> RankLoss:
        """The loss that `run` would find, by forwards alone: no gradients, nothing kept but KV.

        Raises:
            DataError: the forwards are not in the order of the sequences, or do not run every chunk.
        """
        self._open(work)
        losses: dict[int, Tensor] = {}
        with torch.no_grad():
            for action in work.actions:
                if action.op in ("forward", "forward_kv") and action.chunk_id in work.tensors:
                    tensors = work.tensors[action.chunk_id]
                    hidden = self._forward(work, action.chunk_id)
                    losses[action.chunk_id] = token_losses(
                        self._model.head, hidden, tensors.labels, self._model.vocab_size
                    )
                    for span in tensors.spans:
                        if span.is_split and span.end == span.length:
                            self.store.drop(span)
        if losses.keys() != work.chunks.keys():
            raise _broken("a chunk has no forward", f"step {work.step}, rank {work.dp_rank}")
        return _collect(work, losses, num_target_tokens)

    def _open(self, work: RankWork) -> None:
        """Begin with an empty store: what a run that raised left behind must not reach this one."""
        page_tokens = _PAGE_CHUNKS * max((chunk.num_tokens for chunk in work.chunks.values()), default=1)
        if self._memory is None:
            self._memory = HostMemory(self._model.device) if self._kv_offload else DeviceMemory()
        self.store = StateStore(max(page_tokens, 1), self._memory)

    def _forward(self, work: RankWork, chunk_id: int) -> Tensor:
        """Final hidden states [num_tokens, hidden_size]."""
        tensors = work.tensors[chunk_id]
        for span in tensors.spans:
            if span.is_split:
                self.store.start_forward(span)
        device = self._model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(_chunk_seed(self._seed, work.step, work.dp_rank, chunk_id))
            return self._model.hidden_states(tensors, self.store)

    def _backward(self, hidden: Tensor, tensors: ChunkTensors, scale: float) -> Tensor:
        """Losses [num_tokens], computed only now."""
        split = [span for span in tensors.spans if span.is_split]
        for span in split:
            self.store.start_backward(span)
        losses, gradient = losses_and_gradient(self._model.head, hidden, tensors.labels, self._model.vocab_size, scale)
        if hidden.requires_grad:  # not where all that is trained is the head
            torch.autograd.backward(hidden, gradient)
        for span in split:
            self.store.finish_backward(span)
        return losses


def _chunk_seed(*identity: int) -> int:
    """The same for a chunk of a step whatever K, and whatever ran before."""
    return int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _collect(work: RankWork, losses: dict[int, Tensor], num_target_tokens: int) -> RankLoss:
    """Sum token losses by sequence; they come from the device at once."""
    order = [chunk_id for chunk_id in sorted(losses) if work.chunks[chunk_id].segments]
    if not order:
        return RankLoss(0.0, [])
    by_token = torch.cat([losses[chunk_id] for chunk_id in order]).double().cpu().numpy()
    is_target = torch.cat([work.tensors[chunk_id].labels for chunk_id in order]).numpy() != NO_TARGET
    spans = [span for chunk_id in order for span in work.tensors[chunk_id].spans]
    lengths = np.array([span.end - span.start for span in spans])
    starts = np.cumsum(lengths) - lengths
    sequence_ids, which = np.unique([span.sequence_id for span in spans], return_inverse=True)
    sums = np.bincount(which, np.add.reduceat(by_token, starts))
    counts = np.bincount(which, np.add.reduceat(is_target.astype(np.int64), starts)).astype(np.int64)
    sequences = [
        SequenceLoss(*values) for values in zip(sequence_ids.tolist(), sums.tolist(), counts.tolist(), strict=True)
    ]
    return RankLoss(float(by_token.sum()) / max(num_target_tokens, 1), sequences)


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
