"""Layers compiled once, for all chunks and all layers alike (torch.compile): a layer is one graph, attention a node.

There is one graph for forwards without gradients, one for those with, and one for backwards, each for any number of
tokens. A layer that makes no whole graph runs as it is, and so does every layer in evaluations, and where something has
to see each function or operator: halves of backwards, and checkpoints that hold some results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from chunkplan.errors import one_line
from chunkplan_runtime.attention.interface import prepare_attention
from chunkplan_runtime.models.model import CausalLM

#: What makes code of graphs; dropout draws what it does elsewhere. A reduction in two directions at once pays for some
#: numbers of tokens, so that there would be graphs for others too.
BACKEND: Mapping[str, Any] = {
    "backend": "inductor",
    "options": {"fallback_random": True, "triton.mix_order_reduction": False},
}


class Refusable:
    """A function that a compiler may refuse on its first call: from then on it runs eagerly, and a note says why."""

    def __init__(self, what: str, why_not: str | None = None) -> None:
        self._what, self.why_not = what, why_not
        self._noted: set[str] = set()

    def run(self, compiled: Callable[..., Any], own: Callable[..., Any], *given: Any, **how: Any) -> Any:
        """Call `compiled`, or, where it was refused, `own`."""
        if self.why_not is None:
            try:
                return compiled(*given, **how)
            except FailOnRecompileLimitHit:
                graphs = "`torch._dynamo.config.recompile_limit` has graphs for"
                self.why_not = f"there are more kinds of layers than {graphs}"
            except TorchDynamoException as error:  # of compiling, before anything has run
                self.why_not = one_line(str(error).strip().partition("\n")[0])
            self.note(self.why_not)
        return own(*given, **how)

    def note(self, why_not: str) -> None:
        """Write one note that says why it runs eagerly."""
        if why_not not in self._noted:
            self._noted.add(why_not)
            print(f"note: {self._what} as they are, not compiled: {why_not}", file=sys.stderr)


class CompiledLayers(Refusable):
    """Compiles the layers of a model from now on; as a string what of it. Some refuse only when first called."""

    def __init__(self, model: CausalLM) -> None:
        # What is compiled is compiled in a step, while links between stages are open. To load what it made, and to time
        # it, a compiler waits for all that the device was given: see `devices.py`.
        has_links = model.stages[0].layers is not None
        model.current.compiles = not has_links  # as the loss of its head is in any other case
        try:
            layers: list[Any] = [layer for part in model.by_stage for layer in part.own_layers.values()]
        except LookupError:
            layers = []
        modules = [module for layer in layers for module in layer.modules()]
        reasons = {
            "a compiler waits for the device, which one of several stages must not do in a step": has_links,
            "its layers keep states": model.is_recurrent,
            "it has no list of layers": not layers,
            "keys and values are made of latents": any(hasattr(each, "expand_kv") for each in modules),
            "layers share keys and values": any(getattr(each, "is_kv_shared_layer", False) for each in modules),
        }
        super().__init__("layers run", next((reason for reason, holds in reasons.items() if holds), None))
        self._num_layers = len(layers)
        for layer in layers if self.why_not is None else ():
            prepare_attention(layer)
            seeded = layer.forward
            *given, own = seeded.args
            compiled = torch.compile(own, fullgraph=True, dynamic=True, **BACKEND)
            layer.forward = partial(seeded.func, *given, partial(self._run_layer, layer, compiled, own))

    def __str__(self) -> str:
        if self.why_not:
            return f"nothing: {self.why_not}"
        return f"{self._num_layers} layers, once for all chunks: the first steps take minutes longer"

    def _run_layer(
        self, layer: Any, compiled: Callable[..., Any], own: Callable[..., Any], *given: Any, **how: Any
    ) -> Any:
        context = layer.chunkplan.context
        is_shared = context is None or context.shared is not None
        if self.why_not is None and layer.training and not is_shared and given[0].shape[1] > 1:
            why_not = _why_not_now(layer.chunkplan)
            if why_not is None:
                return self.run(compiled, own, *given, **how)
            self.note(why_not)
        return own(*given, **how)


def _why_not_now(current: Any) -> str | None:
    """The reason why layers run eagerly in this action, where something has to see what they call."""
    if current.router_loss is not None and current.router_loss.scope != "none":
        return "the load-balancing loss looks at their routers"
    if is_in_torch_dispatch_mode():
        return "checkpoints hold results of their products, in forwards with gradients"
    if torch._C._len_torch_function_stack() > 0:
        return "functions that they call are replaced"
    return None
