"""Chooses (ChunkSize, K) and how a model is run: the Python twin of `chunkplan tune`.

ChunkFlow (arXiv 2503.02356) runs every candidate on the cluster. Here all are tried on sampled steps of the data,
planned and simulated as a plan's are, and an integer program chooses a K for each length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from chunkplan.arrays import Int32Array
from chunkplan.config.losses import resolve_loss
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.hardware import typed_gpus
from chunkplan.cost.model import CostModel
from chunkplan.cost.states import optimizer_bytes
from chunkplan.errors import UsageError
from chunkplan.lengths import Positions
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis
from chunkplan.planning.batches import SampleGroups
from chunkplan.planning.selection import check_groups, has_reference
from chunkplan.quantities import ZERO, seconds, short_repr
from chunkplan.tuning.baselines import Baseline, baselines
from chunkplan.tuning.grid import Choice, Progress, evaluate, mixed_again, try_grid
from chunkplan.tuning.options import LADDER, GpuLayout, TuneOptions
from chunkplan.tuning.sampling import Sample, sample_steps, token_histogram
from chunkplan.tuning.search import Search
from chunkplan.tuning.trial import try_out

#: Strata of the sample that layouts are compared on, and of the one that configurations are; and the sequences of a
#: sample, at most, unless fewer than 4 steps would be left.
_COARSE, _STRATA, _MOST_SEQUENCES = 12, 48, 1 << 16

#: Sequences of the heaviest steps, on which the memory of what is chosen is checked.
_HEAVIEST_SEQUENCES = 1 << 17

#: What layouts are compared with, and how many of them are looked at closely, beside the best that the runtime can run.
_COARSE_CHUNK_SIZES, _COARSE_KS, _LAYOUTS = (4096, 16384, 65536), (1, 8), 2

#: Times this close are the same: of these the choice is the one that takes least memory.
_SAME = 1.005

#: Choices within this factor of the best are tried on more steps, at most so many of the fastest.
_CLOSE, _CLOSEST = 1.03, 8

#: Choices slower than the best by more than this factor are no trade for less memory.
_SLOWEST = 1.5

#: Numbers of GPUs tried for the fewest that fit, and the smallest ChunkSize tried for it; smaller ones save little.
GPU_COUNTS, _SMALLEST_CHUNK_SIZE = (1, 2, 4, 8, 16, 32, 64), 2048

#: Speedups below this are no gain: predictions are no more accurate.
A_GAIN = 1.03


class LayoutEstimate(NamedTuple):
    """A layout with its estimated time of a step, and of one that the runtime can run; None where nothing fits."""

    layout: GpuLayout
    step_ns: float | None
    runnable_ns: float | None


@dataclass(frozen=True)
class Tuning:
    """The result of a tuning for `options`.

    `choices` are sorted: those that fit by time, then the others by memory. `chosen` is the fastest that fits; of those
    as fast within 0.5%, the one that takes least memory; this is checked on the heaviest steps too. `recommended` is
    the same among those that the runtime can run, or None. `pareto`: indices in `choices` of those that none beats in
    both time and memory; where there is a recommended one, among those that the runtime can run. `layouts`: those
    compared. Each of `baselines` is on its best layout. `fewest_gpus` that fit: as many as are used, or fewer of 1, 2,
    4 and so on. `token_histogram`: of the data. `positions`: lengths of the data and the positions of the model, None
    where its config does not have them.
    """

    options: TuneOptions
    baselines: tuple[Baseline, ...]
    choices: tuple[Choice, ...]
    chosen: Choice
    recommended: Choice | None
    pareto: tuple[int, ...]
    layouts: tuple[LayoutEstimate, ...]
    fewest_gpus: int
    num_sequences: int
    longest_sequence: int
    tokens_per_step: float
    token_histogram: dict[int, float]
    positions: Positions | None

    __repr__ = short_repr

    @property
    def best(self) -> Choice:
        """The choice to build a plan with: the recommended one, else the fastest."""
        return self.recommended or self.chosen

    @property
    def best_baseline(self) -> Baseline | None:
        """The baseline that gains are against: the fastest that fits and loses no token, of all or of those that the
        options name; None where none fits."""
        named = self.options.baseline
        fitting = [row for row in self.baselines if row.fits and (row.key == named if named else not row.lost)]
        return min(fitting, key=lambda row: row.step_ns, default=None)

    @property
    def gain(self) -> float | None:
        """Speedup of the best choice over the best baseline; None where no baseline fits."""
        return None if self.best_baseline is None else self.best_baseline.step_ns / self.best.step_ns

    @property
    def has_gain(self) -> bool:
        """True if the best choice is faster than all baselines by at least `A_GAIN`, or no baseline fits."""
        return self.gain is None or self.gain >= A_GAIN

    @property
    def epoch_hours(self) -> float:
        """Hours of an epoch with the best choice, whose mean step counts a last step of fewer sequences as a step."""
        return -(-self.num_sequences // self.options.global_batch) * self.best.step_ns / 3.6e12

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of an epoch with the best choice."""
        return self.epoch_hours * self.best.layout.gpus


