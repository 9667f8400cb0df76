"""States of recurrent layers across the borders of chunks: of convolutions, linear attention, and state-space models.

A layer that keeps a state goes on with it through a cache of transformers, here one for each segment of a sequence.
States are assigned and never copied into, so that they stay in the graph: a part gets the gradients of the state that
it left, and gives those of the state that it began with to the part before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.feed.stream import ChunkTensors, padding_tensors
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.parts import decoder_of, layers_of, mixed_seed

#: Of a layer, what kind of state, and the how-manieth of its kind.
Name = tuple[int, str, int]

#: Kinds of states, as attributes of a layer of a cache; and the kind that MiniMax keeps in a cache of its own.
_KINDS, _SUM = ("conv_states", "recurrent_states"), "linear_cache"

#: By which name the modules of transformers call the scan of Mamba's first version.
_SCAN = "mamba_selective_scan"

#: Of this thread: `states` [1, channels, state_size] with which the next scans begin.
_here = local()


@dataclass(frozen=True)
class Border:
    """The states of a segment: those that it began with, leaves of its graph, and those that it left."""

    begun: dict[Name, Tensor]
    left: dict[Name, Tensor]


class StateCache(DynamicCache):
    """A cache of one segment that keeps states, and lets keys and values pass: those are in the `KVStore`.

    `start`: how many tokens of its sequence lie before. `layer`: the one that attends, where several share one.
    """

    layer: int | None = None

    def __init__(self, config: Any, begun: dict[Name, Tensor], start: int) -> None:
        DynamicCache.__init__(self, config=config)  # not that of a model's own kind of cache
        self.linear_cache: list[Tensor] = []
        self._begun, self._start = begun, start
        for index in range(len(self.layers)):
            self.rewind(index)

    def rewind(self, index: int) -> None:
        """Reset a layer to the state that the segment begins with, whether or not it ran."""
        layer: Any = self.layers[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            self.layers[index] = layer = _StateLayer(layer.number_of_states)
        layer.linear_cache = {}
        for (of_layer, kind, number), tensor in self._begun.items():
            if of_layer == index:
                getattr(layer, kind)[number] = tensor
            if of_layer == index and kind != _SUM:
                getattr(layer, f"is_{kind}_initialized")[number] = True
                layer.has_previous_state[number] = True
                layer.device, layer.dtype = tensor.device, tensor.dtype

    def states(self) -> dict[Name, Tensor]:
        """The states that are in it."""
        return {
            (index, kind, number): tensor
            for index, layer in enumerate(self.layers)
            for kind in (*_KINDS, _SUM)
            for number, tensor in getattr(layer, kind, {}).items()
            if tensor is not None
        }

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *given: Any, **how: Any) -> Tensor:
        """Implements `_StateLayer`; the scan of a layer, which comes after its convolution, begins with its state."""
        layer: Any = self.layers[layer_idx]
        begin_scan_with(layer.recurrent_states.get(0))
        full: Tensor = super().update_conv_state(conv_states, layer_idx, *given, **how)
        return full

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The sum of keys times values of a layer of MiniMax."""
        sums: dict[int, Tensor] = vars(self.layers[layer_idx])[_SUM]
        return sums.get(0)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep such a sum."""
        vars(self.layers[layer_idx])[_SUM][0] = linear_cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Keep nothing but which layer it is: attention has a store of its own."""
        self.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """The number of tokens before, though no keys are kept."""
        return self._start

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Queries are where their keys are."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return as many keys as queries."""
        return query_length, 0

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Always true: else a segment of one token would be taken for a step of generation, which works in place."""
        return True


class _StateLayer(LinearAttentionLayer):
    """Assigns states, where that of transformers copies into memory of its own."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before = self.conv_states[state_idx]
        size = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = size
        full = conv_states if before is None else torch.cat([before, conv_states], -1)
        if full.shape[-1] < size:
            full = F.pad(full, (size - full.shape[-1], 0))
        self.conv_states[state_idx] = full[..., -size:]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        self.device, self.dtype = full.device, full.dtype  # type: ignore[assignment]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def run_segments(
    run: Callable[[ChunkTensors, Tensor | None, int | None, StateCache], Tensor],
    model: Any,
    tensors: ChunkTensors,
    store: KVStore,
    inputs: Tensor | None,
    seed: int | None,
) -> tuple[Tensor, tuple[tuple[Span, Border], ...]]:
    """Run a chunk one segment after another: no state may go on from one sequence to the next.

    Returns hidden states [num_tokens, hidden_size] of all, and the states of each part of a split sequence. Raises
    DataError where a part has one token and is not the last one, UsageError with transformers' own checkpointing.
    """
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers_of(model)):
        raise UsageError(
            f"transformers' activation checkpointing of a {model.config.model_type} model leaves out its states",
            hint="leave gradient_checkpointing out, or use `python -m chunkplan_runtime.train --checkpointing full`",
        )
    new_cache, _ = cache_of(decoder_of(model).__class__)
    hidden: list[Tensor] = []
    borders: list[tuple[Span, Border]] = []
    for place, span in enumerate(tensors.spans):
        begun = store.states_before(span)
        begun = {name: state.detach().requires_grad_(torch.is_grad_enabled()) for name, state in begun.items()}
        # One token after a state is taken for a step of generation, which works in place and has no backward.
        is_padded = bool(begun) and span.stop - span.start == 1
        here, spans = slice(span.chunk_start, span.chunk_stop), [span._replace(chunk_start=0)]
        ids, positions, labels = tensors.input_ids[:, here], tensors.position_ids[:, here], tensors.labels[here]
        own_inputs = None if inputs is None else inputs[here]
        if is_padded:  # with a token behind that nobody sees
            more = padding_tensors()
            ids = torch.cat([ids, more.input_ids.to(ids.device)], 1)
            positions = torch.cat([positions, more.position_ids.to(positions.device)], 1)
            labels, spans = torch.cat([labels, more.labels]), [*spans, more.spans[0]._replace(chunk_start=1)]
            own_inputs = None if own_inputs is None else torch.cat([own_inputs, torch.zeros_like(own_inputs)])
        own = ChunkTensors(ids, positions, labels, tuple(spans))
        kept = new_cache(model.config, begun, span.start)
        try:
            out = run(own, own_inputs, None if seed is None else mixed_seed(seed, place), kept)
        finally:
            begin_scan_with(None)
        hidden.append(out[: span.stop - span.start])
        if span.is_split:
            left = kept.states() if span.stop < span.length else {}
            if left and is_padded:
                raise DataError(
                    f"token {span.start} of sequence {span.sequence_id} is a part by itself and not the last one, "
                    "which layers that keep a state cannot run",
                    where="chunks.parquet",
                    hint="build the plan with a larger --chunk-size",
                )
            store.keep_states(span, {name: state.detach() for name, state in left.items()})
            borders.append((span, Border(begun, left)))
    return torch.cat(hidden), tuple(borders)


