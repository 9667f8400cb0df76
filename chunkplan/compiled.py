"""Loops over sequences and chunks that numpy cannot express run as machine code, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

_dispatchers: list[Any] = []


def compiled(function: Function) -> Function:
    """Compile `function` when it is first called, for the types it is called with.

    Machine code is kept on disk beside the source, so only the first run after an installation compiles. The GIL is
    released, so threads run such functions side by side. Integers stay exact and nothing is reordered (no fastmath):
    results are the same on every machine. Call it with int64 arrays where there is a choice: each combination of types
    is compiled for itself.
    """
    return _compiled(function)


def compiled_in_place(function: Function) -> Function:
    """Compile like `compiled`, without reference counts, a function that creates no arrays, only views.

    Counting takes most of the time of a loop that has many arrays and does little with each.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: Function, **options: Any) -> Function:
    try:
        dispatcher = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: neither the installation nor the user's cache folder can be written
        dispatcher = numba.njit(nogil=True, **options)(function)
    if hasattr(dispatcher, "stats"):  # NUMBA_DISABLE_JIT=1, for debugging, leaves functions as they are
        _dispatchers.append(dispatcher)
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """Compile `function` as a part of each compiled function that calls it.

    For what runs at every turn of a loop and is given many arrays, which takes longer than what it does with them.
    """
    return cast(Function, numba.njit(inline="always", nogil=True)(function))


def has_compiled() -> bool:
    """True if this process has compiled anything so far, or is compiling."""
    return any(dispatcher.stats.cache_misses for dispatcher in _dispatchers)
