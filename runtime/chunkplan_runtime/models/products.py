"""Products with trained weights: what their gradients are made of, which can be kept, or added to a sum elsewhere.

The gradient of a weight is one product, of the input `x` of a linear layer and the gradient of its output. A function
that knows both in its backward adds it to a wider sum at once (`sum_gradients`): on a GPU by one kernel, which rounds
nothing in between. Or a backward is in two halves (Zero Bubble Pipeline Parallelism, arXiv 2401.10241): the input half
keeps both, the weight half adds the product to `.grad` as a backward does, with the hooks of parameters. What is
multiplied in a way that is not known here has its gradient in the input half too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from chunkplan_runtime.devices import wide

#: A virtual stage of this process, and a chunk_id.
ChunkKey = tuple[int, int]


class Factors(NamedTuple):
    """The factors of the gradient of a weight [n, k]: `left` [rows, n] transposed by `right` [rows, k].

    Of a stack [groups, n, k]: [groups, rows, ...], or rows of all groups in a row, which end at `ends` [groups].
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    ends: Tensor | None

    def product(self) -> Tensor:
        """The gradient of the weight."""
        return _multiplied(self.left.mT, self.right, self.ends)

    def add_to_sum(self) -> bool:
        """Add the product to the sum of its weight, where that has one; whether it is in it."""
        weight, left, right, _ = self
        if type(weight) is not SummedWeight or weight.owner is None:
            return False
        total = weight.gradient_sum()
        if total.is_cuda:
            torch.ops.aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)
        else:
            total.add_(torch.mm(left.t(), right))
        return True


def _multiplied(rows: Tensor, matrix: Tensor, ends: Tensor | None) -> Tensor:
    """Rows by a matrix; or by a stack of them, a group of rows, which end at `ends`, by each."""
    product: Tensor = torch.matmul(rows, matrix) if ends is None else F.grouped_mm(rows, matrix, offs=ends)
    return product


class _Product(torch.autograd.Function):
    """Multiplies `x` by the weight transposed, or with `is_swapped` by the weight; `edge`: it, if it has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor | None,
        bias: Tensor | None,
        ends: Tensor | None,
        weight: Tensor,
        is_swapped: bool,
        keep: Callable[[Factors], bool] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.weight, ctx.is_swapped, ctx.keep = weight, is_swapped, keep
        if bias is not None:
            return F.linear(x, weight.mT if is_swapped else weight, bias)
        return _multiplied(x, weight if is_swapped else weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        of_x = of_weight = of_bias = None
        x, weight, ends = ctx.saved_tensors  # for which a checkpoint may run its layer again
        with torch._C.DisableTorchFunctionSubclass():  # else every use of a weight takes some microseconds
            if weight.ndim == 2:
                gradient = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                of_x = _multiplied(gradient, weight.mT if ctx.is_swapped else weight, ends).view_as(x)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.sum(0)
            if weight.ndim == 2:
                x = x.reshape(-1, x.shape[-1])
            left, right = (x, gradient) if ctx.is_swapped else (gradient, x)
            factors = Factors(ctx.weight, left, right, ends)
            if not (ctx.keep is not None and ctx.keep(factors)) and not factors.add_to_sum():
                of_weight = factors.product()
        return of_x, of_weight, of_bias, None, None, None, None


class _Lookup(torch.autograd.Function):
    """`_Lookup.apply(weight, ids, padding)`: rows of a weight with a sum, `SummedWeight`."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,), (gradient,), total = ctx.saved_tensors, gradients, ctx.weight.gradient_sum()
        if ctx.padding is not None:
            gradient = gradient.masked_fill((ids == ctx.padding)[..., None], 0)
        total.index_put_((ids,), gradient.to(total.dtype), accumulate=True)  # which is deterministic on a GPU
        return None, None, None


#: `apply`, without what torch does first for transforms of functions: it looks at every argument.
_product: Callable[..., Tensor] = super(torch.autograd.Function, _Product).apply
_lookup: Callable[..., Tensor] = super(torch.autograd.Function, _Lookup).apply


