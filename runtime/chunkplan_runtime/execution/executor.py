"""Does the actions of a rank in a step, in order, and times them. After them gradients are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from chunkplan.operations import BACKWARDS, FORWARDS
from chunkplan.planfile.measured import StepTimeline, TimedAction
from chunkplan.planfile.plan import Action
from chunkplan_runtime.attention.context import ChunkContext
from chunkplan_runtime.devices import synchronize, wide
from chunkplan_runtime.execution.links import Links
from chunkplan_runtime.execution.loss import ChunkLoss, RankLoss, cross_entropy, entropies, rank_loss, use_head
from chunkplan_runtime.execution.reserve import KeptAttention, reserve_inputs, reserve_pages
from chunkplan_runtime.execution.step_loss import OfChunks
from chunkplan_runtime.feed.stream import RankWork, broken_plan
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.pages import PageMemory
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Activity, Exchanges
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import mixed_seed, set_seed
from chunkplan_runtime.models.products import ChunkKey, WeightHalves
from chunkplan_runtime.models.router_loss import RouterLoss

#: A page of keys and values has room for this many chunks: few kernel calls a layer, and little memory for each.
PAGE_CHUNKS = 4

#: Entered around every action, to time it.
Around = Callable[[Action], AbstractContextManager[object]]

#: Called before each action, before what it waits for from other stages, and with None after the last one.
Collectives = Callable[[Action | None], None]

#: A moment: nanoseconds, or on a GPU an event in its stream, which torch has no types for.
_Moment = Any

#: By op, what must have happened to a chunk before.
_AFTER = {
    **dict.fromkeys(FORWARDS, ("nothing",)),
    "recompute": ("forward_kv",),
    **dict.fromkeys(BACKWARDS, ("forward", "recompute")),
    "backward_weight": ("backward_input",),
}


def no_collectives(action: Action | None) -> None:
    """The hook of a process that shares no collective with others."""


class RankExecutor:
    """Runs chunks through a model, or through one pipeline stage of it. Gradients are added to `.grad`.

    `seed`: of dropout, which a chunk draws alike whenever it runs forward. `kv_offload`: keys, values and their
    gradients of split sequences lie in host memory. `links`: to the stages before and after this one. `exchanges`: with
    the processes that share sequences. `router_loss`: what the load-balancing loss is over whose gradient is added,
    once its step has begun (see `router_loss_scope`). `loss`: what is trained on; an evaluation is of cross-entropy.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        seed: int = 0,
        kv_offload: bool = False,
        links: Links | None = None,
        exchanges: Exchanges | None = None,
        router_loss: str = "none",
        loss: ChunkLoss | None = None,
    ) -> None:
        self.model, self._stages = model, model.by_stage
        self.router_loss, self._loss = RouterLoss(model, router_loss), loss or cross_entropy()
        self._exchanges = exchanges or Exchanges()
        self._links: Any = links
        self._seed, self._kv_offload = seed, kv_offload
        #: Where pages of keys and values lie; None before the first step.
        self.memory: PageMemory | None = None
        self.stores = [KVStore(page_tokens=1) for _ in self._stages]  # by virtual stage
        self.halves = WeightHalves()
        self.kept_attention = KeptAttention()
        #: What it does or waits for, in words; and those that these begin with: the step, rank and virtual stage.
        self.doing = self._at = ""
        #: Of chunks in flight: what came from the model stage before [num_tokens, hidden_size]; and what their backward
        #: begins with, beside what attention and layers with states know of them.
        self.inputs: dict[ChunkKey, Tensor] = {}
        self.in_flight: dict[ChunkKey, tuple[Tensor | GradientEdge | None, ChunkContext | None, tuple[Any, ...]]] = {}

    @property
    def activity(self) -> Activity:
        """The current action or wait, in words, and the processes that an exchange waits for."""
        at = self._exchanges.at
        return Activity(self.doing + at.words, at.waits_for)

    def run(
        self,
        work: RankWork,
        num_target_tokens: int,
        around: Around = nullcontext,
        before_last: Callable[[int], None] | None = None,
        collectives: Collectives = no_collectives,
        weights: OfChunks | None = None,
        chunk_losses: Mapping[int, ChunkLoss] = MappingProxyType({}),
    ) -> RankLoss:
        """Run all actions of `work`, whose share of the loss is one of the step's `num_target_tokens`.

        `weights` are those of the losses of tokens in a loss of the step (`step_weights`), in place of that share.
        `chunk_losses`: by chunk the loss of its tokens, in place of the one for all.

        `around` is entered around every action, after what it waits for from other stages has come. `before_last` is
        called with each virtual stage, in its last action, when all that is left to do is to go backward through its
        layers; not where nothing in them is trained, nor where that action is half a backward. `collectives`: joins
        those of other processes before each action. Only the last model stage knows losses; on others there are none.
        Raises DataError: the actions do not run every chunk forward and backward, or not in an order that is exact.
        """
        where = f"step {work.step}, rank {work.dp_rank}"
        done = dict.fromkeys(product(range(len(self._stages)), work.chunks), "nothing")
        last_of = {action.virtual_stage: action for action in work.actions}
        losses: dict[int, Tensor] = {}
        with self._prepared(work, with_gradients=True):
            for action in work.actions:
                key = action.virtual_stage, action.chunk_id
                if key not in done:
                    raise broken_plan(f"{action.op} of {_named(key)}, which does not exist", where)
                if done[key] not in _AFTER[action.op]:
                    raise broken_plan(f"{action.op} of {_named(key)} after {done[key]}", where)
                self._begin_action(where, action, collectives)
                if action.op == "backward_weight":
                    self._say(f"in the backward_weight of chunk {action.chunk_id}")
                    with around(action):
                        self.halves.weight_half(key)
                elif action.op in BACKWARDS:
                    before = before_last if action is last_of[action.virtual_stage] else None
                    weight = weights or 1 / max(num_target_tokens, 1)
                    loss = chunk_losses.get(action.chunk_id, self._loss)
                    losses |= self._backward(work, action, loss, weight, around, before)
                else:
                    self._forward(work, action, action.op, around)
                done[key] = action.op
            self.doing = f"{where}, joining collectives of other processes after its last action"
            collectives(None)
            self.doing = f"{where}, waiting until what it sent has arrived"
        self.model.current.context = None  # which the model would keep alive
        for key, op in done.items():
            if op not in ("backward", "backward_weight"):
                missing = "backward_weight" if op == "backward_input" else "backward"
                raise broken_plan(f"no {missing} of {_named(key)}", where)
        if not all(store.is_empty for store in self.stores):
            raise broken_plan("a sequence is left without the backward of its first part", where)
        return rank_loss(work, losses, num_target_tokens)

    def evaluate(
        self,
        work: RankWork,
        num_target_tokens: int | None = None,
        collectives: Collectives = no_collectives,
        what: str = "evaluation",
    ) -> RankLoss:
        """The loss that `run` would find, by forwards alone: no gradients, nothing kept but KV.

        Without a number of target tokens no losses are computed. `what` it is for is said where it waits. Raises
        DataError: the forwards are not in the order of the sequences, or do not run every chunk.
        """
        loss = None if num_target_tokens is None else cross_entropy()
        return rank_loss(work, self.token_losses(work, loss, collectives, what), num_target_tokens or 0)

    def token_losses(
        self,
        work: RankWork,
        loss: ChunkLoss | None,
        collectives: Collectives = no_collectives,
        what: str = "evaluation",
    ) -> OfChunks:
        """The losses of tokens by chunk_id, by forwards alone, see `evaluate`; none where `loss` is None."""
        where = f"step {work.step}, rank {work.dp_rank}"
        forwards = [action for action in work.actions if action.op in FORWARDS]
        places = {(action.virtual_stage, action.chunk_id) for action in forwards}
        if places != {*product(range(len(self._stages)), work.chunks)}:
            raise broken_plan("a chunk has no forward", where)
        losses: dict[int, Tensor] = {}
        with self._prepared(replace(work, actions=forwards), with_gradients=False), torch.no_grad():
            for action in forwards:
                self._begin_action(f"{what}, {where}", action, collectives)
                hidden, tensors = self._forward(work, action, "evaluate", nullcontext), work.tensors[action.chunk_id]
                if self._stages[action.virtual_stage].is_last and loss is not None:
                    weights = hidden.new_ones(len(hidden), dtype=wide(hidden.dtype))
                    losses[action.chunk_id], _ = loss(self.model.head, hidden, tensors.labels, weights)
                for span in tensors.parts:
                    self.stores[action.virtual_stage].finish_forward(span)
            collectives(None)
        self.model.current.context = None
        return losses

    def _begin_action(self, where: str, action: Action, collectives: Collectives) -> None:
        """Begin an action by what is done with other processes before it."""
        self._at = where if len(self._stages) == 1 else f"{where}, virtual stage {action.virtual_stage}"
        self._say(f"joining collectives of other processes before the {action.op} of chunk {action.chunk_id}")
        collectives(action)

    def _say(self, words: str) -> None:
        self.doing = f"{self._at}, {words}"

    def _prepared(self, work: RankWork, *, with_gradients: bool) -> Any:
        """Begin with nothing in flight: what a run that raised left behind must not reach this one."""
        page_tokens = max(1, PAGE_CHUNKS * max((chunk.num_tokens for chunk in work.chunks.values()), default=1))
        if self.memory is None:
            self.memory = HostMemory(self.model.device) if self._kv_offload else PageMemory()
        self.stores = [KVStore(page_tokens, self.memory, self._exchanges) for _ in self._stages]
        self.inputs, self.in_flight = {}, {}
        self.halves = WeightHalves(splits=any(action.op == "backward_input" for action in work.actions))
        self.model.current.router_loss = self.router_loss
        self.router_loss.begin_run(with_gradients=with_gradients)
        if with_gradients:
            reserve_inputs(self._stages, work)
            self.kept_attention.begin(self._stages, work)
        if isinstance(self.memory, HostMemory):
            reserve_pages(self.memory, self._stages, work, page_tokens, with_gradients=with_gradients)
        return nullcontext() if self._links is None else self._links.open()

    def _forward(self, work: RankWork, action: Action, op: str, around: Around) -> Tensor:
        """Run a chunk through a virtual stage, from the model stage before to the next one.

        `op` is that of the action, or "evaluate". Returns hidden states [num_tokens, hidden_size].
        """
        key = virtual_stage, chunk_id = action.virtual_stage, action.chunk_id
        part, tensors, store = self._stages[virtual_stage], work.tensors[chunk_id], self.stores[virtual_stage]
        device = self.model.device
        self._say(f"waiting for chunk {chunk_id} from the stage before")
        if op != "recompute" and not part.is_first:
            received = self._links.receive("inputs", *key, len(tensors.labels))
            self.inputs[key] = received.requires_grad_(op != "evaluate")
        self._say(f"in the {'forward' if op == 'evaluate' else op} of chunk {chunk_id}")
        seed = mixed_seed(self._seed, work.step, work.dp_rank, chunk_id)
        with around(action), torch.set_grad_enabled(op in ("forward", "recompute")):
            for span in tensors.parts:
                store.start_forward(span, tensors.shared)
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                set_seed(seed)
                with self.halves.splitting(), self.kept_attention.of(part, work, key, op):
                    hidden = part.hidden_states(tensors, store, self.inputs.get(key), seed)
        if op in ("forward", "recompute"):
            begin: Tensor | GradientEdge | None = hidden
            if not part.is_last:  # only where hidden states are in the graph
                begin = get_gradient_edge(hidden) if hidden.requires_grad else None
            self.in_flight[key] = begin, self.model.current.context, self.model.current.borders
        elif op == "evaluate":
            self.inputs.pop(key, None)
        if op != "recompute" and not part.is_last:
            self._links.send("inputs", *key, hidden.detach())
        return hidden

    def _backward(
        self,
        work: RankWork,
        action: Action,
        loss: ChunkLoss,
        weight: float | OfChunks,
        around: Around,
        before: Callable[[int], None] | None,
    ) -> dict[int, Tensor]:
        """Run a chunk backward; gives its losses [num_tokens] on the last model stage, which computes them only now.

        `weight`: of a token's `loss`, or by chunk those of its tokens' cross-entropies. `before` is called before it
        goes through the layers.
        """
        key = virtual_stage, chunk_id = action.virtual_stage, action.chunk_id
        part, tensors, store = self._stages[virtual_stage], work.tensors[chunk_id], self.stores[virtual_stage]
        self._say(f"waiting for the gradient of chunk {chunk_id} from the stage behind")
        gradient = None if part.is_last else self._links.receive("gradients", *key, len(tensors.labels))
        self._say(f"in the {action.op} of chunk {chunk_id}")
        losses = {}
        with around(action), self.halves.input_half(key) if action.op == "backward_input" else nullcontext():
            for span in tensors.parts:
                store.start_backward(span)
            begin, self.model.current.context, borders = self.in_flight.pop(key)
            if isinstance(begin, Tensor):
                if isinstance(weight, float):
                    weights = begin.new_full((len(begin),), weight, dtype=wide(begin.dtype))
                    if tensors.counts is not None:
                        weights *= tensors.counts.to(weights.device, non_blocking=True)
                else:
                    weights = weight[chunk_id]
                    loss = cross_entropy() if weights.ndim == 1 else entropies
                found, gradient = loss(self.model.head, begin, tensors.labels, weights)
                losses[chunk_id] = found.view(len(begin), -1)[:, 0]
                if not any(chunk.num_target_tokens for chunk in work.chunks.values()):
                    use_head(self._loss, self.model.head, begin)
                if not begin.requires_grad:  # all that is trained is the head
                    begin = None
            if begin is not None:
                if before is not None:
                    before(virtual_stage)
                roots: list[Any] = [begin]
                gradients = [gradient]
                for span, border in borders:
                    left = store.take_state_gradients(span)
                    roots += [border.left[name] for name in left]
                    gradients += left.values()
                torch.autograd.backward(roots, gradients)
                for span, border in borders:
                    begun = {name: state.grad for name, state in border.begun.items() if state.grad is not None}
                    store.give_state_gradients(span, begun)
            for span in tensors.parts:
                store.finish_backward(span)
            if not part.is_first:
                self._links.send("gradients", *key, self.inputs.pop(key).grad)
        return losses


