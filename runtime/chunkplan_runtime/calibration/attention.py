"""Times attention alone, as blocks of earlier keys and as causal squares, forward and backward, by size of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chunkplan.cost.attention_rates import MEASURED_QUERIES, AttentionRates
from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.kernel import AttentionKernel, Kernels
from chunkplan_runtime.models.checks import entry_of, kv_shapes

#: Queries that are many on a device of the type, and few; a block has four times as many keys as the many.
_QUERIES = {"cuda": (MEASURED_QUERIES, 2048), "cpu": (256, 64)}
_KEYS = 4

#: Sizes of heads that are measured beside the model's own.
_HEAD_SIZES = {"cuda": (128, 64), "cpu": ()}

#: The least part of a time that is counted, so that times of a noisy device make rates.
_LEAST = 0.01

#: Seconds that something takes.
Seconds = Callable[[Callable[[], object]], float]


def measure_attention(
    device: torch.device, config: Any, dtype: torch.dtype, attention: str, seconds: Seconds
) -> tuple[AttentionRates, ...]:
    """Measure the kernels that layers of `config`, a transformers config, can run with: the fastest first.

    Of each the layers' own heads come first. Nothing of a model without attention.
    """
    (kv_heads, key_dim), (_, value_dim) = kv_shapes(config)
    heads, softcap = (entry_of(config, name) for name in ("num_attention_heads", "attn_logit_softcapping"))
    others = [(size, size) for size in _HEAD_SIZES[device.type] if size != (key_dim + value_dim) // 2]
    found = []
    for dims in [(key_dim, value_dim), *others] if heads else ():
        serving = [*Kernels(attention).serving(device, dtype, dims, Form(1.0, causal=True, softcap=softcap), [])]
        for kernel in serving[:-1] or serving:  # the last one is plain attention, which is for want of others
            found.append(_of_heads(kernel, device, dtype, (heads, kv_heads), dims, seconds))
    own = {each.kernel: each.both_blocks for each in reversed(found)}
    return tuple(sorted(found, key=lambda each: own[each.kernel], reverse=True))


def _of_heads(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    seconds: Seconds,
) -> AttentionRates:
    many, few = _QUERIES[device.type]
    num_keys = _KEYS * many

    def times(num_queries: int, num_keys: int, causal: bool) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        form = Form(dims[0] ** -0.5, causal)
        made = ((heads[0], num_queries, dims[0]), (heads[1], num_keys, dims[0]), (heads[1], num_keys, dims[1]))
        query, key, value = (torch.randn(1, *shape, device=device).to(dtype) for shape in made)
        out, lse = kernel.forward(query, key, value, form)
        gradient = torch.randn_like(out)
        forward = seconds(lambda: kernel.forward(query, key, value, form))
        return forward, seconds(lambda: kernel.backward(gradient, query, key, value, out, lse, form))

    blocks, short, squares = times(many, num_keys, False), times(few, num_keys, False), times(many, many, True)
    of_query = max(blocks[0] - short[0], _LEAST * blocks[0]) / (many - few)
    ramp = max(blocks[0] / of_query - many, _LEAST * few)
    flops = 2.0 * heads[0] * (dims[0] + dims[1])  # of a query and a key that it sees, forward
    rates = []
    for share, block, square in zip((1.0, 2.5), blocks, squares, strict=True):
        of_pair = block / num_keys / (many + ramp)
        mask = max(square - of_pair * many * many / 2, 0.0) / many  # of a query, what no block takes
        in_block = of_pair * (1 + ramp / MEASURED_QUERIES)
        in_square = of_pair + mask * 2 / MEASURED_QUERIES
        rates.append((share * flops / in_block, share * flops / in_square))
    (forward_blocks, forward_squares), (backward_blocks, backward_squares) = rates
    return AttentionRates(
        kernel=kernel.name,
        head_size=(dims[0] + dims[1]) // 2,
        forward_blocks=forward_blocks,
        forward_squares=forward_squares,
        backward_blocks=backward_blocks,
        backward_squares=backward_squares,
        ramp_queries=ramp,
    )
