"""Time of the exchange between the ranks of a context-parallel group in a layer.

A group of `size` ranks shares a chunk by `heads`, by pages, or both (docs/context-parallel.md):

- By heads (DeepSpeed-Ulysses, Jacobs et al., arXiv 2309.14509): an all-to-all of queries, keys and values before
  attention and one of its output after. Nothing is computed meanwhile, and nothing depends on the prefix.
- By pages (as ring attention does, Liu et al., arXiv 2310.01889): every rank fetches the keys and values of all others,
  those of the prefix too, while it attends to those that it has, and sends gradients back in the backward. Only what
  takes longer than attention shows.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import IntArray
from chunkplan.cost.durations import ExchangeTimes, Float64Array, attention_pairs_of
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import KV_GRADIENT_BYTES

#: All-to-alls of a layer's forward: queries, keys and values are one, the output is the other.
_ALL_TO_ALLS = 2


def exchange_times(
    cost: CostModel,
    num_tokens: IntArray,
    prefix_tokens: IntArray,
    num_pages: IntArray,
    size: IntArray,
    heads: IntArray,
    *,
    attention_pairs: Float64Array | None = None,
) -> ExchangeTimes:
    """The exchange of chunks of `num_tokens` tokens in all after `prefix_tokens`, each shared by `size` ranks; all [n].

    `heads` of the ranks share the heads, the others pages, of which there are `num_pages` with the chunk's own; `size`
    and `heads` may be [1], for all. `attention_pairs`: of each chunk, where it holds more than one sequence.
    """
    shape, hardware = cost.shape, cost.hardware
    tokens = num_tokens.astype(np.float64)
    by_pages = size // heads
    widths = shape.mean(lambda layer: layer.query_width + layer.key_value_width + layer.output_width) / cost.tp
    sent = tokens / size * widths * cost.num_bytes * (heads - 1) / heads
    all_to_alls = np.where(heads > 1, 1e9 * sent / _link_bytes(cost, heads) + _ALL_TO_ALLS * hardware.link_ns, 0.0)

    expanded = shape.mean(lambda layer: layer.key_value_width)
    kept = np.where(heads > 1, expanded, shape.mean(lambda layer: layer.cached_width))  # not by heads
    fetched = (prefix_tokens + tokens) * kept / cost.tp / heads * (by_pages - 1) / by_pages  # elements
    if attention_pairs is None:
        attention_pairs = attention_pairs_of(num_tokens, prefix_tokens, shape.attention_patterns)
    attention = cost.rates.pair * attention_pairs / size
    ns = 1e9 / _link_bytes(cost, size)
    launches = num_pages * hardware.link_ns
    forward = np.maximum(fetched * cost.num_bytes * ns + launches - attention, hardware.link_ns)
    both_ways = fetched * (cost.num_bytes + KV_GRADIENT_BYTES) * ns + 2 * launches
    backward = np.maximum(both_ways - cost.rates.backward.pair * attention_pairs / size, hardware.link_ns)
    of_pages = np.where(by_pages > 1, forward, 0.0)
    of_backward = all_to_alls + np.where(by_pages > 1, backward, 0.0)
    return ExchangeTimes(all_to_alls + of_pages, of_backward, all_to_alls, of_pages)


def _link_bytes(cost: CostModel, size: IntArray) -> Float64Array:
    """Bytes a second between `size` data-parallel ranks that follow one another, [n]."""
    sizes, index = np.unique(size, return_inverse=True)
    return np.array([cost.hardware.link_bytes(int(each) * cost.tp) for each in sizes])[index]
