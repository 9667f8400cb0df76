"""Other ways to compute what a model's code asks torch for, which hold for what checkpoints run again in a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import local

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
