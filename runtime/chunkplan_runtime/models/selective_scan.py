"""Lets the scan of Mamba's first version go on with a state, which the function that transformers calls cannot.

The scan is linear in its state: with the state h0 [channels, state_size] before it, it is what it is without, and in
addition h0 decayed to each token, exp(A * (dt_1 + ... + dt_t)) * h0, read by C_t (Gu and Dao, arXiv 2312.00752, 3.2).
Here A are `rates`, dt `steps`, B `writes` and C `reads`. So what transformers calls stays as it is, a kernel or not,
and what the state adds is added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: By which name the modules of transformers call the scan.
_NAME = "mamba_selective_scan"

#: Of this thread: `states` [1, channels, state_size] with which the next scans begin.
_here = local()


def begin_scan_with(state: Tensor | None) -> None:
    """Let the scan of a layer, which comes next, go on with a state [1, channels, state_size].

    With [1, heads, channels, state_size] it is as many scans, as Zamba has them.
    """
    if state is None:
        _here.states = []
    else:
        _here.states = [state] if state.ndim == 3 else list(state.unbind(1))


def continue_scans(model: nn.Module) -> None:
    """Let the scans of a model go on with the states that `begin_scan_with` gives; all others stay as they are."""
    for code in {type(module).__module__ for module in model.modules()}:
        scan = getattr(sys.modules[code], _NAME, None)
        if scan is not None and not hasattr(scan, "continues"):
            setattr(sys.modules[code], _NAME, _continued(scan))


def _continued(scan: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(scan)
    def continued(inputs: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, **how: Any) -> Any:
        found = scan(inputs, steps, rates, writes, reads, **how)
        states: list[Tensor] = getattr(_here, "states", [])
        if not states:
            return found
        state = states.pop(0)
        if how.get("delta_bias") is not None:
            steps = steps + how["delta_bias"].to(steps.dtype)[..., None]
        if how.get("delta_softplus"):
            steps = F.softplus(steps)
        passed = steps.cumsum(-1)  # [1, channels, num_tokens]
        # Kept by autograd, this would be state_size times the activations.
        added = checkpoint(_read, passed, rates, reads, state, use_reentrant=False)
        if how.get("z") is not None:
            added = added * F.silu(how["z"])
        if not how.get("return_last_state"):
            return found + added.to(found.dtype)
        out, last = found
        left = (rates * passed[..., -1:]).exp() * state
        return out + added.to(out.dtype), last + left.to(last.dtype)

    continued.continues = True  # type: ignore[attr-defined]
    return continued


def _read(passed: Tensor, rates: Tensor, reads: Tensor, state: Tensor) -> Tensor:
    """What is read of a state [1, channels, state_size] at each token: [1, channels, num_tokens].

    `passed` [1, channels, num_tokens]: the steps up to a token, summed; `rates` [channels, state_size]; `reads` [1,
    state_size, num_tokens].
    """
    out = torch.zeros_like(passed)
    for column in range(rates.shape[1]):
        decay = (rates[:, column, None] * passed).exp()
        out = out + reads[:, column, None, :] * decay * state[..., column, None]
    return out
