"""Losses of a step by name, each a function of its target tokens: for `--loss NAME`, and to be called in one's own.

Options and their defaults are those of `chunkplan.config.losses`. A loss comes with metrics. Sums and means over tokens
are of target tokens; means over sequences or pairs are of those of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from chunkplan.config.losses import LOSSES, check_samples, read_options
from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.execution.loss import ChunkLoss, LogitLoss, cross_entropy, of_several
from chunkplan_runtime.execution.step_loss import Metrics, StepLoss, TargetTokens, load_loss
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.feed.stream import NO_TARGET, RankWork
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import Head

_Value = tuple[Tensor, Metrics]


def dpo(tokens: TargetTokens, *, beta: float = 0.1, label_smoothing: float = 0.0) -> _Value:
    """Direct preference optimization (arXiv 2305.18290), with smoothed labels if asked for (cDPO)."""
    chosen, rejected = _pairs(tokens, tokens.sums(tokens.log_probs - _reference(tokens)))
    return _logistic(beta * (chosen - rejected), label_smoothing), _rewards(beta * chosen, beta * rejected)


def ipo(tokens: TargetTokens, *, beta: float = 0.1) -> _Value:
    """Identity preference optimization (arXiv 2310.12036), over means of tokens; `beta` is its tau."""
    chosen, rejected = _pairs(tokens, tokens.means(tokens.log_probs - _reference(tokens)))
    return (chosen - rejected - 1 / (2 * beta)).square().mean(), _rewards(beta * chosen, beta * rejected)


def kto(
    tokens: TargetTokens,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: str = "step",
) -> _Value:
    """Kahneman-Tversky optimization (arXiv 2402.01306).

    The reference point is the mean log-ratio of the step's own answers, at least 0, where the paper takes answers to
    other prompts; with `kl` "none" it is 0, as in APO-zero (arXiv 2408.06266).
    """
    ratios, label = tokens.sums(tokens.log_probs - _reference(tokens)), _there(tokens.label, "labels")
    point = ratios.detach().mean().clamp(min=0) if kl == "step" else ratios.new_zeros(())
    values = torch.where(label, beta * (ratios - point), beta * (point - ratios))
    weights = torch.where(label, ratios.new_tensor(desirable_weight), ratios.new_tensor(undesirable_weight))
    metrics = _rewards(beta * ratios[label], beta * ratios[~label], are_pairs=False)
    return (weights * (1 - values.sigmoid())).mean(), {"kl": point, **metrics}


def orpo(tokens: TargetTokens, *, beta: float = 0.1) -> _Value:
    """Odds ratio preference optimization (arXiv 2403.07691): cross-entropy of chosen answers and a log odds ratio."""
    chosen, rejected = _pairs(tokens, tokens.means(tokens.log_probs))
    odds = (chosen - rejected) - (_log_1_minus_exp(chosen) - _log_1_minus_exp(rejected))
    of_chosen = tokens.log_probs[_there(tokens.label, "labels")[tokens.which]]
    return -of_chosen.mean() - beta * logsigmoid(odds).mean(), _rewards(beta * chosen, beta * rejected)


def simpo(tokens: TargetTokens, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0) -> _Value:
    """Simple preference optimization (arXiv 2405.14734): means of tokens, a margin `gamma`, no reference."""
    chosen, rejected = _pairs(tokens, beta * tokens.means(tokens.log_probs))
    return _logistic(chosen - rejected - gamma, label_smoothing), _rewards(chosen, rejected)


def grpo(tokens: TargetTokens, *, scale: str = "group", **options: Any) -> _Value:
    """Group relative policy optimization (arXiv 2402.03300); `options` are those of `clipped_policy`.

    Advantages are those of the data, or rewards less the mean of their group, over the standard deviation of the
    "group" or the "batch" or over nothing ("none").
    """
    return clipped_policy(tokens, _advantages(tokens, scale), **options)


def gspo(tokens: TargetTokens, *, scale: str = "group", **options: Any) -> _Value:
    """Group sequence policy optimization (arXiv 2507.18071): `grpo` with one ratio a sequence."""
    options = {"epsilon": 3e-4, "epsilon_high": 4e-4, **options}
    return clipped_policy(tokens, _advantages(tokens, scale), of_sequences=True, **options)


def dapo(tokens: TargetTokens, *, scale: str = "group", **options: Any) -> _Value:
    """The loss of DAPO (arXiv 2503.14476): `grpo` with a higher upper clip and a mean over tokens."""
    return clipped_policy(tokens, _advantages(tokens, scale), **{"epsilon_high": 0.28, "mean": "tokens", **options})


def ppo(tokens: TargetTokens, **options: Any) -> _Value:
    """The clipped loss of a policy (arXiv 1707.06347) with an advantage a token; no loss of values."""
    return clipped_policy(tokens, _there(tokens.advantages, "advantages of tokens"), **{"mean": "tokens", **options})


def clipped_policy(
    tokens: TargetTokens,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    entropy: float = 0.0,
    mean: str = "sequences",
    constant: int = 1,
    of_sequences: bool = False,
) -> _Value:
    """The clipped surrogate of a policy, with `advantages` [num_target_tokens].

    Ratios are to the old log-probabilities of the data, or 1 where it has none. `beta` weighs an estimate of the
    divergence from the reference (arXiv 2402.03300, equation 4), `entropy` the mean entropy. `mean` is over "tokens";
    over "sequences", of means over their tokens; or sums of sequences over a "constant". `of_sequences`: a ratio is the
    geometric mean of those of a sequence.
    """
    old = tokens.log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs
    ratios = tokens.log_probs - old
    ratios = (tokens.means(ratios)[tokens.which] if of_sequences else ratios).exp()
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    is_clipped = ((ratios < 1 - epsilon) & (advantages < 0)) | ((ratios > 1 + epsilon_high) & (advantages > 0))
    metrics = {"clip_ratio": is_clipped.to(losses.dtype).mean(), "entropy": tokens.entropies.detach().mean()}
    if beta:
        behind = _reference(tokens) - tokens.log_probs
        divergences = behind.exp() - behind - 1
        losses, metrics["kl"] = losses + beta * divergences, divergences.detach().mean()
    if tokens.reward is not None:
        metrics["reward"] = tokens.reward.mean()
    if mean == "tokens":
        value = losses.mean()
    else:
        value = (tokens.means(losses) if mean == "sequences" else tokens.sums(losses) / constant).mean()
    return (value - entropy * tokens.entropies.mean() if entropy else value), metrics


#: By name, the functions of those of `LOSSES` that are of log-probabilities.
NAMED: Mapping[str, Callable[..., _Value]] = {
    each.__name__: each for each in (dpo, ipo, kto, orpo, simpo, grpo, gspo, dapo, ppo)
}


@dataclass(frozen=True)
class Distillation:
    """The forward divergence from a teacher's most likely tokens (arXiv 1503.02531), for `Executor.step`.

    `teacher(sequence_id, start, stop)` gives, for tokens [start, stop) of a sequence, ids int [stop - start, k] and
    their log-probabilities [stop - start, k]: what the teacher holds likely in the place of each. A token's loss is
    the sum of p (log p - log q) over these, with q of the student; not normalised over k. `cross_entropy`: the share
    of the loss that is cross-entropy instead. The loss is the mean of target tokens; it needs no further forward, and
    asks for the k tokens of one chunk at a time.
    """

    teacher: Callable[[int, int, int], tuple[Any, Any]]
    cross_entropy: float = 0.0

    def of_chunks(self, work: RankWork) -> dict[int, ChunkLoss]:
        """The loss of each chunk of a rank; raises UsageError of tokens that several sequences have."""
        if any(tensors.begun for tensors in work.tensors.values()):
            message = "a teacher is asked of each sequence by itself, and in this plan sequences share prefixes"
            raise UsageError(message, where=f"step {work.step}", hint="build the plan without --share-prefixes")
        return {chunk_id: partial(self._loss, tensors.spans) for chunk_id, tensors in work.tensors.items()}

    def _loss(
        self, spans: Sequence[Span], head: Head, hidden: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Implements `ChunkLoss`."""
        if not (labels != NO_TARGET).any():
            return cross_entropy()(head, hidden, labels, weights)
        parts = [self._ask(span, head.vocab_size) for span in spans]
        ids, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
        log_probs = log_probs.to(weights).clamp(min=-1e4)  # of probability 0, without infinities
        shares = torch.column_stack([torch.full_like(weights, self.cross_entropy), log_probs.exp()])
        shares[:, 1:] *= 1 - self.cross_entropy
        entropies, gradient = LogitLoss(of_several)(
            head, hidden, torch.column_stack([labels, ids.to(labels)]), shares * weights[:, None]
        )
        entropies[:, 1:] += log_probs
        return torch.where((labels != NO_TARGET).to(weights.device), (shares * entropies).sum(1), 0.0), gradient

    def _ask(self, span: Span, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Ask the teacher of the tokens that a part of a sequence predicts; nothing follows the last of all."""
        start, stop = span.start + 1, min(span.stop + 1, span.length)
        ids, log_probs = (torch.as_tensor(each) for each in self.teacher(span.sequence_id, start, stop))
        rows = stop - start
        if ids.shape != log_probs.shape or ids.ndim != 2 or len(ids) != rows or (ids >= vocab_size).any():
            raise UsageError(
                f"the teacher gave ids {tuple(ids.shape)} and log-probabilities {tuple(log_probs.shape)}, expected "
                f"two of ({rows}, k), ids below {vocab_size:,}",
                where=f"sequence {span.sequence_id}, tokens {start} to {stop}",
                hint="give those of each token of the sequence from start to stop, in order",
            )
        padding = (0, 0, 0, span.stop - span.start - rows)
        return torch.nn.functional.pad(ids, padding), torch.nn.functional.pad(log_probs, padding)


@dataclass(frozen=True)
class NamedLoss:
    """A loss with what is known of it: the `name` in `LOSSES`, and whether it `needs_reference`."""

    name: str
    call: StepLoss
    needs_reference: bool = False

    @classmethod
    def find(cls, loss: str | StepLoss, options: Mapping[str, Any] | None = None) -> NamedLoss:
        """The loss of a name, of FILE:NAME, or one that is given, also as a partial of a function here.

        Raises:
            UsageError: there is none.
        """
        if isinstance(loss, str):
            if loss not in NAMED:
                return cls("own", load_loss(loss))
            defaults = {name: default for name, (default, _) in LOSSES[loss].options.items()}
            loss = partial(NAMED[loss], **{**defaults, **(options or {})})
        function, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
        name = next((name for name, each in NAMED.items() if each is function), "own")
        return cls(name, loss, LOSSES[name].needs_reference(given))


#: A loss of steps; None: cross-entropy.
Found = NamedLoss | Distillation | None


def find_loss(named: str | StepLoss | Distillation, typed: Sequence[str] = ()) -> Found:
    """The loss that is `named` or given, with options as they are typed, such as "beta=0.1".

    Raises:
        UsageError: there is none, or it has no such option.
    """
    if isinstance(named, Distillation):
        return named
    if named == "distillation":
        raise UsageError(
            "the loss distillation needs a teacher, which no option names",
            hint="from Python: `executor.step(work, Distillation(teacher))` of chunkplan_runtime",
        )
    options = read_options(named if isinstance(named, str) and named in LOSSES else "own", typed)
    if named == "own":
        raise UsageError("the plan is for a loss of your own, and none is given", hint="give it: --loss FILE:NAME")
    return None if named == "sft" else NamedLoss.find(named, options)


def check_loss(
    loss: Found,
    plan: Plan,
    samples: str | None,
    reference: Scores | None = None,
    has_reference: bool = True,
    token_columns: Collection[str] | None = None,
) -> None:
    """Raise UsageError where a loss is not of the samples of a plan, or `reference` has scores of other data.

    `has_reference`: false where neither data nor adapters give log-probabilities of a reference model.
    `token_columns`: of the analysis, None if not known.
    """
    name = "distillation" if isinstance(loss, Distillation) else "sft" if loss is None else loss.name
    check_samples(name, samples, str(plan.path), token_columns)
    if reference is not None:
        reference.check(plan)
    elif isinstance(loss, NamedLoss) and loss.needs_reference and not has_reference:
        raise UsageError(NO_REFERENCE[0], where=f"loss {name}", hint=NO_REFERENCE[1])


def _there(values: Tensor | None, what: str) -> Tensor:
    if values is None:
        raise UsageError(
            f"the loss needs {what}, and the data has none",
            hint="docs/data.md says where `chunkplan analyze` reads them; --loss grpo makes advantages of rewards",
        )
    return values


#: The message and the hint of an error.
NO_REFERENCE = (
    "the loss needs log-probabilities of a reference model, and there are none",
    "`chunkplan score --model REFERENCE --plan PLAN --output scores`, then train with `--reference scores`; or train "
    "adapters: the reference is then the model without them",
)


def _reference(tokens: TargetTokens) -> Tensor:
    if tokens.reference is None:
        raise UsageError(NO_REFERENCE[0], hint=NO_REFERENCE[1])
    return tokens.reference


def _pairs(tokens: TargetTokens, values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [num_sequences] of chosen and of rejected answers, pair by pair."""
    label, group = _there(tokens.label, "labels"), _there(tokens.group, "pairs")
    if not torch.equal(group[label], group[~label]):
        raise UsageError(
            "the loss is of pairs, and an answer has no other one", hint="analyze pairs with targets in both"
        )
    return values[label], values[~label]


def _advantages(tokens: TargetTokens, scale: str) -> Tensor:
    if tokens.advantages is not None:
        return tokens.advantages
    if tokens.advantage is not None:
        return tokens.advantage[tokens.which]
    reward, group = _there(tokens.reward, "rewards or advantages"), _there(tokens.group, "groups")
    groups, which = torch.unique(group, return_inverse=True)
    zeros = reward.new_zeros(len(groups))
    sizes = zeros.index_add(0, which, torch.ones_like(reward))
    centred = reward - (zeros.index_add(0, which, reward) / sizes)[which]
    spread = (zeros.index_add(0, which, centred.square()) / (sizes - 1).clamp(min=1)).sqrt()[which]
    if scale == "batch":
        spread = reward.std() if len(reward) > 1 else reward.new_zeros(())
    return (centred if scale == "none" else centred / (spread + 1e-4))[tokens.which]


def _logistic(margins: Tensor, label_smoothing: float) -> Tensor:
    """The mean logistic loss; `label_smoothing`: the share of pairs that are labelled the wrong way round."""
    return -((1 - label_smoothing) * logsigmoid(margins) + label_smoothing * logsigmoid(-margins)).mean()


def _rewards(chosen: Tensor, rejected: Tensor, *, are_pairs: bool = True) -> dict[str, Tensor]:
    """The metrics of rewards, of what there is."""
    chosen, rejected = chosen.detach(), rejected.detach()
    named = {"chosen": chosen, "rejected": rejected}
    found = {f"rewards/{name}": values.mean() for name, values in named.items() if len(values)}
    if are_pairs:
        found["rewards/margins"] = (chosen - rejected).mean()
        found["rewards/accuracies"] = (chosen > rejected).to(chosen.dtype).mean()
    return found


def _log_1_minus_exp(values: Tensor) -> Tensor:
    """log(1 - exp(values)) of values below 0, without cancellation."""
    low = values.clamp(max=-0.6931)  # of the others the derivative would be infinite, and not a number times 0
    return torch.where(values < -0.6931, torch.log1p(-low.exp()), torch.log(-torch.expm1(values)))
