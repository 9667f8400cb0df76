"""Products with trained weights: what their gradients are made of, which can be kept, or added to a sum elsewhere.

The gradient of a weight that multiplies activations is one product, of the input `x` of a linear layer and the gradient
of its output. Such products are computed by a function that knows both in its backward. Where a gradient is narrower
than the sum that it is for (`sum_gradients`), and the weight is a matrix, the product is added to the sum at once: on a
GPU by one kernel, which rounds nothing in between. So are rows of embeddings that are looked up: their gradient would
be as large as all embeddings, however few tokens a chunk has.

A backward may be in two halves (Zero Bubble Pipeline Parallelism, Qi et al., arXiv 2401.10241): the input half of a
chunk keeps what these products are made of and leaves the rest of the graph to autograd, the weight half adds them to
`.grad` as a backward does, with the hooks of parameters. What is multiplied in a way that is not known here has its
gradient in the input half too.
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
from chunkplan_runtime.models.modes import computing_in


class _Lookup(torch.autograd.Function):
    """`_Lookup.apply(weight, ids, padding)`: rows of a weight with a sum, `Summed`."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, (ids,), weight = gradients[0], ctx.saved_tensors, ctx.weight
            if ctx.padding is not None:
                gradient = gradient.masked_fill((ids == ctx.padding)[..., None], 0)
            total = getattr(weight.owner, weight.entry)
            if total is None:
                total = torch.zeros_like(weight, dtype=wide(weight.dtype), requires_grad=False)
                setattr(weight.owner, weight.entry, total)
            total.index_put_((ids,), gradient.to(total.dtype), accumulate=True)  # which is deterministic on a GPU
        return None, None, None


_lookup: Callable[..., Tensor] = super(torch.autograd.Function, _Lookup).apply


def lookup_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What `F.embedding` gives of a summed weight; None where more than rows is asked for."""
    (ids, weight), padding = args[:2], kwargs.get("padding_idx")
    is_plain = not any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if not is_plain or weight.owner is None or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return _lookup(weight, ids, padding)


class _Extent(NamedTuple):
    """The numbers of a parameter that a matrix, or a stack of matrices, is: all of them, or a view of some.

    `is_whole`: it is the parameter as it is. `is_matrix`: that is a matrix, as it is or transposed.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    is_matrix: bool

    @classmethod
    def of(cls, matrix: Tensor, weight: Tensor) -> _Extent | None:
        """Where a matrix is in the parameter that it is a view of; None if some numbers are in it twice."""
        if matrix is not weight and not (weight.is_contiguous() and _has_all_once(matrix)):
            return None
        offset = int(matrix.storage_offset() - weight.storage_offset())
        size, stride = matrix.size(), matrix.stride()
        is_whole = matrix is weight or (size == weight.size() and stride == weight.stride())
        is_matrix = weight.ndim == 2 and (is_whole or stride == weight.mT.stride())
        return cls(size, stride, offset, is_whole, is_matrix)


class Factors(NamedTuple):
    """What the gradient of a matrix [n, k] at `place` of a weight is the product of.

    `x` [rows, k] and `gradient` [rows, n]. Of a stack of matrices [groups, n, k]: [groups, rows, ...]; or the rows of
    all groups one after another, which end at `ends` [groups].
    """

    weight: Tensor
    place: _Extent
    x: Tensor
    gradient: Tensor
    ends: Tensor | None

    def product(self) -> Tensor:
        """The gradient of the matrix [n, k], or of the stack of them."""
        if self.ends is not None:
            return _grouped(self.gradient.mT, self.x, self.ends)
        if len(self.place.size) == 3:
            return torch.bmm(self.gradient.mT, self.x)
        return torch.mm(self.gradient.t(), self.x)

    def are_added(self) -> bool:
        """Add the product to the sum of its weight, where that has one; whether it is in it."""
        weight, place, x, gradient, _ = self
        if type(weight) is not Summed or not place.is_matrix or weight.owner is None:
            return False
        left, right = (gradient.t(), x) if place.is_whole else (x.t(), gradient)  # laid out as the weight is
        total: Tensor | None = getattr(weight.owner, weight.entry)
        if total is not None and x.is_cuda:
            torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
        elif total is not None:
            total.add_(torch.mm(left, right))
        else:
            dtype = wide(x.dtype)
            first = torch.mm(left, right, out_dtype=dtype) if x.is_cuda else torch.mm(left, right).to(dtype)
            setattr(weight.owner, weight.entry, first)
        return True


