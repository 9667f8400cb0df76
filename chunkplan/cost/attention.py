"""How long attention takes in a layer, by the rates of a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chunkplan.cost.attention_rates import MEASURED_QUERIES, WHOLE_ONLY, AttentionRates
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.rates import AttentionTime, Rates
from chunkplan.cost.shape import Layer, ModelShape


def with_attention(rates: Rates, shape: ModelShape, hardware: Hardware, slower: float, tp: int) -> Rates:
    """`rates` with what they say of attention, which takes `slower` times as long as in bf16, on `tp` GPUs.

    A pair without a mask has half of the 4 FLOPs of one that is seen. A square takes as long as a block with as many
    pairs, and what its mask costs each of its queries. Chunks of several sequences count as many pairs as take as long.
    """
    if not hardware.attention:
        pair = 2e9 * slower * shape.mean(lambda layer: layer.attention_width) / tp / hardware.attention_flops
        return rates._replace(pair=pair)

    def mean(flops: float, of: Callable[[AttentionRates], float], several: bool = False) -> float:
        return 1e9 * slower * flops * shape.mean(partial(_of_layer, hardware, several, of)) / tp

    def of_direction(flops: float, blocks: str, squares: str, several: bool = False) -> AttentionTime:
        pair = mean(flops, lambda rates: 1 / rates.of_many(getattr(rates, blocks)), several)
        mask = mean(flops, lambda rates: 1 / getattr(rates, squares), several) - pair
        return AttentionTime(pair, max(0.0, MEASURED_QUERIES * mask))

    forward, packed = (of_direction(2, "forward_blocks", "forward_squares", several) for several in (False, True))
    ramp = mean(2, lambda rates: rates.ramp_queries / rates.of_many(rates.forward_blocks))
    return rates._replace(
        pair=forward.pair,
        mask=forward.token,
        ramp_queries=ramp / forward.pair if forward.pair else 0.0,
        packed=(packed.pair / forward.pair, (packed.token - forward.token) / forward.pair) if forward.pair else (1, 0),
        attention_backward=of_direction(5, "backward_blocks", "backward_squares"),
    )


def _of_layer(hardware: Hardware, several: bool, of: Callable[[AttentionRates], float], layer: Layer) -> float:
    """What `of` says of the rates of a layer, for each element of its width."""
    if not layer.attention_width:
        return 0.0
    return layer.attention_width * of(
        _rates_of(hardware, layer.attention_width / layer.num_query_heads, several or layer.window is not None)
    )


def _rates_of(hardware: Hardware, head_size: float, is_hard: bool) -> AttentionRates:
    """The rates with heads of the size nearest to `head_size`, of the first kernel of a profile that serves them.

    `is_hard`: there are several sequences, or a window. Where no other is known, any kernel counts.
    """

    def serves(kernel: str) -> bool:
        return kernel not in WHOLE_ONLY or (not is_hard and head_size <= WHOLE_ONLY[kernel])

    serving = [each for each in hardware.attention if serves(each.kernel)] or hardware.attention
    of_kernel = [rates for rates in serving if rates.kernel == serving[0].kernel]
    return min(of_kernel, key=lambda rates: abs(rates.head_size - head_size))
