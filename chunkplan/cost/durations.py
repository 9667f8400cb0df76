"""Durations of every action with each chunk on each model stage: the one formula of time, for all models.

Times are whole nanoseconds, so that sums of them are exact and a plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int8Array, Int64Array, IntArray
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import Rates, RecomputeTime
from chunkplan.cost.shape import FULL, AttentionPattern
from chunkplan.layers import split_layers
from chunkplan.operations import BACKWARDS, NOT_KEPT, ON_HOST, OPS

Float64Array = npt.NDArray[np.float64]

#: Times end here, so that sums of a step's fit 64 bits: 104 days, for a chunk.
MOST_NS = 2.0**53


def attention_pairs_of(
    num_tokens: IntArray, prefix_tokens: IntArray, patterns: Sequence[AttentionPattern] = FULL
) -> Float64Array:
    """The pairs (query, key) of segments of `num_tokens` that each see `prefix_tokens` earlier ones; all [n].

    They are those of attention without a mask: L * L for a whole sequence of L tokens, to which its parts add up. A
    causal mask leaves half of them. Where not all attention of a model sees everything (`patterns`), they are those of
    a layer on average: whole numbers too, so that sums of them are exact.
    """
    if tuple(patterns) == FULL:
        tokens = num_tokens.astype(np.float64)
        return tokens * (2.0 * prefix_tokens + tokens)
    start = np.asarray(prefix_tokens, np.float64)
    stop = start + num_tokens
    pairs = np.zeros_like(stop)
    for pattern in patterns:
        pairs = pairs + pattern.share * (_seen(stop, pattern) - _seen(start, pattern))
    whole: Float64Array = np.rint(pairs)
    return whole


def _seen(num_tokens: Float64Array, pattern: AttentionPattern) -> Float64Array:
    """Twice the pairs that a causal mask with a window leaves of whole sequences, [n]."""
    if pattern.window is None:
        return num_tokens * num_tokens
    if pattern.restarts:
        windows = np.floor(num_tokens / pattern.window)
        rest = num_tokens - windows * pattern.window
        in_full: Float64Array = windows * pattern.window**2 + rest * rest
        return in_full
    within: Float64Array = np.minimum(num_tokens, pattern.window)
    return within * (2 * num_tokens - within)


#: How often the host takes the time of a forward's launches for other actions: a backward has about twice as many.
_LAUNCHED = {"backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}

#: See `balance_layers`.
_UNEVEN_GAIN_PARTS = 16


class ChunkTimes(NamedTuple):
    """Times of actions with chunks, in whole nanoseconds (or ticks, see `Simulation`).

    `durations` int64 [num_ops, num_model_stages, n]: of each action by the code of its op, its model stage (virtual
    stage x pp + stage) and its chunk; `link` int64 [n]: of each chunk's way from one stage to another.
    """

    durations: Int64Array
    link: Int64Array


class ExchangeTimes(NamedTuple):
    """Time that a layer waits for other ranks in each chunk, in nanoseconds [n]: in its forward, and in its backward.

    `by_heads`, `by_pages`: of the forward, what a backward waits for again where it runs that again.
    """

    forward: Float64Array
    backward: Float64Array
    by_heads: Float64Array
    by_pages: Float64Array

    def with_again(self, again: RecomputeTime) -> Float64Array:
        """The wait of a backward that recomputes `again` of the forward, [n]."""
        heads, pages = again.exchange
        return self.backward + (heads * self.by_heads + pages * self.by_pages)


def chunk_times(
    num_tokens: IntArray,
    attention_pairs: Float64Array,
    rates: Rates,
    layers: Sequence[int],
    exchange: ExchangeTimes | None = None,
    kept_attention: Int8Array | None = None,
) -> ChunkTimes:
    """The times of chunks; the arguments are those of `durations`."""
    found = durations(num_tokens, attention_pairs, rates, layers, exchange, kept_attention)
    return ChunkTimes(found, link_times(num_tokens, rates))


def durations(
    num_tokens: IntArray,
    attention_pairs: Float64Array,
    rates: Rates,
    layers: Sequence[int],
    exchange: ExchangeTimes | None = None,
    kept_attention: Int8Array | None = None,
) -> Int64Array:
    """Time of each action, int64 [num_ops, num_model_stages, n], by the code of its op (its place in `operations.OPS`).

    Args:
        num_tokens, attention_pairs: [n], of each chunk, sums over its segments.
        layers: of each model stage; the last one has the vocabulary head too.
        exchange: of chunks that ranks share; None where there are none.
        kept_attention: int8 [n], places in `KEPT_ATTENTION`; None: no chunk keeps any.

    A chunk that keeps no activations needs the head only when it is recomputed. A backward is the sum of its halves:
    the gradients of inputs, attention among them, which the previous model stage waits for, and those of the weights of
    layers; that of the head comes with the loss, whose logits are not kept, that of embeddings at the end. Frozen
    weights have none, see `Rates`. Sharded weights are fetched by all ops but the weight half, sharded gradients are
    reduced by the ops that make them: both over one link, one after another. Inputs of layers in host memory are sent
    and fetched over a link of their own. So is attention that is kept there: sent in `forward_kv`, and fetched in
    `recompute`, which then skips it. Transfers overlap with the layer before or after, so layers take at least as long
    as they; head and embeddings hide none of them. And every op takes at least as long as the host takes to launch its
    kernels, which it does while the GPU runs earlier ones.
    """
    times = np.empty((len(OPS), len(layers), num_tokens.size), np.int64)
    tokens = num_tokens.astype(np.float64)
    seen = seen_pairs(rates, tokens, attention_pairs)
    if kept_attention is None:
        kept_attention = np.zeros(num_tokens.size, np.int8)
    is_kept = kept_attention != NOT_KEPT  # [n]
    for model_stage, num_layers in enumerate(layers):
        linear = num_layers * (rates.token * tokens + rates.chunk)
        layer_forward = linear + num_layers * rates.pair * seen + num_layers * rates.mask * tokens
        of_attention = num_layers * rates.backward.pair * seen + num_layers * rates.backward.token * tokens
        first = sum(layers[:model_stage])
        run_again = rates.again_within(first, first + num_layers)
        waits_forward = waits_backward = waits_for_heads = np.zeros_like(tokens)
        if exchange is not None:
            waits_forward = num_layers * exchange.forward
            waits_for_heads = num_layers * exchange.by_heads
            waits_backward = num_layers * exchange.with_again(run_again)
        is_last = model_stage == len(layers) - 1
        head, frozen_head = (rates.head * tokens, rates.frozen_head * tokens) if is_last else (0.0, 0.0)
        frozen = num_layers * (rates.frozen.token * tokens + rates.frozen.chunk) + frozen_head
        again = num_layers * (run_again.token * tokens + run_again.pair * seen + run_again.chunk)
        head_sums = rates.sums.head.token * tokens + rates.sums.head.chunk if is_last else 0.0
        sums = num_layers * rates.sums.layer
        end_sums = (rates.sums.embeddings if model_stage == 0 else 0.0) + head_sums
        backward = 2 * linear + of_attention + again + 2 * head + waits_backward + sums + end_sums - frozen
        half = rates.weight_half
        weights = sums + (linear if half is None else num_layers * (half.token * tokens + half.chunk))
        layer_forward = layer_forward + waits_forward
        by_op = {
            "forward": layer_forward + head,
            "forward_kv": layer_forward,
            "recompute": np.where(is_kept, linear + waits_for_heads, layer_forward) + head,
            "backward": backward,
            "backward_input": backward - weights,
            "backward_weight": weights,
        }
        least = {"backward": rates.gather + rates.reduce, "backward_weight": rates.reduce}
        of_ends = dict.fromkeys(("forward", "recompute"), head)
        of_ends |= dict.fromkeys(("backward", "backward_input"), 2 * head - frozen_head + end_sums)
        on_link = _host_link_ns(tokens, attention_pairs, rates, run_again, kept_attention)
        for op, nanoseconds in by_op.items():
            sent = num_layers * np.maximum(least.get(op, rates.gather), on_link.get(op, 0.0)) + of_ends.get(op, 0.0)
            launched = _LAUNCHED.get(op, 1.0) * rates.launch + (run_again.launch if op in BACKWARDS else 0.0)
            on_host = np.maximum(sent, num_layers * launched)
            times[OPS.index(op), model_stage] = whole_ns(np.maximum(nanoseconds, on_host))
    return times


def seen_pairs(rates: Rates, num_tokens: Float64Array, attention_pairs: Float64Array) -> Float64Array:
    """The pairs that attention takes the time of, [n]: with those of the ramp, which splitting makes more of, and those
    that chunks of several sequences count as: with fewer pairs than one of as many tokens has.
    """
    of_pair, of_token = rates.packed
    is_packed = attention_pairs < num_tokens * num_tokens
    pairs = np.where(is_packed, of_pair * attention_pairs + of_token * num_tokens, attention_pairs)
    return pairs + rates.ramp_queries * _before(num_tokens, attention_pairs)


def _before(num_tokens: Float64Array, attention_pairs: Float64Array) -> Float64Array:
    """Twice the tokens before a chunk, [n], as its pairs tell them of one that is a part of one sequence."""
    before: Float64Array = np.maximum(attention_pairs / np.maximum(num_tokens, 1) - num_tokens, 0)
    return before


def _host_link_ns(
    tokens: Float64Array, attention_pairs: Float64Array, rates: Rates, again: RecomputeTime, kept_attention: Int8Array
) -> dict[str, Float64Array]:
    """Busy time of the host link for a layer, by op, where inputs of layers or attention are in host memory: [n] each.

    Offloaded keys and values come over the same link: those of the prefix, which the attention pairs tell of a chunk
    that is one part of a sequence. A recompute that does not run attention needs none of them. Where nothing else is on
    the link, attention hides them.
    """
    on_host = kept_attention == ON_HOST  # [n]
    if not again.host and not on_host.any():
        return {}
    prefix = _before(tokens, attention_pairs) / 2
    of_attention = np.where(on_host, rates.host_attention * tokens, 0.0)
    inputs, (kv, with_gradients) = again.host * tokens, (each * prefix for each in rates.host_kv)
    kept = inputs + of_attention
    found = {
        "forward_kv": np.where(on_host, of_attention + kv, 0.0),
        "recompute": np.where(kept_attention == NOT_KEPT, inputs + kv if again.host else 0.0, kept),
    }
    if again.host:
        backward = inputs + with_gradients
        found |= {"forward": inputs + kv, "backward": backward, "backward_input": backward}
    return found


def work_ns(cost: CostModel, num_tokens: IntArray, attention_pairs: Float64Array) -> Int64Array:
    """Time of a forward and a backward through all model stages, without overhead and recompute; both [n].

    The ramp of attention is overhead: without it parts take together as long as their sequence.
    """
    rates, tokens = cost.rates, num_tokens.astype(np.float64)
    num_layers = cost.shape.num_layers
    forward, backward = rates.of_work(tokens, attention_pairs)
    again = num_layers * (rates.again.token * tokens + rates.again.pair * attention_pairs)
    everything = num_layers * forward + num_layers * backward + again + rates.trained_head * tokens
    return whole_ns(everything - num_layers * rates.frozen.token * tokens)


def forward_work_ns(cost: CostModel, num_tokens: IntArray, attention_pairs: Float64Array) -> Int64Array:
    """The forward in `work_ns`, both [n]."""
    tokens = num_tokens.astype(np.float64)
    forward, _ = cost.rates.of_work(tokens, attention_pairs)
    return whole_ns(cost.shape.num_layers * forward + cost.rates.head * tokens)


def whole_pairs(cost: CostModel, num_tokens: IntArray) -> Float64Array:
    """The attention pairs of whole sequences of `num_tokens` in the model of `cost`, see `attention_pairs_of`; [n]."""
    return attention_pairs_of(num_tokens, np.zeros_like(num_tokens), cost.shape.attention_patterns)


def recompute_ns(
    cost: CostModel, num_tokens: IntArray, attention_pairs: Float64Array, *, keeps_attention: bool = False
) -> Int64Array:
    """Time of what is recomputed of segments whose chunks keep no activations, without overhead; both [n].

    That is a forward through all layers, but for attention where chunks keep that: the head is left out the first time,
    see `durations`.
    """
    if keeps_attention:
        return whole_ns(cost.shape.num_layers * cost.rates.token * num_tokens.astype(np.float64))
    tokens = num_tokens.astype(np.float64)
    forward, _ = cost.rates.of_work(tokens, seen_pairs(cost.rates, tokens, attention_pairs))
    return whole_ns(cost.shape.num_layers * forward)


def link_times(num_tokens: IntArray, rates: Rates) -> Int64Array:
    """Time of each chunk's way from one stage to the next, int64 [n]."""
    return whole_ns(rates.link + rates.link_token * num_tokens.astype(np.float64))


