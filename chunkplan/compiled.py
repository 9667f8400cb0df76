"""Loops over sequences and chunks that numpy cannot express run as machine code, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy.typing as npt
from numba.core.types import unliteral

Function = TypeVar("Function", bound=Callable[..., object])

_dispatchers: list[Any] = []


def compiled(function: Function) -> Function:
    """Compile `function` when it is first called, for the types it is called with.

    Machine code is kept on disk beside the source, so only the first run after an installation compiles. The GIL is
    released, so threads run such functions side by side. Integers stay exact and nothing is reordered (no fastmath):
    results are the same on every machine. Each combination of types is compiled for itself: call it with int64 arrays
    where there is a choice, and give every argument.
    """
    return _compiled(function)


def compiled_part(function: Function) -> Function:
    """Compile a function that only compiled functions call; called from Python it ends the process.

    The wrapper that Python calls unpacks its arguments, in code that for a table of columns is longer than a loop.
    """
    return _compiled(function, no_cpython_wrapper=True)


def compiled_in_place(function: Function) -> Function:
    """Compile like `compiled_part`, without reference counts, a function that creates no arrays, only views.

    Counting takes most of the time of a loop that has many arrays and does little with each.
    """
    return _compiled(function, no_cpython_wrapper=True, _nrt=False)


def _compiled(function: Function, **options: Any) -> Function:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: neither the installation nor the user's cache folder can be written
        dispatcher = numba.njit(**options)(function)
    if cache_file := getattr(getattr(dispatcher, "_cache", None), "_cache_file", None):
        # Compared before the rest of an index is read, which fails where an earlier source had other classes.
        cache_file._version = f"{cache_file._version} {cache_file._source_stamp}"
    if hasattr(dispatcher, "stats"):  # NUMBA_DISABLE_JIT=1, for debugging, leaves functions as they are
        of_types = dispatcher.get_call_template
        plain: Callable[[Any], Any] = unliteral
        # Or a constant would be a type of its own, and what is called with it be compiled once more.
        dispatcher.get_call_template = lambda args, kws: of_types(
            tuple(map(plain, args)), {name: plain(kind) for name, kind in kws.items()}
        )
        _dispatchers.append(dispatcher)
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """Compile `function` as a part of each compiled function that calls it.

    For what runs at every turn of a loop and is given many arrays, which takes longer than what it does with them.
    """
    return cast(Function, numba.njit(inline="always", nogil=True)(function))


@inlined
def copy_to(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy `source` to `target` of the same size, without the shape errors that `target[:] = source` compiles in.

    Those errors take longer to compile than most functions.
    """
    for index in range(target.size):
        target[index] = source[index]


def has_compiled() -> bool:
    """True if this process has compiled anything so far, or is compiling."""
    return num_compiled() > 0


def num_compiled() -> int:
    """Number of functions compiled by this process so far, one for each combination of argument types."""
    return sum(sum(dispatcher.stats.cache_misses.values()) for dispatcher in _dispatchers)