class _Product(torch.autograd.Function):
    """`_Product.apply(x, edge, bias, ends, of, keep)`: `x` by a matrix transposed, see `Factors`.

    `of`: the matrix, its weight and its place there. `edge`: the matrix again, where autograd may get its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor | None,
        bias: Tensor | None,
        ends: Tensor | None,
        of: tuple[Tensor, Tensor, _Extent],
        keep: Callable[[Factors], bool] | None,
    ) -> Tensor:
        matrix, ctx.weight, ctx.place = of
        ctx.save_for_backward(x, matrix, ends)
        ctx.keep = keep
        if ends is not None:
            return _grouped(x, matrix.mT, ends)
        return torch.bmm(x, matrix.mT) if matrix.ndim == 3 else F.linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        of_x = of_matrix = of_bias = None
        x, matrix, ends = ctx.saved_tensors  # for which a checkpoint may run its layer again
        of_input, _, of_bias_too, *_ = ctx.needs_input_grad
        with torch._C.DisableTorchFunctionSubclass():  # else every use of a weight takes some microseconds
            if matrix.ndim == 2:
                n, k = matrix.shape
                gradient = gradient.reshape(-1, n)
            if of_input:
                of_x = _grouped(gradient, matrix, ends) if ends is not None else torch.matmul(gradient, matrix)
                of_x = of_x.view_as(x)
            if of_bias_too:
                of_bias = gradient.sum(0)
            if matrix.ndim == 2:
                x = x.reshape(-1, k)
            factors = Factors(ctx.weight, ctx.place, x, gradient, ends)
            keep = ctx.keep
            if not (keep is not None and keep(factors)) and not factors.are_added():
                of_matrix = factors.product()
        return of_x, of_matrix, of_bias, None, None, None


#: `_Product.apply`, without what torch does first for transforms of functions: it looks at every argument.
_product: Callable[..., Tensor] = super(torch.autograd.Function, _Product).apply


class Summed(nn.Parameter):
    """A matrix whose gradients are added up in the attribute `entry` of `owner`: see `sum_gradients`.

    `place`: its own. A copy of it has no owner, and its gradients are added up nowhere. `devices`: where product and
    sum are one kernel; elsewhere a function of Python in the place of torch's own would be all that there is to it.
    """

    devices = frozenset({"cuda"})

    owner: Any = None
    entry: str
    place: _Extent | None = None
    number: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                find = _product_in_graph
            else:
                find = lookup_of if function is F.embedding else product_of
            found = find(function, args, kwargs)
            return function(*args, **kwargs) if found is None else found


def sum_gradients(weight: nn.Parameter, owner: Any, entry: str = "grad") -> None:
    """Add the gradients of a weight up in `owner.entry`, in at least float32, and no longer in its `.grad`.

    Those of rows that are looked up, and those by products with a matrix, whatever function of torch computes these,
    without being made by themselves where a device can do that.
    """
    summed: Any = weight
    if weight.ndim == 2 and weight.device.type in Summed.devices:
        place = _Extent.of(weight, weight)
        summed.__class__ = Summed
        summed.owner, summed.entry, summed.place = owner, entry, place
        number = next(_numbers)
        _summed[number] = summed
        summed.number = torch.tensor(float(number), dtype=torch.float64, requires_grad=True)
    summed.register_post_accumulate_grad_hook(partial(_move_gradient, owner, entry))


def _move_gradient(owner: Any, entry: str, weight: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient, weight.grad = weight.grad, None
    if gradient is not None:  # an input half leaves it to the weight half, and products are added already
        total = getattr(owner, entry)
        if total is None:
            setattr(owner, entry, gradient.to(wide(gradient.dtype)))
        else:
            total.add_(gradient)


def product_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], keep: Callable[[Factors], bool] | None = None
) -> Tensor | None:
    """What a function of torch gives that is a product with a trained weight, whose backward offers it to `keep`."""
    form = _FORMS.get(function)
    if form is None or not torch.is_grad_enabled() or (found := form(*args, **kwargs)) is None:
        return None
    x, matrix, bias, ends = found
    weight = _parameter_of(matrix)
    if weight is None:
        return None
    place = (type(matrix) is Summed and matrix.place) or _Extent.of(matrix, weight)
    if place is None:
        return None
    # Of what is added in any case there is no gradient for autograd to go on with, nor to call hooks for.
    is_added = type(weight) is Summed and weight.owner is not None and place.is_matrix and x.requires_grad
    return _product(x, None if is_added else matrix, bias, ends, (matrix, weight, place), keep)


#: x, matrix, bias and ends of `_Product`; None of what is not such a product.
_Form = tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Form:
    return (input, weight, bias, None) if weight.ndim == 2 and not _casts() else None


def _matmul(input: Tensor, other: Tensor, **more: Any) -> _Form:
    if more or _parameter_of(other) is None or _casts():
        return None
    is_stack = other.ndim == input.ndim == 3 and other.shape[0] == input.shape[0]
    return (input, other.mT, None, None) if is_stack or (other.ndim == 2 and input.ndim > 1) else None


def _addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> _Form:
    is_plain = not more and bias.ndim == 1 and _parameter_of(mat2) is not None and not _casts()
    return (mat1, mat2.mT, bias, None) if is_plain else None


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor | None = None, **more: Any) -> _Form:
    is_plain = offs is not None and (input.ndim, weight.ndim) == (2, 3) and not any(more.values())
    return (input, weight.mT, None, offs) if is_plain and _parameter_of(weight) is not None else None


_FORMS: dict[Any, Callable[..., _Form]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm), _matmul),
    torch._grouped_mm: _grouped_mm,  # by which name F.grouped_mm comes here
}


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = F.grouped_mm(rows, matrices, offs=ends)
    return found


def _parameter_of(matrix: Tensor) -> Tensor | None:
    """The trained parameter that a tensor is, or is a view of."""
    if type(matrix) is Summed and matrix.requires_grad:
        return matrix
    weight = matrix if matrix.is_leaf else matrix._base
    is_trained = isinstance(weight, nn.Parameter) and matrix.requires_grad and weight.dtype == matrix.dtype
    return weight if is_trained else None


def _casts() -> bool:
    """Whether products may be computed in another dtype than that of what they are given."""
    return torch._C._is_any_autocast_enabled()


def _has_all_once(view: Tensor) -> bool:
    """Whether no number of what it is a view of is in it twice."""
    span = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += (size - 1) * stride
    return True


#: Weights with sums, by the numbers that they have in a compiler's graph, whose nodes are given tensors alone.
_summed: WeakValueDictionary[int, Summed] = WeakValueDictionary()
_numbers = count()

#: Of nodes that add a product: a compiler takes two that are given the same for one.
_adding = count()

_library: Any = torch.library.Library("chunkplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, Tensor matrix, Tensor? bias, Tensor number) -> Tensor")
_library.define("add_product(Tensor x, Tensor gradient, Tensor number, int node) -> Tensor")


def _product_in_graph(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a linear layer with a summed weight gives, as a node of a compiler's graph."""
    is_linear = function is F.linear and not kwargs and torch.is_grad_enabled() and not _casts()
    if not is_linear or not isinstance(args[1], Summed) or args[1].number is None:
        return None
    found: Tensor = torch.ops.chunkplan.product(*args[:2], args[2] if len(args) > 2 else None, args[1].number)
    return found


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: Tensor) -> None:
    x, matrix, _, number = inputs
    ctx.save_for_backward(x, matrix, number)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The weight has none: that of its number, which is never read, makes sure that nothing is left out."""
    x, matrix, number = ctx.saved_tensors
    gradient = gradient.reshape(-1, matrix.shape[0])
    of_x = (gradient @ matrix).view(x.shape) if ctx.needs_input_grad[0] else None
    of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
    return of_x, None, of_bias, torch.ops.chunkplan.add_product(x, gradient, number, next(_adding))


def _add_product(x: Tensor, gradient: Tensor, number: Tensor, node: int) -> Tensor:
    weight: Any = _summed[int(number)]
    with torch._C.DisableTorchFunctionSubclass():
        Factors(weight, weight.place, x.reshape(-1, x.shape[-1]), gradient, None).are_added()
    return torch.zeros_like(number)


_library.impl("product", lambda x, matrix, bias, number: F.linear(x, matrix, bias), "CompositeExplicitAutograd")
_library.impl("add_product", _add_product, "CompositeExplicitAutograd")
_fake: Any = partial(torch.library.register_fake, lib=_library)
_fake("chunkplan::product", lambda x, matrix, bias, number: x.new_empty(*x.shape[:-1], matrix.shape[0]))
_fake("chunkplan::add_product", lambda x, gradient, number, node: torch.zeros_like(number))
torch.library.register_autograd("chunkplan::product", _gradients, setup_context=_save, lib=_library)


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
