"""A stage's weights and optimizer states sharded over its replicas by FSDP2 (torch.distributed.fsdp.fully_shard).

A step gathers the weights once. Gradients of its chunks are summed on each process, in float32 where weights are
narrower, and reduced once: a layer's while the last backward of its virtual stage goes on to the layers before it
(`feed.stream.may_reduce` says when), or after all else; those of head and embeddings at the end. All processes ask for
the same reductions in the same order: virtual stages from last to first, of each the layers from last to first, then
head and embeddings. The loss is divided by the step's target tokens already: gradients are summed, not averaged.

Where gradients are shared (ZeRO-2), a layer's are reduced in every backward, or half of one that has those of weights.
Where weights are too (ZeRO-3), a layer's are gathered when it is at work, the next one's of a backward ahead of it, and
sharded again after; embeddings and head stay gathered for a step. A plan then says in which slot of its stage each
action is done (docs/plan-format.md, `chunkplan/schedule/slots.py`). A process that has nothing to do in a slot
gathers and reduces as the others do, and runs no layer. One that runs several data-parallel ranks walks through the
slots once for each, all processes their first ranks first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from chunkplan.cost.model import Sharding
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import FORWARDS, MEETINGS
from chunkplan.planfile.plan import Action
from chunkplan_runtime.distributed.stages import is_trained, own_head, rows_kept, trains_before_layers
from chunkplan_runtime.execution.executor import Around, Collectives, no_collectives
from chunkplan_runtime.feed.stream import StepWork, broken_plan
from chunkplan_runtime.layout import RankLayout, reduce_scatter
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.products import sum_gradients

#: What other processes do in a slot: its op, and the virtual stage.
DummyCollective = tuple[str, int]


def dummy_collectives(
    work: StepWork, layout: RankLayout, sharding: Sharding, *, only_forwards: bool = False
) -> list[list[DummyCollective]]:
    """The collectives of others that the process of `layout` joins before each of its actions, and after its last one.

    Raises DataError where actions have no slots, or not such that processes can walk through them.
    """
    step, ops, stage = work.step, MEETINGS[sharding], layout.stage

    def refusal(message: str, rank: int) -> DataError:
        return broken_plan(message, f"step {step.step}, rank {rank}, stage {stage}")

    def actions_by_slot(rank: int) -> dict[int, Action]:
        actions, slots = step.actions.get((rank, stage), []), step.slots.get((rank, stage), [])
        if len(actions) != len(slots) or sorted({*slots}) != slots:
            raise refusal("actions without slots that go up", rank)
        pairs = zip(slots, actions, strict=True)
        return {slot: action for slot, action in pairs if not only_forwards or action.op in FORWARDS}

    dummies: list[list[DummyCollective]] = [[]]
    for ranks in zip(*layout.rows(work.plan.config.dp), strict=True):  # those that run at the same time, by process
        actions_of = {rank: actions_by_slot(rank) for rank in ranks}
        met: dict[int, DummyCollective] = {}
        for rank, actions in actions_of.items():
            for slot, action in actions.items():
                if action.op in ops:
                    padding = ops[action.op], action.virtual_stage
                    if met.setdefault(slot, padding) != padding:
                        raise refusal(f"several ops in slot {slot}", rank)
        own = actions_of[ranks[layout.replica]]
        for slot in sorted({*met, *own}):
            if slot in own:
                dummies.append([])
            if slot in met and (slot not in own or own[slot].op not in ops):
                dummies[-1].append(met[slot])
    return dummies


class Shards:
    """The weights of `model`, from now on sharded over `replicas`; use `self.model` in its place.

    `master_weights`: trained weights become float32 and are used in the model's dtype. `sharding`: what is shared
    beside optimizer states; UsageError: more is, of a model that runs a chunk in several pieces.
    """

    def __init__(
        self, model: CausalLM, replicas: DeviceMesh, *, master_weights: bool, sharding: Sharding = "optimizer"
    ) -> None:
        self._sharding: Sharding = sharding
        # Whether all backwards reduce, and not the last ones alone; whether layers are sharded again after each use.
        self._reduces_always, self._reshards = sharding in ("gradients", "weights"), sharding == "weights"
        if self._reduces_always and model.is_recurrent:
            raise UsageError(
                f"--sharding {sharding} of a {model.config.model_type} model, whose layers keep a state and run once "
                "for each sequence of a chunk",
                hint="use --sharding optimizer",
            )
        dtype = model.dtype
        self._is_narrow = dtype.itemsize < torch.float32.itemsize  # gradients are summed in another dtype
        reduce_dtype = torch.float32 if self._is_narrow else None
        policy = MixedPrecisionPolicy(dtype if master_weights else None, reduce_dtype, None, False)
        #: What is sharded by itself: layers by virtual stage, a head that is not the embeddings, and all the rest.
        self._root: Any = _Root(model.model)
        self._head: Any = own_head(model.model)
        with rows_kept(model, replicas, master_weights=master_weights):
            for layer in model.own_layers.values():
                fully_shard(layer, mesh=replicas, mp_policy=policy, reshard_after_forward=self._reshards)
            for module in filter(None, (self._head, self._root)):
                fully_shard(module, mesh=replicas, mp_policy=policy, reshard_after_forward=False)
        self._layers: list[list[Any]] = [
            [layer for layer in part.own_layers.values() if isinstance(layer, FSDPModule)] for part in model.by_stage
        ]
        self._ends = [self._root] if self._head is None else [self._root, self._head]
        self._modules = [*self._ends, *itertools.chain.from_iterable(self._layers)]
        #: By virtual stage the layers that a backward comes to, in its order.
        self._backward = [_in_backward(part, own) for part, own in zip(model.by_stage, self._layers, strict=True)]
        # FSDP2 casts what is reduced, or adds it to what is there, as soon as it has asked for it.
        self._reductions: Any = Reductions(waits=self._reduces_always or (self._is_narrow and not master_weights))
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
            module.set_custom_reduce_scatter(self._reductions)
            # Else a backward that gathers ahead would gather again what the last one has sharded.
            module.set_reshard_after_backward(self._reshards and module not in self._ends, recurse=False)
            # By itself FSDP2 gathers ahead in the order of forwards, in which other processes may have other chunks.
            module.set_modules_to_backward_prefetch([self._root])
        for backward in self._backward:
            for layer, following in itertools.pairwise(backward):
                layer.set_modules_to_backward_prefetch([following])
        self._reduced: set[int] = set()  # virtual stages whose layers a backward of this step has reduced
        self._summed: set[Any] = set()  # modules whose gradients are summed in float32
        self.model = replace(model, call=self._root, compute_dtype=dtype)

    def begin_step(self) -> None:
        """Start a step: gradients are summed here, and what is gathered once a step stays gathered."""
        self.begin_forwards()
        # Where backwards reduce layers, embeddings and head are still summed until the end of a step.
        self._sum_in_float32(self._ends if self._reduces_always else self._modules)
        # Where gradients are shared, all processes take part in every backward, and so reduce in it.
        self._reduced = {*range(len(self._layers))} if self._reduces_always else set()
        self._root.set_is_last_backward(False)
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)

    def _sum_in_float32(self, modules: Iterable[Any]) -> None:
        """Sum gradients of modules in float32 for good, as FSDP2 gathers into the same parameters ever after."""
        new = {module for module in modules if self._is_narrow and module not in self._summed}
        if new:
            self.end_forwards()
        for weight in itertools.chain.from_iterable(map(_weights, new)):
            sum_gradients(weight.unsharded_param, weight, "unsharded_accumulated_grad")
        self._summed |= new

    def begin_forwards(self) -> None:
        """Gather embeddings and head, unless they are gathered, as some processes may have nothing to do with them."""
        with torch.no_grad():
            self._root(lambda: None)
        if self._head is not None:
            self._head.unshard()

    def end_forwards(self) -> None:
        """Gather what stays gathered in a step, unless it is: other processes may have had more to do with it."""
        if not self._reshards:
            for layer in itertools.chain.from_iterable(self._layers):
                layer.unshard()

    def collectives_of(self, work: StepWork, layout: RankLayout, *, only_forwards: bool = False) -> Collectives:
        """Takes part in what other processes do before an action, the next one of a step, or with None at its end."""
        if self._sharding == "optimizer" or (only_forwards and self._sharding != "weights"):
            return no_collectives
        dummies = deque(dummy_collectives(work, layout, self._sharding, only_forwards=only_forwards))

        def collectives(action: Action | None) -> None:
            while dummies[0]:
                self.pad(dummies[0].pop(0))
            if action is not None:
                dummies.popleft()

        return collectives

    def pad(self, padding: DummyCollective) -> None:
        """Gather and reduce as others do in a slot, in which this process has no action."""
        op, virtual_stage = padding
        self.end_forwards()
        if op == "forward":
            for layer in self._layers[virtual_stage]:
                layer.unshard()
                layer.reshard()
            return
        gathers = self._reshards and op != "backward_weight"
        backward = self._backward[virtual_stage]
        for place, layer in enumerate(backward):
            for ahead in backward[place : place + 2] if gathers else ():
                ahead.unshard()
            if op != "backward_input":
                self._reduce(layer)
            if gathers:
                layer.reshard()

    def reduce_in_backward(self, virtual_stage: int) -> None:
        """The backward that comes next is the last one of a virtual stage in the step: it reduces each of its layers.

        Embeddings and head are not: the head's gradients are there before it, and in float32 where those of the
        embeddings are not yet, which FSDP2 does not reduce together. Nor is anything where layers keep a state: they
        run once for each segment of a chunk, and would be reduced as often.
        """
        if not self.model.is_recurrent:
            self._reduced.add(virtual_stage)
            self._sync_layers(virtual_stage, True)

    def around(self, inner: Around) -> Around:
        """The context of an action in `RankExecutor.run`: `inner`, and the reductions that FSDP2 does not see.

        That is all that a weight half leaves. What an input half leaves is reduced with whatever comes next: summed in
        float32, as whole backwards would else reduce it with gradients of another dtype.
        """
        if not self._reduces_always:
            return inner

        @contextmanager
        def reducing(action: Action) -> Iterator[None]:
            virtual_stage = action.virtual_stage
            self._sync_layers(virtual_stage, action.op == "backward")
            if action.op == "backward_input":
                self._sum_in_float32(self._layers[virtual_stage])
            with inner(action):
                yield
                if action.op == "backward_weight":
                    for layer in self._backward[virtual_stage]:
                        self._reduce(layer)

        return reducing

    def reduce_gradients(self) -> None:
        """Reduce what no backward has, wait for what is still on its way, and shard the weights again."""
        self.end_forwards()
        for virtual_stage in reversed(range(len(self._layers))):
            if virtual_stage not in self._reduced:
                for layer in self._backward[virtual_stage]:
                    self._reduce(layer)
        if self._head is not None:
            self._reduce(self._head)
            self._reductions.finish()  # so that what is sent of the head is gone before what is of the embeddings
        _sum_up(self._root)
        self._root.set_is_last_backward(True)
        self._root.set_requires_gradient_sync(True, recurse=False)
        no_loss = torch.zeros((), device=self.model.device, requires_grad=True)
        self._root(lambda: no_loss * 0).backward()  # at its end FSDP2 reduces embeddings and head
        self._reductions.finish()
        self.free()

    def free(self) -> None:
        """Shard the weights again that are still gathered."""
        for module in self._modules:
            module.reshard()

    def _sync_layers(self, virtual_stage: int, reduces: bool) -> None:
        """Set whether the next backwards reduce the layers of a virtual stage."""
        for layer in self._layers[virtual_stage]:
            layer.set_requires_gradient_sync(reduces, recurse=False)

    def _reduce(self, layer: Any) -> None:
        """Reduce a layer's gradients as FSDP2 does at the end of its backward; what there are none of are zeros.

        One without a gradient would be left out of its process's reduction.
        """
        group = layer._get_fsdp_state()._fsdp_param_group
        _sum_up(layer)
        layer.set_requires_gradient_sync(True, recurse=False)
        with group.use_training_state(group._training_state):
            group.post_backward()
        layer.set_requires_gradient_sync(False, recurse=False)


class Reductions:
    """Reduce-scatters that FSDP2 launches in place of its own (`FSDPModule.set_custom_reduce_scatter`).

    A sum is waited for at once if it `waits`, else at the end of the step: a process that comes early to its last
    backward goes on with it, while others are still to come to theirs.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._launched: deque[tuple[dist.Work, Tensor]] = deque()  # what is sent has to stay until it is summed

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that FSDP2 fills with what is sent, or that it gets a shard in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Launch the sum over `group` of input_tensor [replicas x shard], of which this process gets its shard."""
        while self._launched and self._launched[0][0].is_completed():
            self._launched.popleft()[0].wait()  # so that its memory is free
        work = reduce_scatter(output_tensor, input_tensor, group=group, async_op=True)
        self._launched.append((work, input_tensor))
        if self._waits:
            self.finish()

    def finish(self) -> None:
        """Wait until all sums are there; on a GPU its stream waits, not the host."""
        while self._launched:
            self._launched.popleft()[0].wait()


class _Root(nn.Module):
    """Runs what it is given inside its own forward, where FSDP2 has its hooks: a decoder, a head, or both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return do(*arguments)


def _in_backward(part: CausalLM, layers: list[Any]) -> list[Any]:
    """The layers that a backward comes to, in its order: none before the first one that has anything to learn from it.

    What comes from another stage, or from embeddings that are trained, always has a gradient.
    """
    while layers and part.is_first and not trains_before_layers(part.model) and not is_trained(layers[0]):
        layers = layers[1:]
    return layers[::-1]


def _weights(module: Any) -> list[Any]:
    """FSDP2's shard of each trained weight of a module."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [weight for weight in group.fsdp_params if weight.sharded_param.requires_grad]


def _sum_up(module: Any) -> None:
    """Add up gradients in the dtype that is reduced; those that are not there are zeros."""
    for weight in _weights(module):
        if weight.unsharded_accumulated_grad is None and weight.unsharded_param.grad is None:
            weight.unsharded_param.grad = torch.zeros_like(weight.unsharded_param)
        weight.accumulate_unsharded_grad_if_needed()
        weight.to_accumulated_grad_if_needed()
