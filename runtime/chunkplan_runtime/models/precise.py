"""Makes what transformers computes in float32 whatever the dtype of the model compute in float64.

Norms, rotary embeddings, the routers of mixtures and transformers' own plain attention do so. Rounding to float32 turns
a difference in the last bit of a float64 into one a billion times larger whenever it crosses a rounding border, so that
the error of a comparison would be that of float32 now and then. Comparing in float64 throughout hides nothing of what
chunking does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Ends of the names of modules that compute in float32.
_MODULES = ("RMSNorm", "RotaryEmbedding", "Router", "Attention")


@contextmanager
def evaluate_in_float64(model: nn.Module) -> Iterator[None]:
    """Within the block, norms, rotary embeddings, routers and attention run in float64; weights stay as they are."""
    changed = []
    for module in model.modules():
        if type(module).__name__.endswith(_MODULES):
            module.forward = partial(_in_float64, module.forward)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _in_float64(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with _Float64():
        return forward(*arguments, **keywords)


class _Float64(TorchFunctionMode):
    """Reads float32 as float64 wherever a dtype is asked for."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = [torch.float64 if argument is torch.float32 else argument for argument in args]
        kwargs = {name: torch.float64 if given is torch.float32 else given for name, given in (kwargs or {}).items()}
        return function(*args, **kwargs)
