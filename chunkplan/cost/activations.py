"""Bytes that a chunk in flight holds per token of each layer on one GPU, by level of activation checkpointing.

Counted from shapes: what the backward of a Hugging Face decoder layer with a fused attention kernel reads, each tensor
once, however many read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from chunkplan.cost.checkpointing import CHECKPOINTINGS, Checkpointing
from chunkplan.cost.fused import fuses_gate, fuses_norms
from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import GRADIENT_BYTES
from chunkplan.cost.shape import Layer

#: Norms and the log-sum-exp of attention are in float32.
_FLOAT32 = 4

#: Bytes of a token id and of a position.
_ID_BYTES = 4

#: Of each expert that a token goes to: its place, weight and order among the tokens of that expert, in 32 and 64 bits.
_ROUTED_BYTES = 48

#: A gradient is as long as the numbers it belongs to, so a layer's backward holds at once those of the MLP (3 widths
#: where it is gated, else 2) and of what goes in and out, in elements of each width.
_GRADIENTS_OF_HIDDEN = 2


#: Layers that follow one another, of one kind and with one level of activation checkpointing, and how many they are.
LayerRun = tuple[Layer, Checkpointing, int]


def runs_of(cost: CostModel, layers: Sequence[int]) -> list[list[LayerRun]]:
    """The runs of layers of model stages with so many `layers` each, first to last."""
    shape = cost.shape
    rest = iter(zip((shape.kinds[place] for place in shape.order), cost.levels, strict=True))
    own = ([next(rest) for _ in range(count)] for count in layers)
    return [[(*same, len(list(run))) for same, run in groupby(of_stage)] for of_stage in own]


def activation_bytes_per_token(cost: CostModel, layer: Layer, level: Checkpointing | None = None) -> float:
    """Bytes per token of a layer on one GPU for a chunk that keeps its activations.

    `level`: of the layer, None: that of the first one. What it holds by the level is in docs/cost-model.md. With
    adapters there is less of norms, and what lies between two matrices of an adapter, see `Adapters.activation_bytes`.
    Sequence parallelism shards all of it over the `tp` GPUs.
    """
    level = level or cost.levels[0]
    if level == "none":
        return _everything(cost, layer) / cost.tp
    if level == "offload":
        return 0.0
    held: float = cost.shape.hidden_size * cost.num_bytes
    if level != "full":
        held += layer.output_width * cost.num_bytes + _FLOAT32 * layer.num_query_heads
    if level in ("keep-products", "keep-projections"):
        held += _of_projections(cost, layer)
    if level == "keep-products":
        held += _of_mlp(cost, layer)
    return held / cost.tp


def _everything(cost: CostModel, layer: Layer) -> float:
    """Bytes that a backward reads, for h, q, kv and i elements of hidden size, queries, keys, and MLP:

    two norms: the input in float32, the normalised input, the output that projections read   2 (4 bytes + 2) h
    norms of queries, keys or latents: the same, but for outputs that nothing reads           (4 bytes + 1) normed
    queries and keys after rotary embedding, values                                           q + 2 kv
    attention: its output, which the projection reads too; a float32 a head                   q
    gate, its activation, up, and their product, which the projection reads                   4 i
    of a mixture: each expert's input and output; scores of all, in float32                   2 h an expert
    of a recurrent layer, of latents and of gates: what `mixed_width` counts

    An MLP without a gate has 2 i, and layers may have one norm or four. Each norm adds a float32 per token, and if it
    multiplies by its weights in float32 (Gemma, OLMo), the normalised input is float32 too. A fused norm reads its
    plain input alone; of four norms, projections read the output of two. A fused gate recomputes its activation.
    """
    num_bytes, hidden_size = cost.num_bytes, cost.shape.hidden_size
    normed, made = num_bytes, min(layer.num_norms, 2)
    if not fuses_norms(cost.kernels, layer):
        normed, made = _FLOAT32 + (_FLOAT32 if layer.wide_norms else num_bytes), layer.num_norms
    norms = layer.num_norms * (hidden_size * normed + _FLOAT32) + made * hidden_size * num_bytes
    if layer.normed_width:
        norms += layer.normed_width * normed + _FLOAT32 * (layer.num_query_heads + layer.num_kv_heads)
    norms += cost.adapters.activation_bytes(layer)
    widths = layer.query_width + layer.key_width + layer.value_width + layer.output_width + layer.mixed_width
    attention = widths * num_bytes + _FLOAT32 * layer.num_query_heads
    held = 4 - fuses_gate(cost.kernels, layer) if layer.is_gated else 2
    mlp = (held * layer.mlp_width + 2 * layer.experts_per_token * hidden_size) * num_bytes
    return norms + attention + mlp + _of_router(cost, layer)


def _of_router(cost: CostModel, layer: Layer) -> int:
    """Bytes of a router: its input in float32, the scores before and after normalization, and the routing of tokens."""
    read = layer.router_width if cost.num_bytes < _FLOAT32 else 0
    return _FLOAT32 * (read + 2 * layer.num_experts) + _ROUTED_BYTES * layer.experts_per_token


def _of_projections(cost: CostModel, layer: Layer) -> float:
    """Outputs of the mixer's products, except those that expand latents: q + 2 kv, and the output h.

    Gates add half of `mixed_width`, the other half being outputs of norms and products; latents the inputs of their
    norms; recurrent mixers all inputs and outputs of their matrices, which have the hidden size on one side.
    """
    latents = layer.latent_width
    made = layer.query_width + (latents or layer.key_value_width) + cost.shape.hidden_size
    if layer.state_elements:
        around = layer.query_width + layer.key_value_width + layer.output_width
        made += max(0, layer.mixer_parameters // cost.shape.hidden_size - around)
    else:
        made += layer.normed_width if latents else layer.mixed_width // 2
    return (made if layer.mixer_parameters else 0) * cost.num_bytes + cost.adapters.between_bytes(layer)


def _of_mlp(cost: CostModel, layer: Layer) -> float:
    """Results of the products of an MLP, 2 i or without a gate i; of the last one where a norm or weights of experts
    are behind it; and of the router."""
    hidden_size = cost.shape.hidden_size
    made = (1 + layer.is_gated) * layer.mlp_width + layer.experts_per_token * hidden_size
    if layer.mlp_width and (layer.num_norms > 2 or layer.wide_norms):
        made += hidden_size
    return made * cost.num_bytes + _FLOAT32 * layer.num_experts


def _around_bytes(cost: CostModel, *, is_first: bool, is_last: bool, level: Checkpointing) -> float:
    """Bytes per token around the layers of a model stage on one GPU for a chunk that keeps its activations.

    That are token ids, or the hidden states that come from the stage before, unless the first layer, of `level`, keeps
    them; positions and their rotary embeddings; and on the last stage what the final norm reads and makes.
    """
    shape, [layer, *_] = cost.shape, cost.shape.kinds
    came = shape.hidden_size * cost.num_bytes if level in ("none", "offload") else 0
    held = _ID_BYTES + 2 * layer.query_width / max(layer.num_query_heads, 1) * cost.num_bytes
    held += _ID_BYTES if is_first else came
    if is_last:
        normed = cost.num_bytes
        if not fuses_norms(cost.kernels, layer):
            normed = _FLOAT32 + (0 if cost.lora_rank else _FLOAT32 if layer.wide_norms else cost.num_bytes)
        held += shape.hidden_size * (normed + cost.num_bytes) + _FLOAT32
    return held / cost.tp


def around_of_stages(cost: CostModel, layers: Sequence[int]) -> list[float]:
    """Bytes of a retained token around the layers of each model stage."""
    last = len(layers) - 1
    return [
        _around_bytes(cost, is_first=not stage, is_last=stage == last, level=level)
        for stage, [(_, level, _), *_] in enumerate(runs_of(cost, layers))
    ]


def pending_bytes_per_token(cost: CostModel, layer: Layer) -> float:
    """Bytes per token of a layer between the halves of its backward, on one GPU.

    That are the inputs of its products with weights and the gradients of what these make, in the elements of
    `activation_bytes_per_token`, whatever the activation checkpointing:

        attention: h, its output; q + 2 kv of gradients, h                                 2 h + 2 q + 2 kv
        MLP: h, the product that the last projection reads; 2 i of gradients, h            2 h + 3 i
        of a mixture: each expert's input and the gradient of its output                   2 h an expert
        of a recurrent layer, of latents and of gates: no more than `mixed_width`

    A layer that has one of both, or both side by side, has one norm, and 2 h in place of 4 h. With adapters it is their
    inputs and gradients, see `Adapters.pending_bytes`.
    """
    hidden_size = cost.shape.hidden_size
    widths = layer.query_width + layer.key_width + layer.value_width + layer.output_width + layer.mixed_width
    mlp = (3 if layer.is_gated else 2) * layer.mlp_width + 2 * layer.experts_per_token * hidden_size
    held = (2 * min(layer.num_norms, 2) * hidden_size + widths + mlp) * cost.num_bytes
    return (held + cost.adapters.pending_bytes(layer)) / cost.tp


def working_bytes_per_token(cost: CostModel, layer: Layer, level: Checkpointing) -> float:
    """Bytes per token that the backward of one layer needs beside kept activations, with the layer's own recompute.

    With tensor parallelism the tokens of a chunk are gathered for a projection: one input whole. Of layers whose inputs
    are in host memory two inputs are there: of the layer at work, and of the next one.
    """
    gathered = cost.shape.hidden_size if cost.tp > 1 else 0
    again = 0.0
    if level != "none":
        everything, at_least, held = (
            activation_bytes_per_token(cost, layer, each) for each in (CHECKPOINTINGS[0], "full", level)
        )
        again = max(0.0, everything + at_least - held) + (at_least if level == "offload" else 0.0)
    # Of keys and values that are made of latents, as of their gradients, which are in float32 and in both dtypes.
    made = layer.expanded_width / cost.tp * (2 * cost.num_bytes + GRADIENT_BYTES)
    return _gradients_per_token(cost, layer) + gathered * cost.num_bytes + made + again


def page_line(cost: CostModel, layer: Layer, num_tokens: int) -> tuple[float, float]:
    """Extra memory of the backward of attention over that of the MLP, for `num_tokens` queries and a page of keys.

    Returns bytes, often below 0, and bytes per token of the page. The MLP is counted in `working_bytes_per_token`. Per
    query: gradients of the layer's input and output; its own, as a kernel returns it and summed in float32; those of
    its keys and values, likewise. Per token of the page: gradients of its keys and values for each head of queries, as
    kernels make them, and their sums in float32. Those of latents are counted where they are expanded.
    """
    num_bytes, key_values = cost.num_bytes, layer.key_value_width
    of_query = (cost.shape.hidden_size + layer.output_width + layer.query_width + key_values) * num_bytes
    of_query += (layer.query_width + key_values * (1 + cost.kv_offload)) * GRADIENT_BYTES
    of_page = 0
    if key_values and not layer.expanded_width:
        of_page = (layer.query_width + layer.output_width) * num_bytes + key_values * GRADIENT_BYTES
    of_queries = num_tokens * (of_query / cost.tp - _gradients_per_token(cost, layer))
    return of_queries, of_page / cost.tp


def _gradients_per_token(cost: CostModel, layer: Layer) -> float:
    """Bytes of gradients of an MLP's results and of a layer's input and output, see `_GRADIENTS_OF_HIDDEN`."""
    gradients = (2 + layer.is_gated) * layer.mlp_width + _GRADIENTS_OF_HIDDEN * cost.shape.hidden_size
    return gradients * cost.num_bytes / cost.tp
