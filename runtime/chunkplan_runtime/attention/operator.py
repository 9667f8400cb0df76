"""Attention over one chunk as one operator of torch: what decides which results are kept sees one call.

A checkpoint that keeps what the operator gave (`models.checkpointing`) does not run it again, so that keys and values
are written, fetched and exchanged once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

#: From query, key, value, sink and latents to out and log-sum-exp.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]], tuple[Tensor, Tensor]]

_library: Any = torch.library.Library("chunkplan", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor[] latents, int call) -> (Tensor, Tensor)"
)

#: What calls under way do, by their numbers: an operator takes tensors and numbers alone.
_calls: dict[int, Attend] = {}
_numbers = count()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, latents: list[Tensor], call: int
) -> tuple[Tensor, Tensor]:
    return _calls[call](query, key, value, sink, latents)


_library.impl("attend", _attend, "CompositeExplicitAutograd")

#: The operator, as modes of torch that look at operators know it.
ATTEND = torch.ops.chunkplan.attend.default


def attend_as_one(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, latents: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """What `attend` gives for the tensors, out and log-sum-exp, or what a checkpoint has kept of that."""
    if not is_in_torch_dispatch_mode():  # nobody looks at operators
        return attend(query, key, value, sink, latents)
    call = next(_numbers)
    _calls[call] = attend
    try:
        out, lse = ATTEND(query, key, value, sink, latents, call)
    finally:
        del _calls[call]
    return out, lse
