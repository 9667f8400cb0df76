"""Other ways to compute what a model's code asks torch for, which also hold for what checkpoints run again.

One is float64 wherever transformers computes in float32 whatever the dtype of the model: norms, rotary embeddings,
routers, its own plain attention. Rounding to float32 turns a difference in the last bit of a float64 into one a billion
times larger whenever it crosses a rounding border, so that a comparison's error would be that of float32 now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Of this thread: `modes`, those that it computes in, the outermost first.
_here = local()


def modes_here() -> tuple[TorchFunctionMode, ...]:
    """The modes that this thread computes in, the outermost first."""
    modes: tuple[TorchFunctionMode, ...] = getattr(_here, "modes", ())
    return modes


@contextmanager
def computing_in(mode: TorchFunctionMode) -> Iterator[None]:
    """Within the block this thread computes in a mode."""
    before = modes_here()
    _here.modes = (*before, mode)
    try:
        with mode:
            yield
    finally:
        _here.modes = before


def as_now() -> Callable[[], AbstractContextManager[object]]:
    """What makes blocks later compute as is done here and now: for what a checkpoint runs again in a backward."""
    modes = modes_here()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            yield

    return again


@contextmanager
def evaluate_in_float64(model: nn.Module) -> Iterator[None]:
    """Within the block, what `model` would compute in float32 is computed in float64; weights stay as they are."""
    # Every module, and not the whole only: with activation checkpoints, layers run again in a backward.
    changed: list[Any] = list(model.modules())
    before = [module.__dict__.get("forward") for module in changed]
    for module in changed:
        module.forward = partial(_in_float64, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(changed, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _in_float64(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    if any(isinstance(mode, _Float64) for mode in modes_here()):
        return forward(*arguments, **keywords)
    with computing_in(_Float64()):
        return forward(*arguments, **keywords)


class _Float64(TorchFunctionMode):
    """Reads float32 as float64 wherever a dtype is asked for."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = [torch.float64 if argument is torch.float32 else argument for argument in args]
        kwargs = {name: torch.float64 if given is torch.float32 else given for name, given in (kwargs or {}).items()}
        return function(*args, **kwargs)
