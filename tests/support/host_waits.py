"""A mode in which nothing may wait for the device or take memory that is to be used again, as far as a CPU shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

#: Operators whose result, or its shape, the host has to know: on a GPU it waits for it.
_WAITS = frozenset(
    (
        *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    )
)

#: Operators that wait where they are given a mask.
_INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))

#: Functions that read a tensor on the host, and which no operator shows on a CPU.
_READS = frozenset(("tolist", "numpy", "__array__"))

#: Operators that take memory.
_TAKES = frozenset(("empty", "empty_strided", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros"))


class RefusedError(AssertionError):
    """Something waited for the device, or took memory, where it must not."""


class NoHostWaits:
    """Within the block, whatever waits for a device is refused, of all tensors but `host` and what is made of these.

    `steady`: files of the runtime, by name, that may take no memory: what they use is there from the step before.
    """

    def __init__(self, host: Iterable[Tensor] = (), steady: Iterable[str] = ()) -> None:
        self._host: Any = WeakIdKeyDictionary(dict.fromkeys(host, True))
        self._steady = frozenset(steady)
        self._modes = _Operators(self), _Functions(self)

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)

    def refuse(self, what: str, given: list[Tensor]) -> None:
        """Refuse that `what` is done with tensors, unless all of them are of the host."""
        if not given or not all(tensor in self._host for tensor in given):
            raise RefusedError(f"{what} waits for the device")

    def follow(self, given: list[Tensor], made: Any) -> None:
        """What is made of tensors of the host alone is one too."""
        if given and all(tensor in self._host for tensor in given):
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    self._host[tensor] = True

    def refuse_memory(self, operator: str) -> None:
        """Refuse memory to files that are steady."""
        if self._steady and operator in _TAKES:
            frame: Any = sys._getframe(1)
            while frame is not None:
                if "chunkplan_runtime" in frame.f_code.co_filename:
                    if (name := Path(frame.f_code.co_filename).name) in self._steady:
                        raise RefusedError(f"{name} takes memory, in {frame.f_code.co_name}")
                    return
                frame = frame.f_back


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


class _Operators(TorchDispatchMode):
    def __init__(self, rules: NoHostWaits) -> None:
        super().__init__()
        self._rules = rules

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = function.overloadpacket.__name__, _tensors((args, kwargs))
        by_mask = name in _INDEXED and any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
        if name in _WAITS or by_mask:
            self._rules.refuse(name, given)
        self._rules.refuse_memory(name)
        made = function(*args, **(kwargs or {}))
        self._rules.follow(given, made)
        return made


class _Functions(TorchFunctionMode):
    def __init__(self, rules: NoHostWaits) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _READS and not _is_in_cpu_fallback():
            self._rules.refuse(function.__name__, _tensors(args))
        return function(*args, **(kwargs or {}))


def _is_in_cpu_fallback() -> bool:
    """Whether transformers computes grouped products one by one, as it does on a CPU alone."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name.startswith("_grouped_mm_fallback"):
            return True
        frame = frame.f_back
    return False
