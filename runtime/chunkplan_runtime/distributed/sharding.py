"""A stage's weights and optimizer states sharded over its replicas by FSDP2 (torch.distributed.fsdp.fully_shard).

A step gathers the weights once. Gradients of its chunks are summed on each process, in float32 where weights are
narrower, and reduced once: a layer's while the last backward of its virtual stage goes on to the layers before it
(`feed.stream.may_reduce` says when), or after all else; those of head and embeddings at the end. So every process takes
part in the same reductions in the same order: virtual stages from last to first, of each the layers from last to first,
then head and embeddings. The loss is divided by the step's target tokens already: gradients are summed, not averaged.

Where gradients are shared (ZeRO-2), a layer's are reduced in every backward, or half of one that has those of weights.
Where weights are too (ZeRO-3), a layer's are gathered when it is at work, the next one's of a backward ahead of it, and
sharded again after; embeddings and head stay gathered for a step. A plan then says in which slot of its stage each
action is done (docs/plan-format.md; why nobody waits for ever in them is in `chunkplan/schedule/alignment.py`). A
process that has nothing to do in a slot gathers and reduces as the others do, and runs no layer (`Shards.pad`). One
that runs several data-parallel ranks walks through the slots once for each, all processes their first ranks first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from chunkplan.planfile.plan import VALIDATE_HINT, Action, PlanStep
from chunkplan_runtime.distributed.shard_loading import give_rows, take_rows
from chunkplan_runtime.distributed.stages import own_head, trains_before_layers
from chunkplan_runtime.exchange import reduce_scatter
from chunkplan_runtime.execution.executor import Around
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.products import sum_gradients

#: What other processes do in a slot: its op, and the virtual stage.
Padding = tuple[str, int]


class Aligned:
    """Has a process take part in the slots between its actions, by calling `run` with each."""

    def __init__(self, paddings: Sequence[Sequence[Padding]], run: Callable[[Padding], None]) -> None:
        self._paddings = [list(before) for before in paddings]
        self._run = run
        self._next = 0

    def meet(self, action: Action | None) -> None:
        """Take part in all that comes before `action`, the next one; with None too, but it comes only later.

        A process that has sent something does so before it waits until that has arrived, as others may be unable to
        receive it before.
        """
        due = self._paddings[self._next]
        while due:
            self._run(due.pop(0))
        if action is not None:
            self._next += 1


def paddings_of(
    work: StepWork, layout: RankLayout, sharding: Sharding, *, only_forwards: bool = False
) -> list[list[Padding]]:
    """What the process of `layout` takes part in before each of its actions in a step, and after its last one.

    Raises:
        DataError: actions have no slots, or not such that processes can walk through them.
    """
    ops, rows = MEETINGS[sharding], layout.rows(work.plan.config.dp)
    paddings: list[list[Padding]] = [[]]
    for ranks in zip(*rows, strict=True):  # those that run at the same time, by process
        slots: dict[int, Padding] = {}
        for rank in ranks:
            for action, slot in _row(work.step, rank, layout.stage, only_forwards):
                if action.op in ops:
                    padding = ops[action.op], action.virtual_stage
                    if slots.setdefault(slot, padding) != padding:
                        raise _refusal(f"several ops in slot {slot}", work.step, rank, layout.stage)
        left = deque(sorted(slots))
        for action, slot in _row(work.step, ranks[layout.replica], layout.stage, only_forwards):
            while left and left[0] < slot:
                paddings[-1].append(slots[left.popleft()])
            if action.op in ops:
                left.popleft()
            paddings.append([])
        paddings[-1] += [slots[slot] for slot in left]
    return paddings


def _row(step: PlanStep, rank: int, stage: int, only_forwards: bool) -> list[tuple[Action, int]]:
    """The actions of a stage of a rank with their slots."""
    actions, slots = step.actions.get((rank, stage), []), step.slots.get((rank, stage), [])
    if len(actions) != len(slots) or sorted({*slots}) != slots:
        raise _refusal("actions without slots that go up", step, rank, stage)
    pairs = zip(actions, slots, strict=True)
    return [pair for pair in pairs if not only_forwards or pair[0].op in FORWARDS]


def _refusal(message: str, step: PlanStep, rank: int, stage: int) -> DataError:
    return DataError(message, where=f"step {step.step}, rank {rank}, stage {stage}", hint=VALIDATE_HINT)


class Shards:
    """The weights of `model`, from now on sharded over `replicas`; use `self.model` in its place.

    `master_weights`: trained weights become float32 and are used in the model's dtype. `sharding`: what is shared
    beside optimizer states, see above.

    Raises:
        UsageError: gradients or weights are to be shared, of a model that runs a chunk in several pieces.
    """

    def __init__(
        self, model: CausalLM, replicas: DeviceMesh, *, master_weights: bool, sharding: Sharding = "optimizer"
    ) -> None:
        #: Whether all backwards reduce, and not the last ones alone.
        self.reduces_always = sharding in ("gradients", "weights")
        self._reshards = sharding == "weights"
        if self.reduces_always and model.is_recurrent:
            raise UsageError(
                f"--sharding {sharding} of a {model.config.model_type} model, whose layers keep a state and run once "
                "for each sequence of a chunk",
                hint="use --sharding optimizer",
            )
        dtype = model.dtype
        places = take_rows(model, replicas, master_weights=master_weights)
        narrow = dtype.itemsize < torch.float32.itemsize
        param_dtype, reduce_dtype = dtype if master_weights else None, torch.float32 if narrow else None
        how: Any = {"mesh": replicas, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, None, False)}
        root: Any = _Root(model.model)
        for layer in model.own_layers.values():
            fully_shard(layer, reshard_after_forward=self._reshards, **how)
        head = own_head(model.model)
        if head is not None:
            fully_shard(head, reshard_after_forward=False, **how)
        fully_shard(root, reshard_after_forward=False, **how)
        give_rows(places)
        self._root = root
        #: Where it is sharded by itself.
        self._head: Any = head
        #: By virtual stage; and those that a backward comes to, in its order.
        self._layers: list[list[Any]] = [
            [layer for layer in part.own_layers.values() if isinstance(layer, FSDPModule)] for part in model.parts
        ]
        self._backward = [_in_backward(part, own) for part, own in zip(model.parts, self._layers, strict=True)]
        self._reductions: Any = Reductions()
        #: Whether gradients are summed here in another dtype than their own, by what weights do not know yet.
        self._sums_wide = narrow
        #: FSDP2 casts what is reduced, or adds it to what is there, as soon as it has asked for it.
        self._always_waits = self.reduces_always or (narrow and not master_weights)
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
            module.set_custom_reduce_scatter(self._reductions)
            # Else a backward that gathers ahead would gather again what the last one has sharded.
            module.set_reshard_after_backward(self._reshards and module not in (root, head), recurse=False)
            # By itself FSDP2 gathers ahead in the order of forwards, in which other processes may have other chunks.
            module.set_modules_to_backward_prefetch([root])
        for backward in self._backward:
            for layer, following in itertools.pairwise(backward):
                layer.set_modules_to_backward_prefetch([following])
        #: Virtual stages whose layers a backward of this step has reduced.
        self._reduced: set[int] = set()
        #: Of chunks between the halves of their backward, what the first half has found of gradients of weights.
        self._first_halves: dict[Any, Tensor] = {}
        #: When the weights of a step were there to be gathered, on a GPU.
        self._ready: torch.cuda.Event | None = None
        self.model = replace(model, call=self._call, compute_dtype=dtype)

    @property
    def _modules(self) -> list[Any]:
        """All that is sharded by itself: layers, and the rest."""
        heads = [] if self._head is None else [self._head]
        return [self._root, *heads, *itertools.chain.from_iterable(self._layers)]

    def begin_step(self) -> None:
        """From now on gradients are summed here, and what is gathered once a step stays gathered."""
        self.begin_forwards()
        if self._sums_wide:  # known for good, as FSDP2 gathers into the same parameters ever after
            self.end_forwards()
            # Where backwards reduce layers, embeddings and head are still summed until the end of a step.
            summed = filter(None, (self._root, self._head)) if self.reduces_always else self._modules
            for weight in itertools.chain.from_iterable(map(_weights, summed)):
                sum_gradients(weight.unsharded_param, weight, "unsharded_accumulated_grad")
            self._sums_wide = False
        # Where gradients are shared, all processes take part in every backward, and so reduce in it.
        self._reduced = {*range(len(self._layers))} if self.reduces_always else set()
        self._first_halves = {}
        self._reductions.waits = self._always_waits or any(
            parameter.grad is not None for parameter in self._root.parameters()
        )
        self._root.set_is_last_backward(False)
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)

    def begin_forwards(self) -> None:
        """Gather embeddings and head, unless they are gathered, as some processes may have nothing to do with them.

        And begin to gather the first layer, which all are at work in first: its weights are there when inputs are.
        """
        self._ready = None
        with torch.no_grad():
            self._root(lambda: None)
        if self.model.device.type == "cuda":
            self._ready = torch.cuda.current_stream().record_event()
        if self._head is not None:
            self._head.unshard()
        if self._layers[0]:
            self._layers[0][0].unshard(async_op=True)

    def _call(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Run the model. By itself FSDP2 would have gathers wait for all that its stream has still to do."""
        if self._ready is not None:
            self._root.set_post_optim_event(self._ready)
        return self._root(do, *arguments)

    def end_forwards(self) -> None:
        """Gather what stays gathered in a step, unless it is: other processes may have had more to do with it."""
        if not self._reshards:
            for layer in itertools.chain.from_iterable(self._layers):
                layer.unshard()

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
        """What `RankExecutor.run` enters around an action: `inner`, and what FSDP2 does not see of reducing in it.

        That is all that a weight half leaves. Where it is reduced at once, so is what the other half of some backward
        has found: this is kept apart until then, as whole backwards that come between would reduce it with gradients of
        another dtype.
        """

        @contextmanager
        def summed(action: Action) -> Iterator[None]:
            virtual_stage = action.virtual_stage
            if self.reduces_always:
                self._sync_layers(virtual_stage, action.op == "backward")
            with inner(action):
                yield
                if action.op == "backward_weight" and self.reduces_always:
                    for layer in self._backward[virtual_stage]:
                        self._reduce(layer)
                elif action.op == "backward_input" and self.reduces_always:
                    for layer in self._layers[virtual_stage]:
                        self._keep_apart(layer)

        return summed

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

    def pad(self, padding: Padding) -> None:
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

    def free(self) -> None:
        """Shard the weights again that are still gathered."""
        for module in self._modules:
            module.reshard()

    def _sync_layers(self, virtual_stage: int, reduces: bool) -> None:
        """Have the next backwards reduce the layers of a virtual stage, or not."""
        for layer in self._layers[virtual_stage]:
            layer.set_requires_gradient_sync(reduces, recurse=False)

    def _reduce(self, layer: Any) -> None:
        """Reduce a layer's gradients as FSDP2 does at the end of its backward; what there are none of are zeros.

        One without a gradient would be left out of its process's reduction.
        """
        group = layer._get_fsdp_state()._fsdp_param_group
        if group is None:
            return
        for weight in group.fsdp_params:
            found = self._first_halves.pop(weight, None)
            if found is not None:
                _give(weight, found)
        _sum_up(layer)
        layer.set_requires_gradient_sync(True, recurse=False)
        with group.use_training_state(group._training_state):
            group.post_backward()
        layer.set_requires_gradient_sync(False, recurse=False)

    def _keep_apart(self, layer: Any) -> None:
        """Take the gradients of a layer that are there until its next reduction of a weight half."""
        for weight in _weights(layer):
            found = weight.unsharded_accumulated_grad
            if found is None:
                found = weight.unsharded_param.grad
            if found is not None:
                earlier = self._first_halves.get(weight)
                self._first_halves[weight] = found if earlier is None else found + earlier
                weight.unsharded_accumulated_grad = weight.unsharded_param.grad = None