def tune(
    analysis: Analysis | str | Path,
    options: TuneOptions,
    *,
    progress: Progress | None = None,
    found: Callable[[Baseline], None] | None = None,
) -> Tuning:
    """Choose ChunkSize, K, schedule and layout for `analysis` (an analysis, its folder, or a lengths file).

    Example: `chunkplan.tune("lengths.npy", chunkplan.TuneOptions(gpus="8xH100"))`

    `found` is called with each baseline as soon as it is timed, before anything else is tried.

    Raises:
        UsageError: there is no analysis, a group of it has more sequences than a step, or nothing fits the memory; says
            what would be needed.
        DataError: the analysis is damaged.
    """
    if not isinstance(analysis, Analysis):
        analysis = load_analysis(analysis)
    options = replace(options, loss=resolve_loss(options.loss, analysis.samples, str(analysis.path)))
    num_tokens, groups = analysis.num_tokens, SampleGroups.of(analysis.group)
    check_groups(analysis, options.global_batch)
    layouts = options.layouts()
    of_steps = (_sample(num_tokens, options, strata, groups) for strata in (_COARSE, _STRATA))
    few, search = (Search(replace(each, has_reference=has_reference(analysis)), options) for each in of_steps)
    overall = _Overall(progress or _ignore, few, search)
    sample = search.sample
    rows = []
    for row in baselines(sample, options, options.baseline_layouts(), overall.part(0, 20)):
        rows.append(row)
        if found is not None:
            found(row)
    compared = _compare(few, layouts, overall.part(20, 25)) if len(layouts) > 1 else []
    if compared:
        layouts = _shortlist(compared)
    choices = _tried(search if options.thorough else few, layouts, overall)
    if not options.thorough:
        fitting = [choice for choice in choices if choice.fits]
        choices = _on_more_steps(choices, search, overall.part(80, 15))
        if fitting and not any(choice.fits for choice in choices):  # what fits few steps may fit no others
            choices = _tried(search, layouts, overall)
    heaviest = heaviest_steps(num_tokens, choices[0].config, choices[0].cost, groups)
    chosen = recommended = _pick_best(choices, heaviest, search)
    if chosen is not None and chosen.plan_only is not None:
        recommended = _pick_best(choices, heaviest, search, runnable=True)
    choices.sort(key=lambda choice: (not choice.fits, choice.step_ns if choice.fits else choice.memory.total))
    gpus = choices[0].layout.gpus
    if chosen is None:
        raise _nothing_fits(choices[0], options, _fewest_gpus(few.sample, options, overall.part(95, 5), above=gpus))
    return Tuning(
        options=options,
        baselines=tuple(rows),
        choices=tuple(choices),
        chosen=chosen,
        recommended=recommended,
        pareto=_pareto(choices, runnable=recommended is not None),
        layouts=tuple(sorted((_as_found(each, choices) for each in compared), key=_by_time)),
        fewest_gpus=min(gpus, _fewest_gpus(few.sample, options, overall.part(95, 5)) or gpus),
        num_sequences=num_tokens.size,
        longest_sequence=int(num_tokens.max()),
        tokens_per_step=sample.tokens_per_step,
        token_histogram=token_histogram(num_tokens),
        positions=Positions.of(num_tokens, options.shape.max_positions),
    )


