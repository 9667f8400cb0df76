"""What a step would cost at the least, in FLOPs.

Model FLOPs, as in model FLOPs utilisation (Chowdhery et al., arXiv 2204.02311, appendix B): 6 for every weight of a
matrix and token that meets it, or 4 if it is frozen, the vocabulary head at every token, and attention where the mask
lets it see; no recompute. Adapters of a stack of experts are added to it, so that it has gradients though it is frozen,
and they themselves meet no token. Of experts a token meets those that it goes to. What
recurrent layers do with their states counts nothing: it takes no weights, and does not grow with the sequence.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from chunkplan.planfile.plan import PlanStep
from chunkplan_runtime.models.checks import kv_shapes, share_of_tokens, windows
from chunkplan_runtime.models.frozen import num_weights
from chunkplan_runtime.models.model import CausalLM

#: Kinds of layers that attend to nothing: recurrent ones, and those of which something else is a layer by itself.
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")


class FlopCounter:
    """Counts the model FLOPs of steps of one model."""

    def __init__(self, model: CausalLM) -> None:
        self._widths = attention_widths(model.config)
        self._of_token = _of_token(model)

    def count(self, step: PlanStep) -> float:
        """The model FLOPs of the forward and backward of a step, on all ranks."""
        segments = [segment for chunks in step.chunks.values() for chunk in chunks for segment in chunk.segments]
        num_tokens = sum(segment.end - segment.start for segment in segments)
        attention = sum(
            width * (_twice_attention_pairs(segment.end, window) - _twice_attention_pairs(segment.start, window)) / 2
            for window, width in self._widths.items()
            for segment in segments
        )
        return self._of_token * num_tokens + 6.0 * attention


def attention_widths(config: Any) -> Counter[int | None]:
    """By window, how wide keys and values of all heads of queries are together, over the layers that attend."""
    of_layers = windows(config)
    kinds = getattr(config, "layer_types", None) or (None,) * len(of_layers)
    own = getattr(config, "per_layer_config", None) or (config,) * len(of_layers)
    widths: Counter[int | None] = Counter()
    for window, kind, layer in zip(of_layers, kinds, own, strict=True):
        if kind not in _WITHOUT_ATTENTION:
            (_, key_dim), (_, value_dim) = kv_shapes(layer)
            value_dim = getattr(layer, "v_head_dim", None) or value_dim
            widths[window] += (getattr(layer, "num_attention_heads", None) or 1) * (key_dim + value_dim)
    return widths


def _twice_attention_pairs(num_tokens: int, window: int | None) -> int:
    """Twice the attention pairs (query, key) of a sequence, where a query sees the `window` tokens that end with it."""
    if window is None or num_tokens <= window:
        return num_tokens**2
    return window * (2 * num_tokens - window)


def _of_token(model: CausalLM) -> float:
    """FLOPs with the weights of matrices that a token meets: of experts its share, of embeddings none, but a head that
    is tied."""
    config = model.config
    total = 0.0
    for path, module in model.model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for own, weight in module.named_parameters(path, recurse=False):
            is_stacked = ".experts." in own and "base_layer" in own
            if weight.ndim >= 2 and not own.endswith("bias") and not (is_stacked and "lora_" in own):
                flops = 6.0 if weight.requires_grad or is_stacked else 4.0
                total += flops * num_weights(weight) * share_of_tokens(config, own, weight, module)
    return total