class Reductions:
    """Reduce-scatters that FSDP2 launches in place of its own (`FSDPModule.set_custom_reduce_scatter`).

    A sum is waited for at the end of the step: a process that comes early to its last backward goes on with it, while
    others are still to come to theirs. All ask for the same sums in the same order.
    """

    def __init__(self) -> None:
        #: Whether a sum is waited for at once, for what FSDP2 then does with it.
        self.waits = False
        #: What is sent, which has to stay until it is summed.
        self._launched: deque[tuple[dist.Work, Tensor]] = deque()

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
        if self.waits:
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
    first = 0
    if part.is_first and not trains_before_layers(part.model):
        trained = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
        first = trained.index(True) if any(trained) else len(layers)
    return layers[first:][::-1]


def _weights(module: Any) -> list[Any]:
    """What FSDP2 has of each weight of a module that is trained."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [weight for weight in group.fsdp_params if weight.sharded_param.requires_grad]


def _give(weight: Any, gradient: Tensor) -> None:
    """Let a weight have a gradient, in the dtype that it is reduced in if that is another one than its own."""
    if gradient.dtype == weight.unsharded_param.dtype:
        own = weight.unsharded_param.grad
        weight.unsharded_param.grad = gradient if own is None else own + gradient
    else:
        weight.unsharded_accumulated_grad = gradient


def _sum_up(module: Any) -> None:
    """Add up gradients in the dtype that is reduced; those that are not there are zeros."""
    for weight in _weights(module):
        if weight.unsharded_accumulated_grad is None and weight.unsharded_param.grad is None:
            weight.unsharded_param.grad = torch.zeros_like(weight.unsharded_param)
        weight.accumulate_unsharded_grad_if_needed()
        weight.to_accumulated_grad_if_needed()