def _named(key: ChunkKey) -> str:
    virtual_stage, chunk_id = key
    return f"chunk {chunk_id}" + (f" on virtual stage {virtual_stage}" if virtual_stage else "")


class ActionClock:
    """Times what one process does in a step, anew for every step.

    On a GPU moments are those at which the device gets there, and nobody waits for it before `stop`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: list[tuple[int, Action, _Moment, _Moment]] = []

    def start(self, step: int) -> None:
        """Begin a step at time 0; for times that can be compared, on all processes at the same moment."""
        self._step, self._actions = step, []
        self._reductions: list[tuple[_Moment, _Moment]] = []
        synchronize(self._device)
        self._zero = self._mark()

    def around(self, dp_rank: int) -> Around:
        """The context of each action in `RankExecutor.run`, which times it."""

        @contextmanager
        def timed(action: Action) -> Iterator[None]:
            start = self._mark()
            yield
            self._actions.append((dp_rank, action, start, self._mark()))

        return timed

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Time the block, which reduces gradients."""
        start = self._mark()
        yield
        self._reductions.append((start, self._mark()))

    def stop(self) -> StepTimeline:
        """Wait for the device, and give what was timed since `start`."""
        synchronize(self._device)

        def since_start(mark: _Moment) -> int:
            return int(mark - self._zero if isinstance(mark, int) else round(self._zero.elapsed_time(mark) * 1e6))

        actions = [
            TimedAction(dp_rank, each.op, each.chunk_id, since_start(start), since_start(end), each.virtual_stage)
            for dp_rank, each, start, end in self._actions
        ]
        reduced = sum(since_start(end) - since_start(start) for start, end in self._reductions)
        return StepTimeline(self._step, actions, reduced)

    def on_device(self) -> str | None:
        """The action that the GPU is at, of those enqueued whole; None on a CPU."""
        if self._device.type != "cuda":
            return None
        for dp_rank, action, start, end in list(self._actions):
            if not end.query():
                at = "in" if start.query() else "before"
                return f"its GPU is {at} the {action.op} of chunk {action.chunk_id} of rank {dp_rank}"
        return "its GPU has done all actions that it was given"

    def _mark(self) -> _Moment:
        if self._device.type != "cuda":
            return perf_counter_ns()
        event: _Moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
