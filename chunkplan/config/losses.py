"""Losses of a step by name: the data that each is of, its options, and the forwards that it takes beside those of SFT.

`chunkplan_runtime.execution.losses` computes them; here is what a plan and the options of a run need to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkplan.domains import Domain, number, one_of, whole
from chunkplan.errors import UsageError

#: Kinds of data that an analysis names in its manifest entry `samples`; None: ordinary data.
PREFERENCE, LABELLED, ROLLOUTS = SAMPLES = ("preference", "labelled", "rollouts")

#: The loss of each kind where none is named.
USUAL = {PREFERENCE: "dpo", LABELLED: "kto", ROLLOUTS: "grpo"}

_ABOVE_0 = number(lambda value: value > 0, "a number above 0, such as 0.1")
_FROM_0 = number(lambda value: value >= 0, "a number from 0")
_BELOW_HALF = number(lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5")
_SHARE = number(lambda value: 0 <= value <= 1, "a share from 0 to 1")


@dataclass(frozen=True)
class Loss:
    """A loss of a step.

    Attributes:
        samples: the kinds of data that it is of.
        options: by name the default and what a value may be.
        extra_forwards: forwards of all chunks that a step has beside those of SFT, without the one of `reference`.
        reference: "always" where it needs log-probabilities of a reference model, "beta" where it does with an option
            beta above 0, else "never". Where neither the data nor a folder of scores has them, they take one more
            forward, of the model without its adapters.
    """

    samples: tuple[str | None, ...]
    options: Mapping[str, tuple[Any, Domain]] = field(default_factory=dict)
    extra_forwards: int = 1
    reference: str = "never"

    def needs_reference(self, options: Mapping[str, Any]) -> bool:
        """True if with these options, or their defaults, it needs log-probabilities of a reference model."""
        beta = options.get("beta", self.options["beta"][0] if "beta" in self.options else 0)
        return self.reference == "always" or (self.reference == "beta" and beta > 0)


def _policy(epsilon: float, epsilon_high: float, mean: str, **others: tuple[Any, Domain]) -> Loss:
    return Loss(
        (ROLLOUTS,),
        {
            "epsilon": (epsilon, _ABOVE_0),
            "epsilon_high": (epsilon_high, _ABOVE_0),
            "beta": (0.0, _FROM_0),
            "entropy": (0.0, _FROM_0),
            "mean": (mean, one_of("sequences", "tokens", "constant")),
            "constant": (1, whole(1)),
            **others,
        },
        reference="beta",
    )


_BETA, _SMOOTHING = (0.1, _ABOVE_0), (0.0, _BELOW_HALF)
_SCALE = {"scale": ("group", one_of("group", "batch", "none"))}
_PAIRS: tuple[str | None, ...] = (PREFERENCE,)

#: Losses by name. "own" is a function that users give, of any data.
LOSSES: Mapping[str, Loss] = {
    "sft": Loss((None,), extra_forwards=0),
    "dpo": Loss(_PAIRS, {"beta": _BETA, "label_smoothing": _SMOOTHING}, reference="always"),
    "ipo": Loss(_PAIRS, {"beta": _BETA}, reference="always"),
    "kto": Loss(
        (LABELLED, PREFERENCE),
        {
            "beta": _BETA,
            "desirable_weight": (1.0, _FROM_0),
            "undesirable_weight": (1.0, _FROM_0),
            "kl": ("step", one_of("step", "none")),
        },
        reference="always",
    ),
    "orpo": Loss(_PAIRS, {"beta": _BETA}),
    "simpo": Loss(
        _PAIRS,
        {"beta": (2.0, _ABOVE_0), "gamma": (1.0, _FROM_0), "label_smoothing": _SMOOTHING},
    ),
    "grpo": _policy(0.2, 0.2, "sequences", **_SCALE),
    "gspo": _policy(3e-4, 4e-4, "sequences", **_SCALE),
    "dapo": _policy(0.2, 0.28, "tokens", **_SCALE),
    "ppo": _policy(0.2, 0.2, "tokens"),
    "distillation": Loss((None, *SAMPLES), {"cross_entropy": (0.0, _SHARE)}, extra_forwards=0),
    "own": Loss((None, *SAMPLES)),
}

#: Losses that a run cannot have by their name alone.
_NOT_BY_NAME = ("distillation", "own")


def read_options(loss: str, typed: Sequence[str]) -> Mapping[str, Any]:
    """The options of a loss from entries such as "beta=0.1"; UsageError: one is not what it may be."""
    known = LOSSES[loss].options
    found: dict[str, object] = {}
    for entry in typed:
        name, _, text = entry.partition("=")
        if name not in known:
            hint = f"it has {', '.join(known)}" if known else "leave them out"
            raise UsageError(f"--loss-options: the loss {loss} has no option {name!r}", hint=hint)
        default, domain = known[name]
        try:
            found[name] = domain.read(text)
        except ValueError:
            found[name] = None
        if not domain.holds(found[name]):
            hint = f"for example --loss-options {name}={default}"
            raise UsageError(f"--loss-options: {name} is {text!r}, expected {domain.expected}", hint=hint)
    return found


def check_samples(loss: str, samples: str | None, where: str, token_columns: Collection[str] | None = None) -> None:
    """Raise UsageError where a loss is not one of the data of an analysis at `where`.

    `token_columns`: numbers that the analysis has of each token, None if not known.
    """
    wanted = LOSSES[loss].samples
    if samples not in wanted:
        fitting = [name for name, each in LOSSES.items() if samples in each.samples and name not in _NOT_BY_NAME]
        found = "ordinary data" if samples is None else f"{samples} data"
        expected = " or ".join("ordinary" if each is None else each for each in wanted)
        hint = f"for this data there are --loss {', '.join(fitting)}"
        raise UsageError(f"the loss {loss} is of {expected} data, the analysis has {found}", where=where, hint=hint)
    if loss == "ppo" and token_columns is not None and "advantages" not in token_columns:
        raise UsageError(
            "the loss ppo needs an advantage of each token, and the data has none",
            where=where,
            hint="--loss grpo or dapo makes them of rewards; or analyze rollouts with a list `advantages`",
        )


def resolve_loss(loss: str, samples: str | None, where: str) -> str:
    """The loss that a plan of an analysis at `where` is for; raises as `check_samples`.

    Cross-entropy would learn rejected answers as good ones: of samples, "sft" stands for their usual loss.
    """
    if loss == "sft" and samples is not None:
        loss = USUAL[samples]
    check_samples(loss, samples, where)
    return loss
