"""How long attention takes in a layer, by the rates of a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chunkplan.cost.attention_rates import MEASURED_QUERIES, AttentionRates
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.rates import AttentionTime, Rates
from chunkplan.cost.shape import Layer, ModelShape


def with_attention(rates: Rates, shape: ModelShape, hardware: Hardware, slower: float, tp: int) -> Rates:
    """`rates` with what they say of attention, which takes `slower` times as long as in bf16, on `tp` GPUs.

    A pair without a mask has half of the 4 FLOPs of one that is seen. A square takes as long as a block with as many
    pairs, and what its mask costs each of its queries.
    """
    if not hardware.attention:
        pair = 2e9 * slower * shape.mean(lambda layer: layer.attention_width) / tp / hardware.attention_flops
        return rates._replace(pair=pair)

    def mean(flops: float, of: Callable[[AttentionRates], float]) -> float:
        return 1e9 * slower * flops * shape.mean(partial(_of_layer, hardware, of)) / tp

    def of_direction(flops: float, blocks: str, squares: str) -> AttentionTime:
        pair = mean(flops, lambda rates: 1 / rates.of_many(getattr(rates, blocks)))
        mask = mean(flops, lambda rates: 1 / getattr(rates, squares)) - pair
        return AttentionTime(pair, max(0.0, MEASURED_QUERIES * mask))

    forward = of_direction(2, "forward_blocks", "forward_squares")
    ramp = mean(2, lambda rates: rates.ramp_queries / rates.of_many(rates.forward_blocks))
    return rates._replace(
        pair=forward.pair,
        mask=forward.token,
        ramp_queries=ramp / forward.pair if forward.pair else 0.0,
        attention_backward=of_direction(5, "backward_blocks", "backward_squares"),
    )


def _of_layer(hardware: Hardware, of: Callable[[AttentionRates], float], layer: Layer) -> float:
    """What `of` says of the rates of a layer, for each element of its width."""
    if not layer.attention_width:
        return 0.0
    return layer.attention_width * of(_rates_of(hardware, layer.attention_width / layer.num_query_heads))


def _rates_of(hardware: Hardware, head_size: float) -> AttentionRates:
    """The rates with heads of the size nearest to `head_size`, of the first kernel of a profile."""
    of_kernel = [rates for rates in hardware.attention if rates.kernel == hardware.attention[0].kernel]
    return min(of_kernel, key=lambda rates: abs(rates.head_size - head_size))
