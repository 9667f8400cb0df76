"""Counts what a chunk or a step has to do at the least: FLOPs of products and of attention, by the rate they have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.training.metrics import attention_widths

Row = dict[str, Any]


def work_of(model: CausalLM, segments: Iterable[tuple[int, int]], *, forwards: int) -> Row:
    """FLOPs of segments [start, end) of sequences: `forwards` through the layers, one through the head, one backward.

    A backward of a product has one of its input, and one of its weight where that is trained; that of attention has 2.5
    times the FLOPs of a forward. `squares`: attention to the tokens of the segment, `blocks`: to those before it.
    """
    segments = list(segments)
    num_tokens = sum(end - start for start, end in segments)
    squares = sum((end - start) ** 2 / 2 for start, end in segments)
    blocks = sum(start * (end - start) for start, end in segments)
    width = 2.0 * attention_widths(model.config)[None]
    products = 0.0
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            times = (1 if "lm_head" in name else forwards) + 1 + module.weight.requires_grad
            products += 2.0 * times * module.weight.numel() * num_tokens
    return {
        "products": products,
        "forward_squares": forwards * width * squares,
        "forward_blocks": forwards * width * blocks,
        "backward_squares": 2.5 * width * squares,
        "backward_blocks": 2.5 * width * blocks,
    }
