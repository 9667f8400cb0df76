"""Does the actions of one rank in one step, in their order. After it the gradients are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from chunkplan.errors import DataError, UsageError
from chunkplan.operations import BACKWARDS, FORWARDS
from chunkplan.planfile.plan import VALIDATE_HINT, Action
from chunkplan_runtime.attention.context import ChunkContext
from chunkplan_runtime.attention.kept import Shapes, page_shapes
from chunkplan_runtime.exchange import Activity, Exchanges
from chunkplan_runtime.execution.links import Links
from chunkplan_runtime.execution.loss import losses_and_gradient, token_losses, use_head
from chunkplan_runtime.execution.rank_loss import RankLoss, rank_loss
from chunkplan_runtime.feed.stream import RankWork
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.page_needs import page_needs
from chunkplan_runtime.kv.pages import DeviceMemory, PageMemory
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.models.checks import kv_shapes, windows
from chunkplan_runtime.models.dropout import mixed_seed
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.recurrent import keeps_kv
from chunkplan_runtime.models.router_loss import RouterLoss
from chunkplan_runtime.models.weight_halves import WeightHalves
from chunkplan_runtime.sharing import SharedPart
from chunkplan_runtime.spans import Span

#: Per op, what must have happened to a chunk before (nothing: None) for the op to come next.
_BEFORE = {
    "forward": (None,),
    "forward_kv": (None,),
    "recompute": ("forward_kv",),
    "backward": ("forward", "recompute"),
    "backward_input": ("forward", "recompute"),
    "backward_weight": ("backward_input",),
}

#: What a chunk ends with.
_LAST = ("backward", "backward_weight")

#: A page of keys and values has room for this many chunks: few kernel calls a layer, and little memory for each.
PAGE_CHUNKS = 4

#: Entered around every action, to time it.
Around = Callable[[Action], AbstractContextManager[object]]


class Executor:
    """Runs chunks through a model, or through one pipeline stage of it. Gradients are added to `.grad`.

    `seed`: of dropout, which a chunk draws alike whenever it runs forward. `kv_offload`: keys, values and their
    gradients of split sequences lie in host memory. `links`: to the stages before and after this one; what a stage
    needs to recompute a chunk is its own input, which it keeps. `exchanges`: with the processes that share sequences.
    `router_loss`: whose gradient is added, once it has begun a step.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        seed: int = 0,
        kv_offload: bool = False,
        links: Links | None = None,
        exchanges: Exchanges | None = None,
        router_loss: RouterLoss | None = None,
    ) -> None:
        self.model = model
        self._router_loss = router_loss
        self._exchanges = Exchanges() if exchanges is None else exchanges
        self._seed = seed
        self._kv_offload = kv_offload
        self._links = links
        #: Where pages of keys and values lie; None before the first step.
        self.memory: PageMemory | None = None
        self.store = StateStore(page_tokens=1)
        self.halves = WeightHalves()
        self._doing = ""
        #: Of chunks in flight, by chunk_id: what came from the stage before [num_tokens, hidden_size], and where their
        #: backward begins.
        self.inputs: dict[int, Tensor] = {}
        self._contexts: dict[int, ChunkContext | None] = {}
        self._borders: dict[int, tuple[Any, ...]] = {}
        self.in_flight: dict[int, Tensor | GradientEdge | None] = {}

    @property
    def doing(self) -> str:
        """What it does or waits for, in words, for a warning that it stalls."""
        return self.activity.words

    @doing.setter
    def doing(self, words: str) -> None:
        """See `Executor.doing`."""
        self._doing = words

    @property
    def activity(self) -> Activity:
        """The same, with the processes that it waits for in an exchange."""
        at = self._exchanges.at
        return Activity(self._doing + at.words, at.waits_for)

    def run(
        self,
        work: RankWork,
        num_target_tokens: int,
        around: Around = lambda action: nullcontext(),
        before_last: Callable[[], None] | None = None,
    ) -> RankLoss:
        """Do all actions of `work`, whose share of the loss is one of the step's `num_target_tokens`.

        `around` is entered around every action, after what it waits for from other stages has come. `before_last` is
        called in its last action, when all that is left to do is to go backward through the layers; not where nothing
        in them is trained, nor where the last action is half a backward. Only the last stage knows losses; on others
        there are none.

        Raises:
            UsageError: an op is not known here.
            DataError: the actions do not run every chunk forward and backward in an order that gives exact gradients.
        """
        where = f"step {work.step}, rank {work.dp_rank}"
        done: dict[int, str | None] = dict.fromkeys(work.chunks)
        losses: dict[int, Tensor] = {}
        with self._opened(work, with_gradients=True):
            for place, action in enumerate(work.actions, 1):
                _check(action, done, where)
                chunk_id = action.chunk_id
                if action.op == "backward_weight":
                    self.doing = f"{where}, in the backward_weight of chunk {chunk_id}"
                    with around(action):
                        self.halves.weight_half(chunk_id)
                elif action.op in BACKWARDS:
                    self.doing = f"{where}, waiting for the gradient of chunk {chunk_id} from the stage behind"
                    gradient = None if self.model.is_last else self._connected.receive_gradient(chunk_id)
                    self.doing = f"{where}, in the {action.op} of chunk {chunk_id}"
                    before = before_last if place == len(work.actions) else None
                    half = self.halves.input_half(chunk_id) if action.op == "backward_input" else nullcontext()
                    with around(action), half:
                        found = self._backward(work, chunk_id, gradient, 1 / max(num_target_tokens, 1), before)
                    if found is not None:
                        losses[chunk_id] = found
                else:
                    self.doing = f"{where}, waiting for chunk {chunk_id} from the stage before"
                    if action.op != "recompute" and not self.model.is_first:
                        self.inputs[chunk_id] = self._connected.receive_input(chunk_id).requires_grad_()
                    self.doing = f"{where}, in the {action.op} of chunk {chunk_id}"
                    with around(action), torch.set_grad_enabled(action.op != "forward_kv"):
                        hidden = self._forward(work, chunk_id, is_first=action.op != "recompute")
                    if action.op != "forward_kv":
                        self._contexts[chunk_id] = self.model.current.context
                        self._borders[chunk_id] = self.model.current.borders
                        self.in_flight[chunk_id] = self._backward_from(hidden)
                    if action.op != "recompute" and not self.model.is_last:
                        self._connected.send_output(hidden.detach())
                    del hidden  # a graph that outlived its backward
                done[chunk_id] = action.op
            self.doing = f"{where}, waiting until what it sent has arrived"
        self.model.current.context = None  # which the model would keep alive
        left = [(chunk_id, op) for chunk_id, op in done.items() if op not in _LAST]
        if left:
            chunk_id, op = left[0]
            missing = "backward_weight" if op == "backward_input" else "backward"
            raise _broken(f"no {missing} of chunk {chunk_id}", where)
        if not self.store.is_empty:
            raise _broken("a sequence is left without the backward of its first part", where)
        return rank_loss(work, losses, num_target_tokens)

    def evaluate(self, work: RankWork, num_target_tokens: int) -> RankLoss:
        """The loss that `run` would find, by forwards alone: no gradients, nothing kept but KV.

        Raises:
            DataError: the forwards are not in the order of the sequences, or do not run every chunk.
        """
        losses: dict[int, Tensor] = {}

        def find_losses(chunk_id: int, hidden: Tensor) -> None:
            labels = work.tensors[chunk_id].labels
            losses[chunk_id] = token_losses(self.model.head, hidden, labels, self.model.vocab_size)

        self.forward_only(work, "evaluation", find_losses)
        return rank_loss(work, losses, num_target_tokens)

    def forward_only(
        self, work: RankWork, what: str, at_end: Callable[[int, Tensor], None] = lambda chunk_id, hidden: None
    ) -> None:
        """Run all chunks forward, keeping nothing but KV, and call `at_end` with each one's final hidden states.

        `what` it is for is said where it waits.

        Raises:
            DataError: as `evaluate`.
        """
        where = f"step {work.step}, rank {work.dp_rank}"
        forwards = [action for action in work.actions if action.op in FORWARDS]
        if {action.chunk_id for action in forwards} != work.chunks.keys():
            raise _broken("a chunk has no forward", where)
        with self._opened(replace(work, actions=forwards), with_gradients=False), torch.no_grad():
            for action in forwards:
                chunk_id = action.chunk_id
                self.doing = f"{what}, {where}, waiting for chunk {chunk_id} from the stage before"
                if not self.model.is_first:
                    self.inputs[chunk_id] = self._connected.receive_input(chunk_id)
                self.doing = f"{what}, {where}, in the forward of chunk {chunk_id}"
                hidden = self._forward(work, chunk_id)
                self.inputs.pop(chunk_id, None)
                if self.model.is_last:
                    at_end(chunk_id, hidden)
                else:
                    self._connected.send_output(hidden)
                for part in work.tensors[chunk_id].parts:
                    if part.stop == part.length:
                        self.store.drop(part)
        self.model.current.context = None

    @property
    def _connected(self) -> Links:
        assert self._links is not None, "a stage of several has links"
        return self._links

    def _opened(self, work: RankWork, *, with_gradients: bool) -> AbstractContextManager[object]:
        """Begin with nothing in flight: what a run that raised left behind must not reach this one."""
        page_tokens = max(1, PAGE_CHUNKS * max((chunk.num_tokens for chunk in work.chunks.values()), default=1))
        if self.memory is None:
            self.memory = HostMemory(self.model.device) if self._kv_offload else DeviceMemory()
        self.store = StateStore(page_tokens, self.memory, self._exchanges)
        self.inputs, self.in_flight = {}, {}
        self.halves = WeightHalves(splits=any(action.op == "backward_input" for action in work.actions))
        self.model.current.router_loss = self._router_loss
        if self._router_loss is not None:
            self._router_loss.begin_run(with_gradients=with_gradients)
        if self._links is None:
            return nullcontext()
        if isinstance(self.memory, HostMemory):
            self._reserve(self.memory, work, page_tokens, with_gradients=with_gradients)
        return self._links.open(work.actions, {chunk_id: len(each.labels) for chunk_id, each in work.tensors.items()})

    def _reserve(self, memory: HostMemory, work: RankWork, page_tokens: int, *, with_gradients: bool) -> None:
        """Take the memory of all pages, for parts of which as many processes share heads at once."""
        model = self.model
        of_all, attends = windows(model.config), keeps_kv(model.config)
        parts: dict[int, dict[int, list[tuple[Span, SharedPart | None]]]] = {}
        for chunk_id, tensors in work.tensors.items():
            num_sharing = 1 if tensors.shared is None else len(tensors.shared.heads)
            parts.setdefault(num_sharing, {})[chunk_id] = [(part, tensors.shared) for part in tensors.parts]
        for num_sharing, by_chunk in parts.items():
            own: dict[tuple[Shapes, bool], list[int | None]] = {}  # windows, by what pages keep of a layer
            for index, layer in model.own_layers.items():
                if attends[index]:
                    for each in page_shapes(layer, kv_shapes(model.config, index), num_sharing):
                        own.setdefault(each, []).append(of_all[index])
            for (shapes, by_parts), its_windows in own.items():
                tokens = 1 if by_parts else page_tokens
                needs = page_needs(work.actions, by_chunk, tokens, its_windows, with_gradients=with_gradients)
                memory.reserve(needs, shapes, model.dtype)

    def _forward(self, work: RankWork, chunk_id: int, *, is_first: bool = True) -> Tensor:
        """Run a chunk through this stage; returns hidden states [num_tokens, hidden_size]."""
        tensors = work.tensors[chunk_id]
        for part in tensors.parts:
            self.store.start_forward(part, tensors.shared)
        device = self.model.device
        seed = mixed_seed(self._seed, work.step, work.dp_rank, chunk_id)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            with self._router_loss.counting(is_first) if self._router_loss else nullcontext(), self.halves.splitting():
                return self.model.hidden_states(tensors, self.store, self.inputs.get(chunk_id), seed)

    def _backward_from(self, hidden: Tensor) -> Tensor | GradientEdge | None:
        """What a backward begins with: on the last stage the hidden states, on others only their place in the graph."""
        if self.model.is_last:
            return hidden
        return get_gradient_edge(hidden) if hidden.requires_grad else None

    def _backward(
        self,
        work: RankWork,
        chunk_id: int,
        gradient: Tensor | None,
        scale: float,
        before: Callable[[], None] | None,
    ) -> Tensor | None:
        """Run a chunk backward; returns its losses [num_tokens] on the last stage, where they are computed only now.

        `gradient` [num_tokens, hidden_size] is that from the stage after, on all other stages. `before` is called
        before it goes through the layers.
        """
        tensors = work.tensors[chunk_id]
        for part in tensors.parts:
            self.store.start_backward(part)
        begin = self.in_flight.pop(chunk_id)
        self.model.current.context = self._contexts.pop(chunk_id)
        losses = None
        if isinstance(begin, Tensor):
            model = self.model
            losses, gradient = losses_and_gradient(model.head, begin, tensors.labels, model.vocab_size, scale)
            if not any(chunk.num_target_tokens for chunk in work.chunks.values()):
                use_head(model.head, begin, model.vocab_size)
            if not begin.requires_grad:  # all that is trained is the head
                begin = None
        if begin is not None:
            assert gradient is not None
            if before is not None:
                before()
            borders = self._borders.pop(chunk_id)
            roots: list[Any] = [begin]
            gradients = [gradient]
            for part, border in borders:
                left = self.store.take_state_gradients(part)
                roots += [border.left[name] for name in left]
                gradients += left.values()
            torch.autograd.backward(roots, gradients)
            for part, border in borders:
                begun = {name: state.grad for name, state in border.begun.items() if state.grad is not None}
                self.store.give_state_gradients(part, begun)
        for part in tensors.parts:
            self.store.finish_backward(part)
        if not self.model.is_first:
            inputs = self.inputs.pop(chunk_id)
            assert inputs.grad is not None
            self._connected.send_input_gradient(inputs.grad)
        return losses


def _check(action: Action, done: dict[int, str | None], where: str) -> None:
    if action.op not in _BEFORE or action.virtual_stage != 0:
        what = action.op if action.op not in _BEFORE else f"virtual stage {action.virtual_stage}"
        raise UsageError(
            f"{what} is not supported by this runtime", where=where, hint="build the plan with `--schedule 1f1b`"
        )
    if action.chunk_id not in done:
        raise _broken(f"{action.op} of chunk {action.chunk_id}, which does not exist", where)
    before = done[action.chunk_id]
    if before not in _BEFORE[action.op]:
        raise _broken(f"{action.op} of chunk {action.chunk_id} after {before or 'nothing'}", where)


def _broken(message: str, where: str) -> DataError:
    return DataError(message, where=where, hint=VALIDATE_HINT)
