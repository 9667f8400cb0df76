"""What a step would cost at the least, in FLOPs.

Model FLOPs, as in model FLOPs utilisation (Chowdhery et al., arXiv 2204.02311, appendix B): 6 for every weight of a
matrix and token that meets it, the vocabulary head at every token, and attention where the mask lets it see; no
recompute, and adapters count as if all weights were trained.
"""

from __future__ import annotations

from chunkplan.planfile.plan import PlanStep
from chunkplan_runtime.models.checks import windows
from chunkplan_runtime.models.model import CausalLM


class FlopCounter:
    """Counts the model FLOPs of steps of one model."""

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._windows = windows(config)
        self._query_width = config.num_attention_heads * head_dim
        self._weights = _active_weights(model)

    def count(self, step: PlanStep) -> float:
        """The model FLOPs of the forward and backward of a step, on all ranks."""
        segments = [segment for chunks in step.chunks.values() for chunk in chunks for segment in chunk.segments]
        num_tokens = sum(segment.end - segment.start for segment in segments)
        twice_pairs = {
            window: sum(
                _twice_attention_pairs(segment.end, window) - _twice_attention_pairs(segment.start, window)
                for segment in segments
            )
            for window in set(self._windows)
        }
        attention: int = self._query_width * sum(twice_pairs[window] for window in self._windows)
        return 6.0 * (self._weights * num_tokens + attention)


def _twice_attention_pairs(num_tokens: int, window: int | None) -> int:
    """Twice the attention pairs (query, key) of a sequence, where a query sees the `window` tokens that end with it."""
    if window is None or num_tokens <= window:
        return num_tokens**2
    return window * (2 * num_tokens - window)


def _active_weights(model: CausalLM) -> float:
    """How many weights of matrices a token meets: of experts its share, of the embeddings only the head."""
    config = model.config
    embeddings = model.model.get_input_embeddings().weight
    experts = getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    total = float(embeddings.numel()) if config.tie_word_embeddings else 0.0
    for name, weight in model.model.named_parameters():
        if weight.ndim >= 2 and weight is not embeddings and "lora_" not in name:
            total += weight.numel() * (share if ".experts." in name else 1.0)
    return total
