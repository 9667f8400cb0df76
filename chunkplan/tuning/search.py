"""Prunes the search: only choices whose lower bound may beat the best found so far are simulated on a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.tuning.bound import fewest_bytes, step_bound_ns, work_of_steps
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import Outcome, try_out, why_plan_only

#: A choice within this factor of the best on a few steps may be as fast on all.
CLOSE = 1.01


class Search:
    """Simulations on one sample, each made once, and the least time of those that fit.

    With `options.thorough` everything is simulated. Choices that the runtime can run are compared among themselves.
    """

    def __init__(self, sample: Sample, options: TuneOptions) -> None:
        self.sample, self.options = sample, options
        self.longest = int(sample.num_tokens.max())
        self._work = work_of_steps(sample, options.shape.attention_patterns)
        self._best_ns = {False: math.inf, True: math.inf}  # of all, and of what the runtime can run
        self._outcomes: dict[tuple[PlanConfig, CostModel], Outcome] = {}

    def try_out(self, config: PlanConfig, cost: CostModel, is_cancelled: Callable[[], bool] = lambda: False) -> Outcome:
        """Simulate the steps of the sample, or return what came of it before; see `trial.try_out`."""
        if (config, cost) not in self._outcomes:
            self._outcomes[config, cost] = try_out(self.sample, config, cost, is_cancelled)
        return self._outcomes[config, cost]

    def note(self, config: PlanConfig, cost: CostModel, step_ns: float) -> None:
        """Take up the time of what fits."""
        for runnable in {False, why_plan_only(config, cost) is None}:
            self._best_ns[runnable] = min(step_ns, self._best_ns[runnable])

    @property
    def least_ns(self) -> float:
        """The least time of what the runtime can run, or where none fits, of all; inf: none was found."""
        return self._best_ns[True] if self._best_ns[True] < math.inf else self._best_ns[False]

    def best_ns(self, config: PlanConfig, cost: CostModel) -> float:
        """The least time found of what is to be compared with a configuration; inf: there is nothing."""
        return self._best_ns[why_plan_only(config, cost) is None]

    def bound_ns(self, config: PlanConfig, costs: Iterable[CostModel]) -> float:
        """The least time that a configuration can take with the first of `costs` that may fit; inf: none may.

        Layers may have the level before it too, as far as there is room: then this is an estimate, not a bound.
        """
        before = None
        for cost in costs:
            if fewest_bytes(self.longest, config, cost) <= self.options.gpu_memory:
                return step_bound_ns(self._work, config, before or cost)
            before = cost
        return math.inf

    def is_hopeful(self, config: PlanConfig, *costs: CostModel) -> bool:
        """True if a configuration with the first of `costs` that may fit can be among the fastest."""
        best_ns = self.best_ns(config, costs[0])
        return self.options.thorough or best_ns == math.inf or self.bound_ns(config, costs) <= CLOSE * best_ns