class SummedWeight(nn.Parameter):
    """A matrix whose gradients are added up in `owner.entry`: see `sum_gradients`; those of a copy are not.

    `devices`: where product and sum are one kernel; elsewhere a function of Python would be all that there is to it.
    """

    devices = frozenset({"cuda"})

    owner: Any = None
    entry: str
    number: Tensor | None = None

    def gradient_sum(self) -> Tensor:
        """The tensor that its gradients are added to, made of zeros when first asked for."""
        total: Tensor | None = getattr(self.owner, self.entry)
        if total is None:
            with torch._C.DisableTorchFunctionSubclass():
                total = torch.zeros_like(self, dtype=wide(self.dtype), requires_grad=False)
            setattr(self.owner, self.entry, total)
        return total

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                found = _product_in_graph(function, args, kwargs)
            elif function is F.embedding:
                found = _lookup_of(args, kwargs)
            else:
                found = product_of(function, args, kwargs)
            return function(*args, **kwargs) if found is None else found


def sum_gradients(weight: nn.Parameter, owner: Any, entry: str = "grad") -> None:
    """Add the gradients of a weight up in `owner.entry`, in at least float32, and no longer in its `.grad`."""
    summed: Any = weight
    if weight.ndim == 2 and weight.device.type in SummedWeight.devices:
        number = next(_numbers)
        summed.__class__ = SummedWeight
        summed.owner, summed.entry = owner, entry
        _summed[number] = summed
        summed.number = torch.tensor(float(number), dtype=torch.float64, requires_grad=True)
    summed.register_post_accumulate_grad_hook(partial(_move_gradient, owner, entry))