def _sample(num_tokens: Int32Array, options: TuneOptions, num_strata: int, groups: SampleGroups | None) -> Sample:
    layout = options.layouts()[0]
    config = options.plan_config(layout, options.chunk_sizes[0], options.ks[0], options.schedules_of(layout)[0])
    most = max(4, _MOST_SEQUENCES // options.global_batch)
    cost = options.cost(layout, LADDER[0], options.shardings_of(layout)[0])
    return sample_steps(num_tokens, config, cost, min(num_strata, most), groups=groups)


def _compare(search: Search, layouts: list[GpuLayout], progress: Progress) -> list[LayoutEstimate]:
    """Estimate the layouts on few steps and sort them: fastest first, and last those in which nothing fits."""
    found: list[tuple[LayoutEstimate, int]] = []
    options = search.options
    chunk_sizes: tuple[int, ...] = _COARSE_CHUNK_SIZES
    ks: tuple[int, ...] = _COARSE_KS
    if not options.thorough:  # what is found is compared with what is to be tried
        chunk_sizes, ks = _near(chunk_sizes, options.chunk_sizes), _near(ks, options.ks)
    for layout in layouts:
        choices = try_grid(search, layout, chunk_sizes, ks, _ignore)
        times = [choice.step_ns for choice in choices if choice.fits]
        runnable = [choice.step_ns for choice in choices if choice.fits and choice.plan_only is None]
        estimate = LayoutEstimate(layout, min(times, default=None), min(runnable, default=None))
        found.append((estimate, min((choice.memory.total for choice in choices), default=0)))
        progress("comparing layouts", len(found), len(layouts))
    found.sort(key=lambda each: (*_by_time(each[0]), each[1]))
    return [estimate for estimate, _ in found]


def _by_time(estimate: LayoutEstimate) -> tuple[bool, float]:
    return estimate.step_ns is None, estimate.step_ns or 0.0


def _as_found(estimate: LayoutEstimate, choices: list[Choice]) -> LayoutEstimate:
    """The estimate of a layout with the times of its fastest choices, where some were tried and fit."""
    own = [choice for choice in choices if choice.fits and choice.layout == estimate.layout]
    step_ns = min((choice.step_ns for choice in own), default=estimate.step_ns)
    runnable = [choice.step_ns for choice in own if choice.plan_only is None]
    return LayoutEstimate(estimate.layout, step_ns, min(runnable, default=estimate.runnable_ns))


def _tried(search: Search, layouts: list[GpuLayout], overall: _Overall) -> list[Choice]:
    """Try the grids of some layouts."""
    choices: list[Choice] = []
    for place, layout in enumerate(layouts):
        report = overall.part(45, 35, place, len(layouts))
        choices += try_grid(search, layout, search.options.chunk_sizes, search.options.ks, report)
    return choices


def _near(wanted: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """The values of `given` nearest to those of `wanted`, sorted."""
    return tuple(sorted({min(given, key=lambda each: abs(math.log(each / number))) for number in wanted}))


def _shortlist(compared: list[LayoutEstimate]) -> list[GpuLayout]:
    """Choose the best layouts, and the best that the runtime can run, which need not be among them."""
    layouts = [estimate.layout for estimate in compared[:_LAYOUTS]]
    runnable = [(estimate.runnable_ns, estimate.layout) for estimate in compared if estimate.runnable_ns is not None]
    if runnable and min(runnable)[1] not in layouts:
        layouts.append(min(runnable)[1])
    return layouts


class _Overall:
    """One progress for all parts of a tuning, in percent, with the best time so far of `few` steps, then of more."""

    def __init__(self, progress: Progress, few: Search, more: Search) -> None:
        self._progress, self._few, self._more = progress, few, more
        self._done = 0

    def part(self, first: int, percent: int, place: int = 0, num_places: int = 1) -> Progress:
        """The progress of a part that takes `percent` from `first` on, or of one of `num_places` equal parts of it."""

        def report(_: str, done: int, total: int) -> None:
            best_ns = self._more.least_ns if self._more.least_ns < math.inf else self._few.least_ns
            words = f"best plan so far {seconds(best_ns / 1e3)}" if best_ns < math.inf else "timing ways to train"
            self._done = max(self._done, first + int(percent * (place + done / total) / num_places))
            self._progress(words, self._done, 100)

        return report


def _ignore(doing: str, done: int, total: int) -> None:
    """Ignore progress: that of a comparison of layouts, or of a caller that asked for none."""


def heaviest_steps(
    num_tokens: Int32Array, config: PlanConfig, cost: CostModel, groups: SampleGroups | None = None
) -> Sample:
    """Sample the steps that memory is checked on: all, or the heaviest of many."""
    return sample_steps(num_tokens, config, cost, 1, max(4, _HEAVIEST_SEQUENCES // config.global_batch), groups)


def _on_more_steps(choices: list[Choice], search: Search, progress: Progress) -> list[Choice]:
    """Try the fastest choices, and those that take less memory, on all steps of `search`; if none fits, the one that
    takes least memory.
    """
    fitting = sorted((each for each in choices if each.fits), key=lambda choice: choice.step_ns)
    if not fitting:
        fitting = [min(choices, key=lambda choice: choice.memory.total)]
    runnable = [choice for choice in fitting if choice.plan_only is None]
    worth = [fitting[place] for place in _pareto(fitting, runnable=bool(runnable))]
    for of_kind in (fitting, runnable):
        worth += [choice for choice in of_kind[:_CLOSEST] if choice.step_ns <= _CLOSE * of_kind[0].step_ns]
    unique = {(choice.config, choice.cost): choice for choice in worth}
    found = []
    for choice in unique.values():
        made = evaluate(choice.config, choice.cost, search)
        if choice.fits and not made.fits:
            outcome = search.try_out(choice.config, choice.cost)
            made = mixed_again(choice, outcome, search.sample, search) or made
        found.append(made)
        if made.fits:
            search.note(made.config, made.cost, made.step_ns)
        progress("trying the best on more steps", len(found), len(unique))
    return found


def _pick_best(choices: list[Choice], heaviest: Sample, search: Search, *, runnable: bool = False) -> Choice | None:
    """Find the best one of `choices`, or of those that are `runnable`, that fits the `heaviest` steps too.

    Memory measured on these steps is written into `choices`. For a choice with levels layer by layer that does not fit
    them, one with levels that do is appended.
    """
    while acceptable := [one for one in choices if one.fits and not (runnable and one.plan_only)]:
        fastest = min(choice.step_ns for choice in acceptable)
        best = min(
            (choice for choice in acceptable if choice.step_ns <= _SAME * fastest), key=lambda each: each.memory.total
        )
        outcome = try_out(heaviest, best.config, best.cost)
        memory = max(outcome.memory(best.cost), best.memory, key=lambda each: each.total)
        if memory == best.memory:
            return best
        host_bytes = max(outcome.host_bytes(best.cost), best.host_bytes)
        checked = replace(best, memory=memory, host_bytes=host_bytes, fits=memory.total <= search.options.gpu_memory)
        choices[next(place for place, choice in enumerate(choices) if choice is best)] = checked
        if checked.fits:
            return checked
        if len(set(best.cost.levels)) > 1:
            choices += [each for each in [mixed_again(best, outcome, heaviest, search)] if each is not None]
    return None


def _pareto(choices: list[Choice], *, runnable: bool) -> tuple[int, ...]:
    """Return the places of choices that fit and need less memory than all faster ones, if `runnable` of those that the
    runtime can run, and take up to `_SLOWEST` times the fastest; what fits ascends by time."""
    front: list[int] = []
    for place, choice in enumerate(choices):
        takes_less = not front or choice.memory.total < choices[front[-1]].memory.total
        is_slow = bool(front) and choice.step_ns > _SLOWEST * choices[front[0]].step_ns
        if choice.fits and takes_less and not is_slow and not (runnable and choice.plan_only):
            front.append(place)
    return tuple(front)


def _fewest_gpus(sample: Sample, options: TuneOptions, progress: Progress, *, above: int = 0) -> int | None:
    """The fewest GPUs above `above` on which some layout of `options` fits and can be run; None where none is found.

    `sample` has the longest sequences, by which memory goes. Tried are a small ChunkSize and all that saves memory.
    """
    for place, gpus in enumerate(GPU_COUNTS):
        if gpus <= above:
            continue
        progress("fewest GPUs", place + 1, len(GPU_COUNTS))
        for each in _smallest_layouts(options, gpus):
            tried = try_grid(Search(sample, each), each.layouts()[0], each.chunk_sizes, (1,), _ignore)
            if any(choice.fits and choice.plan_only is None for choice in tried):
                return gpus
    return None


def _smallest_layouts(options: TuneOptions, gpus: int) -> Iterator[TuneOptions]:
    """The options of two layouts of `gpus` that take little memory: without a pipeline, and with the longest one."""
    try:
        layouts = replace(options, gpus=gpus, dp=1, pp=1, schedules=None, cp="auto").layouts()
    except UsageError:  # not with so many layers, or sequences a step
        return
    for dp, tp, pp in dict.fromkeys((layouts[0], layouts[-1])):
        yield replace(
            options,
            gpus=None,
            dp=dp,
            tp=tp,
            pp=pp,
            cp="auto",
            schedules=None if pp == 1 else ("auto",),
            sharding="weights" if options.sharding == "auto" and dp > 1 else options.sharding,
            chunk_sizes=(max(_SMALLEST_CHUNK_SIZE, options.chunk_sizes[0]),),
        )


#: Flags by which there are more GPUs.
_FLAGS = "--gpus, --dp, --pp"


def _nothing_fits(smallest: Choice, options: TuneOptions, enough: int | None) -> UsageError:
    memory, layout, shape = smallest.memory, smallest.layout, smallest.cost.shape
    states = memory.weights + memory.gradients + memory.optimizer
    how = [f"ChunkSize {smallest.config.chunk_size:,}", f"K {smallest.config.k}"]
    how += checkpointing_words(smallest.cost.checkpointing)
    how += ["KV offloaded to CPU"] if smallest.cost.kv_offload else []
    how += [ZERO[smallest.cost.sharding]] if layout.dp > 1 else []
    everything = options.sharding in ("auto", "weights")
    fits_in_8_bits = False
    if options.optimizer == "adamw" and not options.lora_rank:
        share = optimizer_bytes(replace(smallest.cost, optimizer="adamw-8bit")) / optimizer_bytes(smallest.cost)
        fits_in_8_bits = memory.total - memory.optimizer * (1 - share) <= options.gpu_memory
    return UsageError(
        f"nothing fits {options.gpu_memory / 2**30:.1f} GiB a GPU with dp {layout.dp}, tp {layout.tp}, pp {layout.pp}: "
        f"the least is {memory.total / 2**30:.1f} GiB ({', '.join(how)}), of which weights, gradients and optimizer "
        f"take {states / 2**30:.1f} GiB",
        hint=f"more GPUs ({f'--gpus {typed_gpus(enough, options.hardware.name)} is enough' if enough else _FLAGS})"
        + ("" if everything else ", --sharding auto")
        + (", --optimizer adamw-8bit" if fits_in_8_bits else "")
        + ("" if options.lora_rank else ", adapters (--lora-rank)")
        + ("" if options.load_in_4bit or not options.lora_rank or shape.has_experts else ", --load-in-4bit")
        + ", or more memory",
    )
