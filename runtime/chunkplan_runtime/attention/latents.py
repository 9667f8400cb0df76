"""The tensors that pages keep of a layer: keys and values, their latents, or none where another layer has them.

*Latent attention* (MLA, arXiv 2405.04434) makes keys and values of all heads out of a latent and a rotary key that all
heads have in common. The modules of transformers do it in a method, `expand_kv`. Where attention is given the very
tensors that this returned, pages keep what it was given, and keys and values are made again for a page at a time. In a
backward their gradients go on to the latents, which pages add up, and to the weights that expand them.

*Layers that share keys and values* (Gemma 3n and 4) attend with the very tensors of an earlier layer. The pages are
that one's, and so is the gradient, which it hands out: its backward comes after theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chunkplan_runtime.attention.context import RUN_AGAIN
from chunkplan_runtime.devices import wide
from chunkplan_runtime.kv.pages import KVBlock, zeros_wide

#: Latents have to save at least this much: keys and values are made again for every chunk that reads them.
LEAST_SAVING = 2

#: (heads, dim) of each of some tensors.
Shapes = tuple[tuple[int, int], ...]


class ExpandedLatents(NamedTuple):
    """Keys and values [1, heads, num_tokens, dim] as a layer made them of `latents`; the versions of all of them."""

    latents: tuple[Tensor, ...]
    key: Tensor
    value: Tensor
    versions: tuple[int, ...]


def watch_expansion(module: Any) -> None:
    """Hook a layer that expands latents to keys and values, so that its attention is told; idempotent."""
    if hasattr(type(module), "expand_kv") and "expand_kv" not in vars(module):
        module.expand_kv = MethodType(_expand_kv, module)


def _expand_kv(module: Any, *latents: Tensor) -> tuple[Tensor, Tensor]:
    with module.chunkplan.within(RUN_AGAIN):
        key, value = type(module).expand_kv(module, *latents)
    if module.chunkplan.context is not None:
        module.chunkplan.expanded = ExpandedLatents(latents, key, value, _versions(*latents, key, value))
    return key, value


@dataclass(frozen=True)
class Expand:
    """Makes keys and values of what pages keep in their place, as the layer `module` does.

    `weights`: all of it that are trained. `dtype`: of keys and values; with `autocast` products are computed in it.
    """

    module: Any
    weights: tuple[Tensor, ...]
    dtype: torch.dtype
    autocast: bool

    def __call__(self, latents: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Key and value [1, heads, num_tokens, dim] of latents [1, heads, num_tokens, dim] each."""
        device, dtype = latents[0].device.type, self.dtype if self.autocast else None
        # Without a cache: weights that it casts here, in a forward without a graph, others would take for their own.
        with torch.autocast(device, dtype, enabled=self.autocast, cache_enabled=False):
            key, value = type(self.module).expand_kv(self.module, *latents)
        return key.to(self.dtype), value.to(self.dtype)

    @contextmanager
    def expanded(self, block: KVBlock, of_weights: list[Tensor | None]) -> Iterator[KVBlock]:
        """Within the block of code: keys and values of a block of latents, whose gradients are there to be added to.

        After it they have been added to those of the latents and, in at least float32, to `of_weights`.
        """
        with torch.enable_grad():
            leaves = tuple(each.detach().requires_grad_() for each in block.tensors)
            pair = self(leaves)
        gradients = tuple(zeros_wide(each) for each in pair)
        yield KVBlock(block.start, block.stop, tuple(each.detach() for each in pair), gradients)
        given = [gradient.to(self.dtype) for gradient in gradients]
        found = torch.autograd.grad(pair, (*leaves, *self.weights), given, allow_unused=True)
        for home, gradient in zip(block.gradients, found[: len(leaves)], strict=True):
            home.add_(gradient)
        for place, gradient in enumerate(found[len(leaves) :]):
            if gradient is not None:
                before = of_weights[place]
                of_weights[place] = gradient.to(wide(gradient.dtype)) if before is None else before.add_(gradient)


def latents_of(module: Any, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], Expand | None]:
    """The latents that pages keep in place of keys and values, [1, heads, num_tokens, dim] each, and their expansion.

    Nothing where these are to be kept themselves: the layer has not just made them, or they or what they were made of
    have been changed since; it would save too little; or dropout in the layer would draw otherwise the next time.
    """
    expanded, module.chunkplan.expanded = module.chunkplan.expanded, None
    if expanded is None or key is not expanded.key or value is not expanded.value:
        return (), None
    latents = expanded.latents
    is_changed = _versions(*latents, key, value) != expanded.versions
    if is_changed or any(each.shape[::2] != (1, key.shape[2]) or each.dim() != 4 for each in latents):
        return (), None
    saves = LEAST_SAVING * sum(each.numel() for each in latents) <= key.numel() + value.numel()
    if not saves or _draws(module):
        return (), None
    autocast = torch.is_autocast_enabled(key.device.type)
    # In the dtype of keys and values, to which products and copies cast what they are made of.
    dtype = torch.get_autocast_dtype(key.device.type) if autocast else key.dtype
    weights = tuple(weight for weight in module.parameters() if weight.requires_grad)
    return tuple(each.to(dtype) for each in latents), Expand(module, weights, dtype, autocast)


def owner_of(layer: int, key: Tensor, value: Tensor) -> int:
    """The layer whose pages have these keys and values: the first that attended with them, as they then say."""
    owners: set[int] = set()
    for tensor in (key, value):
        known = vars(tensor).setdefault("chunkplan_owner", (layer, tensor._version))
        owners.add(known[0] if known[1] == tensor._version else layer)
    return owners.pop() if len(owners) == 1 else layer


def page_shapes(layer: nn.Module, kv_shapes: Shapes, num_sharing: int = 1) -> list[tuple[Shapes, bool]]:
    """The shapes that pages keep of each attention of a layer, (heads, dim), and whether a part has its own page.

    Nothing where it attends with those of another layer. Its keys and values are of `kv_shapes`, and `num_sharing`
    processes share heads, which then expand nothing.
    """
    expanded = tuple((heads // num_sharing, dim) for heads, dim in kv_shapes), False
    found = []
    for module in layer.modules():
        attention: Any = module
        if getattr(attention, "is_kv_shared_layer", False):
            return []
        if hasattr(attention, "expand_kv"):
            latents = (1, attention.kv_lora_rank), (1, attention.qk_rope_head_dim)
            widths = [sum(heads * dim for heads, dim in shapes) for shapes in (latents, kv_shapes)]
            saves = LEAST_SAVING * widths[0] <= widths[1]
            found.append((latents, True) if num_sharing == 1 and saves and not _draws(attention) else expanded)
    return found or [expanded]


def _draws(module: nn.Module) -> bool:
    """True if a layer has dropout."""
    return any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules())


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)
