"""A stage's weights and optimizer states sharded over its replicas by FSDP2 (torch.distributed.fsdp.fully_shard).

A step gathers the weights once. Gradients of its chunks are summed on each process, in float32 where weights are
narrower, and reduced once, however many chunks each process had: a layer's while the last backward of its virtual stage
goes on to the layers before it (`feed.last_backward` says when it may), those of embeddings and head at the end. A
process without a backward, or that may not reduce in it, runs one padding token at zero loss instead, after all else;
so does one whose backwards are split. So every process takes part in the same reductions in the same order: virtual
stages from last to first, of each the layers from last to first, of those whose input needs no gradient from first to
last, then embeddings and head. The loss is divided by the step's target tokens already, so gradients are summed, not
averaged.

With `reshard_after_forward` (ZeRO-3) a layer's weights are gathered when it is at work and sharded again after, and its
gradients are reduced in every backward. All processes then have to run the same forwards and backwards, see
`alignment`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.distributed.alignment import Padding
from chunkplan_runtime.distributed.reduction import MachineGroups, Reductions
from chunkplan_runtime.execution.executor import Around
from chunkplan_runtime.feed.stream import padding_tensors
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.models.hollow import replace_weights
from chunkplan_runtime.models.model import CausalLM, call_directly

#: A module, the name of a weight in it, and the rows of that which this process has.
_Place = tuple[nn.Module, str, Tensor]


class Shards:
    """The weights of `model`, from now on sharded over `replicas`; use `self.model` in its place.

    `machines`: where these lie on several, see `reduction`. `master_weights`: trained weights become float32 and are
    used in the model's dtype. `reshard_after_forward`: see above.

    Raises:
        UsageError: weights are to be gathered for every chunk, of a model that runs a chunk in several pieces.
    """

    def __init__(
        self,
        model: CausalLM,
        replicas: DeviceMesh,
        machines: MachineGroups | None = None,
        *,
        master_weights: bool,
        reshard_after_forward: bool = False,
    ) -> None:
        if reshard_after_forward and model.is_recurrent:
            raise UsageError(
                f"--reshard of a {model.config.model_type} model, whose layers keep a state and run once a sequence",
                hint="leave --reshard out",
            )
        dtype = model.dtype
        places = _take_rows(model, replicas, master_weights=master_weights)
        narrow = dtype.itemsize < torch.float32.itemsize
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if master_weights else None,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )
        root: Any = _Root(model.model)
        for layer in model.own_layers.values():
            fully_shard(layer, mesh=replicas, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(root, mesh=replicas, mp_policy=policy, reshard_after_forward=False)
        _give_rows(places)
        self._root = root
        #: By virtual stage.
        self._layers = [
            [layer for layer in part.own_layers.values() if isinstance(layer, FSDPModule)] for part in model.parts
        ]
        self._reshard_after_forward = reshard_after_forward
        self._reductions: Any = Reductions(machines)
        #: FSDP2 casts what is reduced, or adds it to what is there, as soon as it has asked for it.
        self._always_waits = reshard_after_forward or (narrow and not master_weights)
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
            module.set_custom_reduce_scatter(self._reductions)
            # Else a backward that gathers ahead would gather again what the last one has sharded.
            module.set_reshard_after_backward(reshard_after_forward and module is not root, recurse=False)
        #: Virtual stages whose layers a backward of this step has reduced.
        self._reduced: set[int] = set()
        self.model = replace(model, call=root, compute_dtype=dtype)

    @property
    def _modules(self) -> list[Any]:
        """All that is sharded by itself: layers, and the rest."""
        return [self._root, *itertools.chain.from_iterable(self._layers)]

    def begin_step(self) -> None:
        """From now on gradients are summed here, and weights stay gathered."""
        # Where weights are gathered for every chunk, all processes take part in every backward, and so reduce in it.
        self._reduced = {*range(len(self._layers))} if self._reshard_after_forward else set()
        self._reductions.waits = self._always_waits or any(
            parameter.grad is not None for parameter in self._root.parameters()
        )
        # Where it is, FSDP2 forgets the order of forwards, by which a backward gathers ahead, also after a backward of
        # the head alone, of which processes have different numbers.
        self._root.set_is_last_backward(False)
        self._root.set_requires_gradient_sync(False, recurse=False)
        for virtual_stage in range(len(self._layers)):
            self._sync_layers(virtual_stage, self._reshard_after_forward)

    def reduce_in_backward(self, virtual_stage: int) -> None:
        """The backward that comes next is the last one of a virtual stage in the step: it reduces each of its layers.

        Embeddings and head are not: the head's gradients are there before it, and in float32 where those of the
        embeddings are not yet, which FSDP2 does not reduce together. Nor is anything where layers keep a state: they
        run once for each segment of a chunk, and would be reduced as often.
        """
        if not self.model.is_recurrent:
            self._reduced.add(virtual_stage)
            self._sync_layers(virtual_stage)

    def around(self, inner: Around) -> Around:
        """What `Executor.run` enters around an action: `inner`, and after the weight half of a backward, which FSDP2
        does not see, gradients are summed as it sums them after every backward, in the dtype that it reduces."""

        @contextmanager
        def summed(action: Action) -> Iterator[None]:
            with inner(action):
                yield
                if action.op == "backward_weight":
                    for layer in itertools.chain.from_iterable(self._layers):
                        group: Any = layer._get_fsdp_state()._fsdp_param_group
                        for weight in group.fsdp_params:
                            weight.accumulate_unsharded_grad_if_needed()
                            weight.to_accumulated_grad_if_needed()

        return summed

    def reduce_gradients(self) -> None:
        """Reduce what no backward has, wait for what is still on its way, and shard the weights again."""
        for virtual_stage in reversed(range(len(self._layers))):
            if virtual_stage not in self._reduced:
                self._sync_layers(virtual_stage)
                loss = self._root(self._zero_loss, virtual_stage)
                if loss.requires_grad:  # not on a first stage without anything that is trained
                    loss.backward()
        self._root.set_is_last_backward(True)
        self._root.set_requires_gradient_sync(True, recurse=False)
        self._root(self._nothing).backward()  # at its end FSDP2 reduces what is left: embeddings and head
        self._reductions.finish()
        self.free()

    def run_padding(self, padding: Padding = "forward") -> None:
        """Run one padding token, so that other processes can gather the weights that their chunks need."""
        with torch.set_grad_enabled(padding == "pair"):
            loss = self._root(self._zero_loss, 0)  # stages, which have virtual ones, do not reshard
        if loss.requires_grad:
            loss.backward()

    def free(self) -> None:
        """Shard the weights again that are still gathered."""
        for module in self._modules:
            module.reshard()

    def _sync_layers(self, virtual_stage: int, reduces: bool = True) -> None:
        """Have the next backwards reduce the layers of a virtual stage, or not."""
        for layer in self._layers[virtual_stage]:
            layer.set_requires_gradient_sync(reduces, recurse=False)

    def _nothing(self) -> torch.Tensor:
        """A loss of no weight."""
        return torch.zeros((), device=self.model.device, requires_grad=True) * 0

    def _zero_loss(self, virtual_stage: int) -> torch.Tensor:
        """Every weight takes part: one without a gradient would be left out of its process's reduction."""
        model = replace(self.model.parts[virtual_stage], call=call_directly)
        inputs = None
        if not model.is_first:
            inputs = torch.zeros(
                1, model.config.hidden_size, dtype=model.dtype, device=model.device, requires_grad=True
            )
        out = model.hidden_states(padding_tensors(), StateStore(page_tokens=1), inputs)
        if model.is_last:
            out = model.head(out)
        return out.sum() * 0


