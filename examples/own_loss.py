"""Losses of one's own: chunkplan train --loss examples/own_loss.py:dynamic_fine_tuning ...

A loss is a function of the log-probabilities of all target tokens of a step, whichever chunks and GPUs they are in.
"""

from torch import Tensor

from chunkplan_runtime import TargetTokens


def dynamic_fine_tuning(tokens: TargetTokens) -> Tensor:
    """Cross-entropy weighted by the probability of each token (arXiv 2508.05629)."""
    return -(tokens.log_probs.exp().detach() * tokens.log_probs).mean()


def mean_of_sequences(tokens: TargetTokens) -> Tensor:
    """Cross-entropy in which each sequence counts the same, however long it is."""
    num_tokens = tokens.sums(tokens.log_probs.new_ones(len(tokens.log_probs)))
    return -(tokens.sums(tokens.log_probs) / num_tokens).mean()


def with_entropy(tokens: TargetTokens) -> Tensor:
    """Cross-entropy that keeps the model's distribution wide."""
    return -tokens.log_probs.mean() - 0.01 * tokens.entropies.mean()
