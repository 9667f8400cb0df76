"""Compares a dataset with the one that a tuning was found for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from chunkplan.arrays import Int32Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.memory import StageMemory
from chunkplan.planning.batches import SampleGroups
from chunkplan.tuning.document import Tuned
from chunkplan.tuning.sampling import length_class, token_histogram
from chunkplan.tuning.trial import try_out
from chunkplan.tuning.tune import heaviest_steps

#: Less than this share of the tokens in other length classes changes no choice worth speaking of.
_DRIFTED = 0.05


@dataclass(frozen=True)
class LengthDrift:
    """Difference of the lengths from those tuned for.

    `moved`: the share of tokens in other length classes (powers of two) than when tuned. `longest_before` and
    `longest_now`: tokens of the longest sequence.
    """

    moved: float
    longest_before: int
    longest_now: int

    @property
    def has_drifted(self) -> bool:
        """True if tuning again is worth it: many tokens moved, or the longest sequence is in another length class."""
        before, now = (length_class(longest) for longest in (self.longest_before, self.longest_now))
        return self.moved > _DRIFTED or now > before


@dataclass(frozen=True)
class Drift(LengthDrift):
    """Difference of the data from those tuned for. `memory`: of the fullest stage with the present data, in bytes."""

    memory: StageMemory
    gpu_memory: int

    @property
    def fits(self) -> bool:
        """True if the choice still fits the memory it was made for."""
        return self.memory.total <= self.gpu_memory


def find_drift(num_tokens: Int32Array, tuned: Tuned, config: PlanConfig, groups: SampleGroups | None = None) -> Drift:
    """Compare sequences of `num_tokens` int32 [n] with what `tuned` was found for; `config` is the plan's."""
    lengths = length_drift(num_tokens, tuned.token_histogram, tuned.longest_sequence)
    outcome = try_out(heaviest_steps(num_tokens, config, tuned.cost, groups), config, tuned.cost)
    return Drift(**asdict(lengths), memory=outcome.memory(tuned.cost), gpu_memory=tuned.gpu_memory)


def length_drift(num_tokens: Int32Array, before: Mapping[int, float], longest_before: int) -> LengthDrift:
    """Compare sequences of `num_tokens` int32 [n] with the `token_histogram` and `longest_sequence` of a `Tuned`."""
    now = token_histogram(num_tokens)
    moved = sum(abs(now.get(length, 0.0) - before.get(length, 0.0)) for length in now.keys() | before.keys()) / 2
    return LengthDrift(moved, longest_before, int(num_tokens.max()))
