"""Resident tokens of a stage by kind, and the bytes of a token of each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from chunkplan.cost.activations import LayerRun, activation_bytes_per_token, pending_bytes_per_token
from chunkplan.cost.checkpointing import attention_bytes
from chunkplan.cost.durations import Float64Array
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import Layer, Layers

#: Gradients of keys and values are sums over all later chunks, kept in float32.
KV_GRADIENT_BYTES = 4

#: A page of keys and values has room for as many chunks.
PAGE_CHUNKS = 4

#: States of recurrent layers are float32, as the kernels leave them.
_STATE_BYTES = 4


class ResidentTokens(NamedTuple):
    """Tokens that a stage holds something of, in the order of `schedule.holdings`.

    `activations`: whose activations are there, counted once for each virtual stage that has them. `inputs`: of chunks
    whose KV and input alone are held, counted likewise. `kv`: of split sequences whose keys and values are held; a
    layer with a window keeps all of them too, and a recurrent one a state for each ChunkSize of them. `pending`:
    between the halves of their backward. `attention`: of chunks that keep it on the GPU until their recompute, counted
    likewise. `attention_on_host`: the same in host memory, the most at any moment, as no GPU's memory depends on it.
    `last_layer`: of whose activations one layer's are left. `kv_gradients`: those of `kv` for which all layers have
    gradients; for the others one layer is counted, as when the first backward of a sequence begins.
    """

    activations: int = 0
    inputs: int = 0
    kv: int = 0
    pending: int = 0
    attention: int = 0
    attention_on_host: int = 0
    last_layer: int = 0
    kv_gradients: int = 0


class TokenBytes(NamedTuple):
    """Bytes of a token on a GPU of a stage, by the kinds of `ResidentTokens`, but for gradients of keys.

    `activations`: for each virtual stage that retains them. `inputs`: of a saved input, likewise. `kv`: of keys and
    values (0 where they are offloaded), and of the states that recurrent layers keep for each ChunkSize. `pending`:
    between the halves of a backward, by how much it is more than activations at most: the half for inputs comes to the
    last layers first. `last_layer`: of the activations of the first layer, to which a backward comes last.
    """

    activations: float
    inputs: float
    kv: float
    pending: float
    attention: float
    attention_on_host: float
    last_layer: float


class MemoryRates(NamedTuple):
    """Coefficients of the part of a stage's memory that changes during a step, in bytes on a GPU.

    `tokens` [pp, 7]: of a token of each kind, see `TokenBytes`. `gradients` [pp, n, 3] of keys and values: of n kinds
    of layers `KeyGradients`, in bytes. What k tokens of keys and values bring with them in the layer at work: `pages`
    [pp, n, 2], of any kind a + b min(k, `page_tokens`) with a and b, where that is above 0; and `exchanged` [3], c, or
    where that is more d for each of the first `chunk_size` and e for each of as many more.
    """

    tokens: Float64Array
    gradients: Float64Array
    pages: Float64Array
    page_tokens: int
    exchanged: Float64Array
    chunk_size: int


def token_bytes(
    cost: CostModel, own: Sequence[Sequence[LayerRun]], chunk_size: int, around: Sequence[float] | None = None
) -> TokenBytes:
    """Bytes of a token on a GPU of a stage whose virtual stages have the layers `own`, with what each holds `around`
    its layers (None: nothing)."""
    activations = [
        [count * activation_bytes_per_token(cost, layer, level) for layer, level, count in layers] for layers in own
    ]
    on_stage = without_levels(own)
    pending = 0.0
    for layers, held in zip(own, activations, strict=True):
        more = [
            count * pending_bytes_per_token(cost, layer) - of_run
            for (layer, _, count), of_run in zip(layers, held, strict=True)
        ]
        pending = max(pending, *accumulate(reversed(more)))
    retained = (sum(held) + more for held, more in zip(activations, around or [0.0] * len(own), strict=True))
    kv = 0.0 if cost.kv_offload else kv_elements_per_token(cost, on_stage) * cost.num_bytes
    return TokenBytes(
        activations=max(retained),
        inputs=cost.shape.hidden_size * cost.num_bytes / cost.tp,
        kv=kv + state_bytes(cost, on_stage) / chunk_size,
        pending=pending,
        attention=max(kept_attention_bytes(cost, own)),
        attention_on_host=0.0,
        last_layer=max(activation_bytes_per_token(cost, layer, level) for (layer, level, _), *_ in own),
    )


def kept_attention_bytes(cost: CostModel, own: Sequence[Sequence[LayerRun]]) -> list[float]:
    """Bytes on a GPU per token that keeps attention, for each virtual stage with the layers `own`."""
    sizes = ([count * attention_bytes(layer, cost.num_bytes) for layer, _, count in layers] for layers in own)
    return [sum(each) / cost.tp for each in sizes]


class KeyGradients(NamedTuple):
    """Elements per token of keys and values, in all layers of a kind and in one, and the most tokens with gradients at
    once (inf: all)."""

    of_all: float
    of_one: float
    most_tokens: float


def key_gradients(cost: CostModel, layers: Layers, chunk_size: int, pp: int) -> list[KeyGradients]:
    """The `KeyGradients` of the kinds of layers on one of `pp` stages.

    A page has gradients from when a backward first sees it until its own first chunk is done. With a window these are
    the page of the chunk at work, and those before it that the window reaches. On a pipeline several sequences may be
    under way, so that nothing is left out there.
    """
    page_tokens = PAGE_CHUNKS * chunk_size
    found = []
    for layer, count in layers:
        of_one = layer.cached_width / cost.tp
        reached = layer.window if pp == 1 else None
        most = math.inf if reached is None else page_tokens * (1 + -(-reached // page_tokens))
        found.append(KeyGradients(count * of_one, of_one, most))
    return found


def without_levels(own: Sequence[Sequence[LayerRun]]) -> list[tuple[Layer, int]]:
    """The layers of some virtual stages, and how many there are of each."""
    return [(layer, count) for layers in own for layer, _, count in layers]


def kv_elements_per_token(cost: CostModel, layers: Layers) -> float:
    """Elements per token in the pages of some layers, on one GPU."""
    return sum(count * layer.cached_width for layer, count in layers) / cost.tp


def state_bytes(cost: CostModel, layers: Layers) -> float:
    """Bytes of the states of some layers at the end of a part of a sequence, on one GPU."""
    return sum(count * layer.state_elements for layer, count in layers) * _STATE_BYTES / cost.tp
