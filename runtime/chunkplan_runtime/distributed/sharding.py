"""A stage's weights and optimizer states sharded over its replicas by FSDP2 (torch.distributed.fsdp.fully_shard).

A step gathers the weights once. Gradients of its chunks are summed on each process, in float32 where weights are
narrower, and reduced once at its end, however many chunks each process had: the reduction runs in the backward of one
padding token at zero loss, which every process does last, so that all take part in the same reductions in the same
order. The loss is divided by the step's target tokens already, so gradients are summed, not averaged.

With `reshard_after_forward` (ZeRO-3) a layer's weights are gathered when it is at work and sharded again after, and its
gradients are reduced in every backward. All processes then have to run the same forwards and backwards, see
`alignment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from chunkplan_runtime.feed.stream import padding_tensors
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.models.model import CausalLM, call_directly


class Shards:
    """The weights of `model`, from now on sharded over `replicas`; use `self.model` in its place.

    `master_weights`: trained weights become float32 and are used in the model's dtype. `reshard_after_forward`:
    see above.
    """

    def __init__(
        self, model: CausalLM, replicas: DeviceMesh, *, master_weights: bool, reshard_after_forward: bool = False
    ) -> None:
        dtype = model.dtype
        if master_weights:
            for parameter in model.model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        narrow = dtype.itemsize < torch.float32.itemsize
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if master_weights else None,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )
        root = _Root(model.model)
        for layer in model.own_layers.values():
            fully_shard(layer, mesh=replicas, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(root, mesh=replicas, mp_policy=policy, reshard_after_forward=False)
        self._reshard_after_forward = reshard_after_forward
        self._modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        self._root: Any = root
        self.model = replace(model, call=root, compute_dtype=dtype)

    def begin_step(self) -> None:
        """From now on gradients are summed here, and weights stay gathered."""
        self._set_last(False)

    def reduce_gradients(self) -> None:
        """Reduce what the step's chunks left, onto the shards; the weights are sharded again."""
        self._set_last(True)
        loss = self._root(self._zero_loss)
        if loss.requires_grad:
            loss.backward()
        else:  # a first stage without anything that is trained
            self.free()

    def run_padding(self) -> None:
        """Run one padding token forward, so that other processes can gather the weights that their forwards need."""
        with torch.no_grad():
            self._root(self._zero_loss)

    def free(self) -> None:
        """Shard the weights again that forwards without a backward have gathered."""
        for module in self._modules:
            module.reshard()

    def _set_last(self, last: bool) -> None:
        """Whether the next backward is the step's last one. Embeddings and head are never sharded before it."""
        # Not before: FSDP2 then forgets the order of forwards, by which a backward gathers ahead, also after a backward
        # of the head alone, of which processes have different numbers.
        self._root.set_is_last_backward(last)
        for module in self._modules:
            every = last or (self._reshard_after_forward and module is not self._root)
            module.set_requires_gradient_sync(every, recurse=False)
            module.set_reshard_after_backward(every, recurse=False)

    def _zero_loss(self) -> torch.Tensor:
        """Every weight takes part: one without a gradient would be left out of its process's reduction."""
        model = replace(self.model, call=call_directly)
        inputs = None
        if not model.is_first:
            inputs = torch.zeros(
                1, model.config.hidden_size, dtype=model.dtype, device=model.device, requires_grad=True
            )
        out = model.hidden_states(padding_tensors(), StateStore(page_tokens=1), inputs)
        if model.is_last:
            out = model.head(out)
        return out.sum() * 0


class _Root(nn.Module):
    """Runs what it is given inside its own forward, where FSDP2 has its hooks: a decoder, a head, or both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return do(*arguments)
