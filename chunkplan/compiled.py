"""Loops over sequences and chunks that numpy cannot express run as machine code, compiled by numba."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy.typing as npt
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment
from numba.core.registry import cpu_target
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


def compiled_in_place(function: Function) -> Function:
    """Compile like `compiled`, without reference counts, a function that creates no arrays, only views.

    Counting takes most of the time of a loop that has many arrays and does little with each.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: Function, **options: Any) -> Function:
    """Compile `function` for Python, and for compiled functions as a part, without the long wrapper for Python."""
    if vars(numba.config)["DISABLE_JIT"]:  # for debugging
        return function
    of_python = _dispatcher(function)
    compile_for_args = of_python._compile_for_args

    @cache
    def part() -> Any:
        code = function.__code__.replace(co_qualname=f"{function.__qualname__}_part")  # it is kept under this name
        copy = FunctionType(code, function.__globals__, argdefs=function.__defaults__)
        return _dispatcher(copy, no_cpython_wrapper=True, **options)

    # Or a constant would be a type of its own, and what is called with it be compiled once more.
    of_python.get_call_template = lambda args, kws: part().get_call_template(
        tuple(map(unliteral, args)), {name: unliteral(kws[name]) for name in kws}
    )
    of_python.get_overload = lambda signature: part().get_overload(signature)
    of_python._compile_for_args = lambda *args, **kws: _compile(compile_for_args, args, kws)
    return cast(Function, of_python)


def _dispatcher(function: Callable[..., object], **options: Any) -> Any:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: neither the installation nor the user's cache folder can be written
        dispatcher = numba.njit(**options)(function)
    if cache_file := getattr(getattr(dispatcher, "_cache", None), "_cache_file", None):
        # Compared before the rest of an index is read, which fails where an earlier source had other classes.
        cache_file._version = f"{cache_file._version} {cache_file._source_stamp}"
    _dispatchers.append(dispatcher)
    return dispatcher


class _Library(JITCodeLibrary):
    """Code of a function that is optimised and made machine code when Python asks for its address.

    numba does both with each function, and again in each that calls it. Here parts are only linked.
    """

    _is_machine_code = False

    def _optimize_final_module(self) -> None:
        """Wait for `get_pointer_to_function`."""

    def _finalize_final_module(self) -> None:
        if self._object_caching_enabled and self._compiled_object:  # read from disk
            self._is_machine_code = True
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._finalized = True

    def get_pointer_to_function(self, name: str) -> Any:
        """Implements `JITCodeLibrary.get_pointer_to_function`."""
        self._ensure_finalized()
        if not self._is_machine_code:
            if name not in {function.name for function in self.get_defined_functions()}:
                return 0
            self._is_machine_code = True
            super()._optimize_final_module()
            super()._finalize_final_module()
            for variable in self._final_module.global_variables:
                if (environment := lookup_environment(variable.name)) is not None:
                    self.codegen.set_env(variable.name, environment)
        return super().get_pointer_to_function(name)

    def serialize_using_object_code(self) -> Any:
        """Implements `CPUCodeLibrary.serialize_using_object_code`."""
        return super().serialize_using_object_code() if self._is_machine_code else self.serialize_using_bitcode()


def _compile(function: Callable[..., object], args: Any, kws: Any) -> object:
    """Call `function`, which compiles, with `_Library`, and rarely look for garbage, which is little."""
    with global_compiler_lock:
        codegen, thresholds = cpu_target.target_context.codegen(), gc.get_threshold()
        set_env, codegen._library_class = codegen.set_env, _Library
        codegen.set_env = lambda name, env: set_env(name, env) if codegen._engine.is_symbol_defined(name) else None
        gc.set_threshold(thresholds[0] and 50_000, *thresholds[1:])
        try:
            return function(*args, **kws)
        finally:
            gc.set_threshold(*thresholds)
            del codegen._library_class, codegen.set_env


# A frame of 1 MiB, with room behind it for the compiler's: else Python maps 16 KiB at each call across a block's end.
_compile.__code__ = _compile.__code__.replace(co_stacksize=1 << 17)


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