def _move_gradient(owner: Any, entry: str, weight: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient, weight.grad = weight.grad, None
    total = getattr(owner, entry)
    if gradient is not None and total is not None:
        total.add_(gradient)
    elif gradient is not None:  # an input half leaves it to the weight half, and products are added already
        setattr(owner, entry, gradient.to(wide(gradient.dtype)))


def _lookup_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of `F.embedding` of a summed weight; None where more than rows is asked for."""
    (ids, weight), padding = args[:2], kwargs.get("padding_idx")
    is_plain = not any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if not is_plain or weight.owner is None or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return _lookup(weight, ids, padding)


def product_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], keep: Callable[[Factors], bool] | None = None
) -> Tensor | None:
    """The result of a function of torch that is a product with a trained weight, whose backward offers it to `keep`."""
    operands_of = _OPERANDS.get(function)
    if operands_of is None or not torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return None
    found = operands_of(*args, **kwargs)
    weight, is_swapped = (None, False) if found is None else _parameter_of(found[1])
    if found is None or weight is None:
        return None
    x, _, bias, ends = found
    # Of what is added in any case there is no gradient for autograd to go on with, nor to call hooks for.
    is_added = type(weight) is SummedWeight and weight.owner is not None and x.requires_grad
    return _product(x, None if is_added else weight, bias, ends, weight, is_swapped, keep)


#: x, matrix, bias and ends of `_Product`; None of what is not such a product.
_Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None


def _matmul(input: Tensor, other: Tensor, **more: Any) -> _Operands:
    is_stack = other.ndim == input.ndim == 3 and other.shape[0] == input.shape[0]
    return (input, other.mT, None, None) if not more and (is_stack or (other.ndim == 2 and input.ndim > 1)) else None


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor | None = None, **more: Any) -> _Operands:
    is_plain = offs is not None and (input.ndim, weight.ndim) == (2, 3) and not any(more.values())
    return (input, weight.mT, None, offs) if is_plain else None


_OPERANDS: dict[Any, Callable[..., _Operands]] = {
    F.linear: lambda input, weight, bias=None: (input, weight, bias, None) if weight.ndim == 2 else None,
    torch.addmm: lambda bias, mat1, mat2, **more: (mat1, mat2.mT, bias, None) if not more and bias.ndim == 1 else None,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm), _matmul),
    torch._grouped_mm: _grouped_mm,  # by which name F.grouped_mm comes here
}


def _parameter_of(matrix: Tensor) -> tuple[Tensor | None, bool]:
    """The trained parameter that a tensor is, and whether with its last two dimensions swapped; None of any other."""
    if type(matrix) is SummedWeight and matrix.requires_grad:
        return matrix, False
    weight = matrix if matrix.is_leaf else matrix._base
    if not isinstance(weight, nn.Parameter) or not matrix.requires_grad or weight.dtype != matrix.dtype:
        return None, False
    if matrix.shape == weight.shape and matrix.stride() == weight.stride():
        return weight, False
    is_swapped = weight.ndim > 1 and matrix.shape == weight.mT.shape and matrix.stride() == weight.mT.stride()
    return weight if is_swapped else None, is_swapped


#: Weights with sums, by the numbers that they have in a compiler's graph, whose nodes are given tensors alone.
_summed: WeakValueDictionary[int, SummedWeight] = WeakValueDictionary()
_numbers = count()

#: Of nodes that add a product: a compiler takes two that are given the same for one.
_adding = count()


def _product_in_graph(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of a linear layer with a summed weight, as a node of a compiler's graph."""
    is_linear = function is F.linear and not kwargs and torch.is_grad_enabled()
    is_linear = is_linear and not torch._C._is_any_autocast_enabled()
    if not is_linear or not isinstance(args[1], SummedWeight) or args[1].number is None:
        return None
    found: Tensor = torch.ops.chunkplan.product(*args[:2], args[2] if len(args) > 2 else None, args[1].number)
    return found


@torch.library.custom_op("chunkplan::product", mutates_args=())
def _node(x: Tensor, matrix: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    return F.linear(x, matrix, bias)


@torch.library.custom_op("chunkplan::add_product", mutates_args=())
def _add_product(x: Tensor, gradient: Tensor, number: Tensor, node: int) -> Tensor:
    weight: Any = _summed[int(number)]
    with torch._C.DisableTorchFunctionSubclass():
        Factors(weight, gradient, x.reshape(-1, x.shape[-1]), None).add_to_sum()
    return torch.zeros_like(number)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The weight has none: that of its number, which is never read, makes sure that nothing is left out."""
    x, matrix, number = ctx.saved_tensors
    gradient = gradient.reshape(-1, matrix.shape[0])
    of_x = (gradient @ matrix).view(x.shape) if ctx.needs_input_grad[0] else None
    of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
    return of_x, None, of_bias, torch.ops.chunkplan.add_product(x, gradient, number, next(_adding))


_node.register_fake(lambda x, matrix, bias, number: x.new_empty(*x.shape[:-1], matrix.shape[0]))
_add_product.register_fake(lambda x, gradient, number, node: torch.zeros_like(number))
_node.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], inputs[1], inputs[3])
)


class WeightHalves(TorchFunctionMode):
    """The factors of gradients of weights, `kept` of chunks between the halves of their backward, if it `splits`."""

    def __init__(self, *, splits: bool = False) -> None:
        super().__init__()
        self._splits = splits
        #: Of the chunk whose input half is at work; None in whole backwards.
        self._keeping: list[Factors] | None = None
        self.kept: dict[ChunkKey, list[Factors]] = {}

    def splitting(self) -> AbstractContextManager[object]:
        """Backwards of what runs forward in the block can be split."""
        return self if self._splits else nullcontext()

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = product_of(function, args, kwargs, self._keep)
        return function(*args, **kwargs) if found is None else found

    def _keep(self, factors: Factors) -> bool:
        """Keep what an input half leaves; whether one is at work."""
        if self._keeping is not None:
            own = factors._replace(left=factors.left.detach(), right=factors.right.detach())
            self._keeping.append(own)  # not the graph behind it
        return self._keeping is not None

    @contextmanager
    def input_half(self, key: ChunkKey) -> Iterator[None]:
        """Backwards in the block leave gradients of weights for the `weight_half` of this chunk."""
        self._keeping = self.kept[key] = []
        try:
            yield
        finally:
            self._keeping = None

    def weight_half(self, key: ChunkKey) -> None:
        """Add the gradients of weights that the chunk's input half has left."""
        by_weight: dict[Tensor, list[Factors]] = {}
        for factors in self.kept.pop(key):
            by_weight.setdefault(factors.weight, []).append(factors)
            del factors  # each is to be let go of
        while by_weight:
            weight = next(iter(by_weight))
            left = [factors for factors in by_weight.pop(weight) if not factors.add_to_sum()]
            if left:
                _SumOfProducts.apply(weight, left).backward()  # type: ignore[no-untyped-call]


class _SumOfProducts(torch.autograd.Function):
    """Nothing of a weight, with the sum of products as gradient, which autograd would copy if given from outside."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: list[Factors]) -> Tensor:
        ctx.products = products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = ctx.products.pop(0).product()
        while ctx.products:  # which are let go of
            total.add_(ctx.products.pop(0).product())
        return total, None
