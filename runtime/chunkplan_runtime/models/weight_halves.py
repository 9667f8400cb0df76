"""Backwards in two halves: gradients of inputs first, those of the weights of products when they are asked for.

Of all that a backward computes, only the gradients of weights that multiply activations are worth a half of their own
(Zero Bubble Pipeline Parallelism, Qi et al., arXiv 2401.10241): each is one product (`models.products`). While a model
runs forward, also where activation checkpoints run its layers again, such products are computed so that the input half
of a chunk keeps what these gradients are made of, and leaves the rest of the graph to autograd: norms, biases,
convolutions, attention, states. What is multiplied in a way that is not known there has the gradient of its weight in
the input half too.

A weight half adds to `.grad` as a backward does, with the hooks of parameters. What it needs is kept for no longer than
until then, and nothing else of the graph is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chunkplan_runtime.models.modes import computing_in
from chunkplan_runtime.models.products import Factors, product_of

#: A virtual stage of this process, and a chunk_id.
Place = tuple[int, int]


class WeightHalves:
    """What gradients of weights are made of: `kept` of the chunks between the halves of their backward.

    `splits`: whether any backward is split; else all is computed as ever.
    """

    def __init__(self, *, splits: bool = False) -> None:
        self._splits = splits
        #: Of the chunk whose input half is at work; None in whole backwards.
        self._keeping: list[Factors] | None = None
        self.kept: dict[Place, list[Factors]] = {}

    def splitting(self) -> AbstractContextManager[object]:
        """Backwards of what runs forward in the block can be split."""
        return computing_in(_Products(self)) if self._splits else nullcontext()

    @contextmanager
    def input_half(self, place: Place) -> Iterator[None]:
        """Backwards in the block leave gradients of weights for the `weight_half` of this chunk."""
        self._keeping = self.kept[place] = []
        try:
            yield
        finally:
            self._keeping = None

    def weight_half(self, place: Place) -> None:
        """Add the gradients of weights that the chunk's input half has left."""
        by_weight: dict[Tensor, list[Factors]] = {}
        for factors in self.kept.pop(place):
            by_weight.setdefault(factors.weight, []).append(factors)
            del factors  # each is to be let go of
        while by_weight:
            weight = next(iter(by_weight))
            left = [factors for factors in by_weight.pop(weight) if not factors.are_added()]
            if left:
                _Given.apply(weight, left).backward()  # type: ignore[no-untyped-call]

    def keep(self, factors: Factors) -> bool:
        """Keep what an input half leaves; whether one is at work."""
        if self._keeping is not None:
            self._keeping.append(factors._replace(x=factors.x.detach()))  # not the graph behind it
        return self._keeping is not None


class _Given(torch.autograd.Function):
    """`_Given.apply(weight, products)`: nothing, whose gradient for the weight is the sum of the products.

    A gradient that autograd is given from outside it copies, one that is made within a backward it takes as it is.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: list[Factors]) -> Tensor:
        ctx.products = products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_of(ctx.products), None


class _Products(TorchFunctionMode):
    """Computes products with trained weights so that their gradients can be left."""

    def __init__(self, halves: WeightHalves) -> None:
        super().__init__()
        self._halves = halves

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = product_of(function, args, kwargs, self._halves.keep)
        return function(*args, **kwargs) if found is None else found


def _sum_of(products: list[Factors]) -> Tensor:
    """The gradient of one parameter; what it is made of is let go of."""
    is_whole = all(each.place.is_whole for each in products)
    total = products.pop(0).product() if is_whole else torch.zeros_like(products[0].weight)
    while products:
        place, product = products[0].place, products.pop(0).product()
        (total if is_whole else total.as_strided(place.size, place.stride, place.offset)).add_(product)
    return total
