"""Peak memory of a GPU on each pipeline stage, part by part, in bytes.

An estimate from the tensors that are known to be there; what a framework holds beside them is
`Hardware.reserved_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from chunkplan.cost.activations import (
    activation_bytes_per_token,
    around_of_stages,
    page_line,
    runs_of,
    working_bytes_per_token,
)
from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import tokens_at_once
from chunkplan.cost.states import held_states, product_gradient_bytes, stage_parameters
from chunkplan.cost.token_bytes import (
    KV_GRADIENT_BYTES,
    PAGE_CHUNKS,
    KeyGradients,
    MemoryRates,
    ResidentTokens,
    TokenBytes,
    key_gradients,
    kv_elements_per_token,
    state_bytes,
    token_bytes,
    without_levels,
)
from chunkplan.layers import STRAIGHT, StagePlacement, last_stage, stage_parts

#: Where keys and values are in host memory, a GPU has room for two pages of one layer: at work, and on its way. Of
#: recurrent states it has those that a chunk begins with and those that it makes.
_OFFLOAD_PAGES = 2
_OFFLOAD_STATES = 2


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one GPU of a stage; `reserved` is taken before the model is loaded.

    Where a step is fullest at its end, `gradients` is what they take then, less what all else has given back by then.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    stage_inputs: int
    kept_attention: int
    kv: int
    kv_gradients: int
    exchanged: int
    logits: int
    reserved: int

    @property
    def total(self) -> int:
        """The bytes of all parts together."""
        parts: dict[str, int] = vars(self)
        return sum(parts.values())


def stage_memory(
    cost: CostModel,
    *,
    dp: int,
    layers: Sequence[int],
    held: Sequence[ResidentTokens],
    chunk_size: int,
    shared_by: int = 1,
    kv_gradient_bytes: int = KV_GRADIENT_BYTES,
    placement: StagePlacement = STRAIGHT,
) -> tuple[StageMemory, ...]:
    """Memory of a GPU of each stage with the tokens `held`, part by part.

    Args:
        layers: of each model stage, see `stage_parameters`.
        held: of each stage; there are as many as it has entries. Where keys and values are offloaded, a GPU holds two
            pages of one layer, whatever the sequences; on one stage states of recurrent layers are offloaded too.
        shared_by: how many ranks share a sequence at most, in the way that needs most memory, see `exchange_bytes`.
        kv_gradient_bytes: of a number in the gradients of keys and values.
        placement: where model stages lie.
    """
    pp, stages = len(held), []
    for tokens, own in zip(held, _stages_of(cost, dp, pp, tuple(layers), chunk_size, placement), strict=True):
        of_states = tokens.kv / chunk_size * own.state_bytes
        kv_elements = tokens.kv * own.kv_elements
        others = tokens.kv - tokens.kv_gradients
        gradients = sum(each.of_all * min(tokens.kv_gradients, each.most_tokens) for each in own.key_gradients)
        gradients += max(each.of_one * min(others, each.most_tokens) for each in own.key_gradients)
        if cost.kv_offload:
            kv_elements = gradients = _OFFLOAD_PAGES * PAGE_CHUNKS * chunk_size * own.widest_kv
            if pp == 1:
                of_states = min(of_states, _OFFLOAD_STATES * own.state_bytes)
        # A backward of attention to the first page, in the layer that needs most.
        page_tokens = min(tokens.kv, PAGE_CHUNKS * chunk_size)
        first_page = max([0.0, *(fixed + of_key * page_tokens for fixed, of_key in own.pages if tokens.kv)])
        of_token = own.token_bytes
        activations = tokens.activations * of_token.activations + tokens.last_layer * of_token.last_layer
        found = StageMemory(
            weights=own.weights,
            gradients=own.gradients,
            optimizer=own.optimizer,
            activations=ceil(activations + own.working_bytes) + ceil(tokens.pending * of_token.pending),
            stage_inputs=ceil(tokens.inputs * of_token.inputs),
            kept_attention=ceil(tokens.attention * of_token.attention),
            kv=ceil(kv_elements * cost.num_bytes + of_states),
            kv_gradients=ceil(gradients * kv_gradient_bytes + first_page),
            exchanged=ceil(_exchanged(cost, chunk_size, tokens.kv, shared_by, kv_gradient_bytes)),
            logits=own.logits,
            reserved=cost.hardware.reserved_bytes,
        )
        # The first page of a sequence is there until all of its chunks are done.
        of_pages = found.kv + found.kv_gradients
        if not cost.kv_offload:
            of_pages = ceil(page_tokens * own.kv_elements * (cost.num_bytes + kv_gradient_bytes))
        states = found.weights + found.gradients + found.optimizer + found.reserved
        given_back = found.total - states - of_pages
        stages.append(replace(found, gradients=max(found.gradients, own.at_end - given_back)))
    return tuple(stages)


class _Stage(NamedTuple):
    """Memory of a GPU of a stage that does not depend on its chunks, in bytes; and bytes per token, see `token_bytes`.

    `at_end`: of gradients, and of the layer at work, when the last gradients of a step are reduced, see
    `held_states`. `working_bytes`: of the layer at work, beside what chunks keep. `kv_elements`: what pages keep of a
    token; `widest_kv`: of the layer that keeps most. `state_bytes`: of states where a part of a sequence ends.
    `key_gradients` and `pages`: of each kind of layers, see `KeyGradients` and `page_line`.
    """

    weights: int
    gradients: int
    at_end: int
    optimizer: int
    working_bytes: float
    logits: int
    token_bytes: TokenBytes
    kv_elements: float
    widest_kv: float
    state_bytes: float
    key_gradients: tuple[KeyGradients, ...]
    pages: tuple[tuple[float, float], ...]


@lru_cache(maxsize=1 << 12)  # `tune` asks for the memory of a few thousand configurations, of each dozens of times
def _stages_of(
    cost: CostModel, dp: int, pp: int, layers: tuple[int, ...], chunk_size: int, placement: StagePlacement
) -> tuple[_Stage, ...]:
    stages = []
    split = stage_parts(runs_of(cost, layers), pp, placement)
    around = stage_parts(around_of_stages(cost, layers), pp, placement)
    for stage, weights in enumerate(stage_parameters(cost, pp, layers, placement)):
        own = split[stage]
        on_stage = without_levels(own)
        kinds = [(layer, sum(count for other, count in on_stage if other == layer)) for layer in dict(on_stage)]
        at_work = max(
            working_bytes_per_token(cost, layer, level)
            for layer, level in {(layer, level) for part in own for layer, level, _ in part}
        )
        working_bytes = chunk_size * at_work + product_gradient_bytes(cost, dp, on_stage)
        logits_bytes = _logits_bytes(cost, chunk_size) if stage == last_stage(pp, placement) else 0.0
        states = held_states(cost, dp, on_stage, weights, working_bytes + logits_bytes)
        kept = max(activation_bytes_per_token(cost, layer, level) for part in own for layer, level, _ in part)
        at_end = states.at_end + chunk_size * kept if states.at_end else 0.0
        stages.append(
            _Stage(
                weights=ceil(states.weights),
                gradients=ceil(states.gradients),
                at_end=ceil(at_end + working_bytes),
                optimizer=ceil(states.optimizer),
                working_bytes=working_bytes,
                logits=ceil(logits_bytes),
                token_bytes=token_bytes(cost, own, chunk_size, around[stage]),
                kv_elements=kv_elements_per_token(cost, on_stage),
                widest_kv=max(layer.cached_width for layer, _ in on_stage) / cost.tp,
                state_bytes=state_bytes(cost, on_stage),
                key_gradients=tuple(key_gradients(cost, kinds, chunk_size, pp)),
                pages=tuple(page_line(cost, layer, chunk_size) for layer, _ in kinds),
            )
        )
    return tuple(stages)


@lru_cache(maxsize=1 << 12)
def split_gradient_bytes(
    cost: CostModel, *, dp: int, pp: int, layers: tuple[int, ...], placement: StagePlacement = STRAIGHT
) -> tuple[int, ...]:
    """Extra gradient bytes on a GPU of each stage where backwards are split: 0 unless gradients are sharded.

    The weight half of a backward has those of its virtual stage whole, in the dtype of the weights, before it reduces
    them a layer at a time. `layers` and `placement` as in `stage_parameters`.
    """
    if dp == 1 or not cost.shares("gradients"):
        return (0,) * pp
    trained = cost.adapters.trained_parameters
    return tuple(
        ceil(max(sum(trained(layer) * count for layer, count in part) for part in own) / cost.tp * cost.num_bytes)
        for own in stage_parts(cost.shape.split(layers), pp, placement)
    )


def exchange_bytes(
    cost: CostModel,
    num_tokens: int,
    page_tokens: tuple[int, int],
    heads: int,
    pages: int,
    kv_gradient_bytes: int = KV_GRADIENT_BYTES,
) -> float:
    """Buffers for exchange on one GPU in the layer that needs most; 0 where no rank shares anything.

    By heads, of the rank's slice of a chunk, `num_tokens` long: its queries, keys and values, or their gradients, as
    they are sent and as they come. For q and kv elements of a token: 2 num_tokens (q + 2 kv) b bytes.

    By pages, of which this rank has `page_tokens` of the one at work and of the next one, in a backward: from n groups
    the keys and values of the first in the order of the sequence; their gradients, twice as they are sent, and those
    that come; and of the next one its own and what is on its way. For e elements of a token:
    first (n b + (2 n + 1) w) e + next (n + 1) b e bytes. Forwards hold less.
    """
    by_heads, by_pages = 0.0, 0.0
    if heads > 1:
        widest = max(layer.query_width + layer.key_value_width for layer in cost.shape.kinds)
        by_heads = 2 * num_tokens * widest / cost.tp * cost.num_bytes
    if pages > 1:
        first, following = page_tokens
        at_work = pages * cost.num_bytes + (2 * pages + 1) * kv_gradient_bytes
        coming = (pages + 1) * cost.num_bytes
        by_pages = (
            (first * at_work + following * coming) * max(layer.cached_width for layer in cost.shape.kinds) / cost.tp
        )
    return max(by_heads, by_pages)


@lru_cache(maxsize=1 << 12)
def memory_rates(
    cost: CostModel,
    pp: int,
    layers: tuple[int, ...],
    chunk_size: int,
    *,
    shared_by: int = 1,
    placement: StagePlacement = STRAIGHT,
) -> MemoryRates:
    """The `MemoryRates` of stages; arguments as in `stage_memory`, of which these are the variable part."""
    stages = _stages_of(cost, 1, pp, layers, chunk_size, placement)
    num_kinds = max(len(stage.pages) for stage in stages)
    gradients, pages = np.zeros((pp, num_kinds, 3)), np.zeros((pp, num_kinds, 2))
    for place, stage in enumerate(stages):
        pages[place, : len(stage.pages)] = stage.pages
        if not cost.kv_offload:
            gradients[place, : len(stage.pages)] = stage.key_gradients
    gradients[:, :, :2] *= KV_GRADIENT_BYTES
    by_heads = 1 if cost.shape.keeps_latents else shared_by
    exchanged = (
        exchange_bytes(cost, chunk_size, (0, 0), by_heads, 1),
        exchange_bytes(cost, chunk_size, (1, 0), 1, shared_by),
        exchange_bytes(cost, chunk_size, (0, 1), 1, shared_by),
    )
    return MemoryRates(
        tokens=np.array([stage.token_bytes for stage in stages]),
        gradients=gradients,
        pages=pages,
        page_tokens=PAGE_CHUNKS * chunk_size,
        exchanged=np.array(exchanged),
        chunk_size=chunk_size,
    )


def _exchanged(cost: CostModel, chunk_size: int, num_keys: int, shared_by: int, kv_gradient_bytes: int) -> float:
    """The `exchange_bytes` of the way in which `shared_by` ranks need most."""
    pages = min(chunk_size, num_keys), min(max(num_keys - chunk_size, 0), chunk_size)
    return max(
        exchange_bytes(cost, chunk_size, pages, by_heads, shared_by // by_heads, kv_gradient_bytes)
        for by_heads in ({1} if cost.shape.keeps_latents else {1, shared_by})
    )


def _logits_bytes(cost: CostModel, chunk_size: int) -> float:
    """Bytes of the largest block of logits on one GPU; or, if larger, of the logits, their gradient and that of the
    head."""
    shape = cost.shape
    logits = min(chunk_size, tokens_at_once(shape.vocab_size, cost.logit_bytes)) * shape.vocab_size
    of_head = 0 if cost.lora_rank else shape.embedding_parameters
    return max(logits * cost.logit_bytes, (2 * logits + of_head) * cost.num_bytes) / cost.tp