def _take_rows(model: CausalLM, replicas: DeviceMesh, *, master_weights: bool) -> list[_Place]:
    """Leave the shapes of a model's weights, on torch's meta device, and return of each the rows of this process.

    It is done weight by weight, so that there are never more than the rows and one weight: of a whole weight its rows
    are copied, and where these are `master_weights` it is they that become float32.
    """
    device = torch.device(replicas.device_type)
    rows: dict[nn.Parameter, Tensor] = {}

    def take(weight: nn.Parameter) -> nn.Parameter:
        own = model.rows.pop(weight, None)
        if own is None:
            chunks = torch.chunk(weight.data, replicas.size())
            own = next(iter(chunks[replicas.get_local_rank() :]), weight.data[:0]).clone()
        if master_weights and weight.requires_grad:
            own = own.float()
        shape = nn.Parameter(own.new_empty(weight.shape, device="meta"), requires_grad=weight.requires_grad)
        rows[shape] = own.to(device)
        return shape

    replace_weights(model.model, take)
    return [
        (module, name, rows[shape])
        for module in model.model.modules()
        for name, shape in module._parameters.items()
        if shape is not None
    ]


def _give_rows(places: Sequence[_Place]) -> None:
    """Put the rows of this process where FSDP2 has sharded shapes."""
    made: dict[int, nn.Parameter] = {}
    for module, name, own in places:
        if id(own) not in made:
            sharded: Any = module._parameters[name]
            how = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
            filled = DTensor.from_local(own, sharded.device_mesh, sharded.placements, **how)
            made[id(own)] = nn.Parameter(filled, requires_grad=sharded.requires_grad)
        module._parameters[name] = made[id(own)]


class _Root(nn.Module):
    """Runs what it is given inside its own forward, where FSDP2 has its hooks: a decoder, a head, or both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return do(*arguments)