def is_recurrent(config: Any) -> bool:
    """True if a model has layers that keep a state; or that count the tokens before a call, as Llama 4's do."""
    layers = DynamicCache(config=config).layers
    keeps_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return keeps_state or bool(getattr(config, "attn_temperature_tuning", False))


def keeps_kv(config: Any) -> list[bool]:
    """Flags of layers that keep keys and values: those with a state alone do not."""
    keeps = [True] * int(config.num_hidden_layers)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        keeps[index] = isinstance(layer, DynamicLayer) or not isinstance(layer, LinearAttentionCacheLayerMixin)
    return keeps


@cache
def cache_of(decoder: Any) -> tuple[Any, str]:
    """The class of caches for a class of decoders, with states and of its own kind; by which name that takes one."""
    argument = "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"
    for name, kind in vars(sys.modules[decoder.__module__]).items():
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind is not DynamicCache:
            return type(f"State{name}", (StateCache, kind), {}), argument
    return StateCache, argument


def begin_scan_with(state: Tensor | None) -> None:
    """Start the next scan with a state [1, channels, state_size]; with [1, heads, ...] as many scans (Zamba)."""
    states = () if state is None else (state,) if state.ndim == 3 else state.unbind(1)
    _here.states = list(states)


def continue_scans(model: nn.Module) -> None:
    """Patch the scans of a model to start with the states that `begin_scan_with` gives; all others stay as they are."""
    for code in {type(module).__module__ for module in model.modules()}:
        scan = getattr(sys.modules[code], _SCAN, None)
        if scan is not None and not hasattr(scan, "continues"):
            setattr(sys.modules[code], _SCAN, _continued(scan))


def _continued(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A scan of Mamba's first version that goes on with a state, which the function of transformers cannot.

    It is linear in its state h0: in addition h0 is decayed to each token, exp(A * (dt_1 + ... + dt_t)) * h0, and read
    by C_t (Gu and Dao, arXiv 2312.00752, 3.2). Here A are `rates`, dt `steps`, B `writes` and C `reads`.
    """

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
    """Read a state [1, channels, state_size] at each token: [1, channels, num_tokens].

    `passed`: the steps up to each, summed; `rates` [channels, state_size]; `reads` [1, state_size, num_tokens].
    """
    out = torch.zeros_like(passed)
    for column in range(rates.shape[1]):
        decay = (rates[:, column, None] * passed).exp()
        out = out + reads[:, column, None, :] * decay * state[..., column, None]
    return out
