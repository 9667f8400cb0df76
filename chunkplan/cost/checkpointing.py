"""Levels of activation checkpointing: what a chunk in flight holds of each layer, and what its backward runs again.

All layers have one level, or runs of layers have one each, first to last: "full:8,none:20".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from chunkplan.cost.optimizers import GRADIENT_BYTES
from chunkplan.cost.rates import Rates, RecomputeTime
from chunkplan.cost.shape import Layer, ModelShape
from chunkplan.domains import Domain
from chunkplan.errors import UsageError

#: What a chunk in flight holds of each layer, from everything to the layer's input alone, at last in host memory. Each
#: runs again in the backward what it does not hold: more than those before it, but for the last one.
Checkpointing = Literal["none", "keep-products", "keep-projections", "keep-attention", "full", "offload"]
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)

#: The log-sum-exp of attention is in float32.
LSE_BYTES = 4

#: Layers that have a level, as they are written.
_RUN = re.compile(rf"({'|'.join(CHECKPOINTINGS)}):([1-9][0-9]{{0,5}})")


def _runs(written: str) -> list[tuple[Checkpointing, int]]:
    """The runs of layers that are written. Raises ValueError for other text."""
    found = [_RUN.fullmatch(run.strip()) for run in written.split(",")]
    levels: dict[str, Checkpointing] = {level: level for level in CHECKPOINTINGS}
    runs = [(levels[run[1]], int(run[2])) for run in found if run]
    if len(runs) < len(found):
        raise ValueError(written)
    return runs


def _read(typed: str) -> str:
    if typed in CHECKPOINTINGS:
        return typed
    return ",".join(f"{level}:{num_layers}" for level, num_layers in _runs(typed))


def _holds(value: object) -> bool:
    try:
        return isinstance(value, str) and _read(value) == value
    except ValueError:
        return False


#: A level, or runs of layers with a level each.
CHECKPOINTING = Domain(
    _holds,
    f"{', '.join(CHECKPOINTINGS)}, or runs of layers such as full:8,none:20",
    _read,
    metavar="LEVEL",
    completed=CHECKPOINTINGS,
)


@cache
def levels_of(checkpointing: str, num_layers: int) -> tuple[Checkpointing, ...]:
    """The level of each layer, first to last, of a level or of runs of layers as `CHECKPOINTING` has them.

    Raises:
        UsageError: the runs are not of so many layers.
    """
    for level in CHECKPOINTINGS:
        if checkpointing == level:
            return (level,) * num_layers
    levels = tuple(level for level, count in _runs(checkpointing) for _ in range(count))
    if len(levels) != num_layers:
        similar = shown_levels([levels[place * len(levels) // num_layers] for place in range(num_layers)])
        raise UsageError(
            f"--checkpointing is {checkpointing}, of {len(levels)} layers: the model has {num_layers}",
            hint=f"give runs whose numbers sum to {num_layers}, such as --checkpointing {similar}",
        )
    return levels


def shown_levels(levels: Sequence[Checkpointing]) -> str:
    """The levels of layers as `levels_of` reads them; one where all are the same."""
    runs = [(level, len(list(run))) for level, run in groupby(levels)]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{level}:{count}" for level, count in runs)


#: Words for levels; "none" has none.
_WORDS = {
    "keep-products": "selective checkpointing (keeps matmuls)",
    "keep-projections": "selective checkpointing (keeps attention, projections)",
    "keep-attention": "selective checkpointing (keeps attention)",
    "full": "full activation checkpointing",
    "offload": "full activation checkpointing, offloaded to CPU",
}


def checkpointing_words(checkpointing: str) -> list[str]:
    """Notes that name a level; none for "none". Of runs of layers, how many have the strongest level."""
    if ":" not in checkpointing:
        return [_WORDS[checkpointing]] if checkpointing in _WORDS else []
    levels = [level for level, count in _runs(checkpointing) for _ in range(count)]
    strongest = max(levels, key=CHECKPOINTINGS.index)
    if strongest == "none":
        return []
    others = "" if {*levels} <= {"none", strongest} else ", selective in others"
    if others and strongest not in ("full", "offload"):
        return ["selective checkpointing by layer"]
    return [f"{_WORDS[strongest]} in {levels.count(strongest)} of {len(levels)} layers{others}"]


class HostLink(NamedTuple):
    """Nanoseconds that the link to host memory takes for a token of a layer on average, one way.

    Of its `hidden` state, of what pages keep of it (`kv`), of that and its gradients, and of what attention gave.
    """

    hidden: float
    kv: float
    with_gradients: float
    attention: float


def host_link(shape: ModelShape, host_bytes: float, num_bytes: int) -> HostLink:
    """The time on the host link of all GPUs of a stage, at `host_bytes` a second; `num_bytes` a number, 4 a
    gradient."""
    kept = shape.mean(lambda layer: layer.cached_width)
    attention = shape.mean(lambda layer: attention_bytes(layer, num_bytes))
    sizes = shape.hidden_size * num_bytes, kept * num_bytes, kept * (num_bytes + GRADIENT_BYTES), attention
    return HostLink(*(size / host_bytes * 1e9 for size in sizes))


def attention_bytes(layer: Layer, num_bytes: int) -> int:
    """Bytes of the results of attention for a token in a layer: its output of `num_bytes` a number, and the LSE of each
    head; 0 without attention."""
    return (layer.output_width * num_bytes + LSE_BYTES * layer.num_query_heads) if layer.cached_width else 0


def with_again(
    rates: Rates,
    levels: Sequence[Checkpointing],
    shape: ModelShape,
    product: float,
    ramp: float,
    copies: float,
    link: HostLink,
    kv_offload: bool,
) -> Rates:
    """`rates` of a forward, with what a backward runs again where layers have `levels`; see `_again_of`.

    `link`: to host memory, over which inputs of layers go, what attention gave, and with `kv_offload` keys and values.
    """
    kv = (link.kv, link.with_gradients) if kv_offload else (0.0, 0.0)
    rates = rates._replace(host_kv=kv, host_attention=link.attention)
    of_level = {level: _again_of(level, shape, rates, product, ramp, copies) for level in dict.fromkeys(levels)}
    if "offload" in of_level:
        of_level["offload"] = of_level["offload"]._replace(host=link.hidden)
    if len(of_level) == 1:
        return rates._replace(again=of_level[levels[0]])
    of_layers = tuple(of_level[level] for level in levels)
    return rates._replace(again=RecomputeTime.mean(of_layers), again_of_layers=of_layers)


def _again_of(
    level: Checkpointing, shape: ModelShape, rates: Rates, product: float, ramp: float, copies: float
) -> RecomputeTime:
    """The part of a layer's forward that a backward runs again: all of it where only the input is held.

    Else all but attention; where results of projections are held, of products the MLP and what expands latents; where
    those of all are, the latter alone. All that lies between products runs again at every level.

    Args:
        rates: of a forward.
        product: nanoseconds of a multiply-add.
        ramp, copies: what `rates` has of the ramp of products, and of reading and writing what lies between them.
    """
    if level == "none":
        return RecomputeTime()
    if level in ("full", "offload"):
        return RecomputeTime(rates.token + rates.mask, rates.pair, rates.chunk, (1, 1), launch=rates.launch)
    if level == "keep-attention":
        return RecomputeTime(rates.token, 0.0, rates.chunk, (1, 0), launch=rates.launch)
    run = idle = shape.mean(lambda layer: layer.latent_width * layer.expanded_width)
    if level == "keep-projections":
        mixing = shape.mean(lambda layer: layer.mixer_parameters)
        run, idle = run + shape.active_layer_parameters - mixing, idle + shape.layer_parameters - mixing
    states = shape.mean(lambda layer: layer.state_elements * layer.state_products)
    held_ramp = ramp * max(0.0, 1 - idle / shape.layer_parameters)
    return RecomputeTime(product * (run + states) + copies, 0.0, rates.chunk - held_ramp, (1, 0), launch=rates.launch)