def whole_ns(nanoseconds: Float64Array) -> Int64Array:
    """Rounded, and no longer than sums allow."""
    return np.rint(np.minimum(nanoseconds, MOST_NS)).astype(np.int64)


def balance_layers(cost: CostModel, num_model_stages: int, pairs_per_token: float) -> tuple[int, ...]:
    """The layers of each model stage with which the slowest takes least, by the forward and backward of a token.

    The last one has the vocabulary head besides, which takes as long as several layers, and so has fewer. (Looking up
    embeddings takes the first one next to nothing.) `pairs_per_token`: attention pairs, on average over the data. They
    are as even as possible unless uneven ones make the slowest stage faster by one part in `_UNEVEN_GAIN_PARTS`: beside
    long chunks the head is negligible, and stages with more layers are slowest.
    """
    rates, num_layers = cost.rates, cost.shape.num_layers
    if num_model_stages == 1:
        return (num_layers,)
    of_backward = rates.backward
    forward, again = (each.token + each.pair * pairs_per_token for each in (rates, rates.again))
    backward = 2 * rates.token + of_backward.pair * pairs_per_token + of_backward.token
    layer = forward + rates.mask + backward + again - rates.frozen.token
    head = rates.trained_head / layer  # in layers
    others = num_model_stages - 1

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // others), last + head)

    even = split_layers(num_layers, num_model_stages)
    last = min(range(even[-1], 0, -1), key=slowest)
    pays = slowest(last) * (1 + 1 / _UNEVEN_GAIN_PARTS) < max(even[0], even[-1] + head)
    return (*split_layers(num_layers - last, others), last) if pays else even
