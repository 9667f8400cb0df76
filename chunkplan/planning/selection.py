"""Which sequences an epoch holds, and how often: a part held out for evaluation, and sources mixed by weight.

Whether a sequence is held out follows from its tokens alone, so that copies of a text are never on both sides. The
planner builds with what `expected_copies` says, and the validator checks against it.

A config has these entries, each of which may be missing: `holdout`, a share in (0, 1) or a number of sequences;
`part`, "train" (the default) or "eval", the sequences that are held out; `mix`, weights by the path of a source, 1 for
those that are not named; `seed` of the shuffles that the mix takes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.manifest import Selection, SourceSelection

#: Sets the shuffles of sources apart from those of epochs, which are seeded by (seed, epoch).
_MIX_STREAM = 1


def expected_copies(analysis: Analysis, config: PlanConfig, epoch: int) -> Int32Array:
    """How often each sequence occurs in an epoch (from 0) of a plan with this config, int32 [num_sequences].

    A share f holds out the sequences with a content key below f * 2^64: which these are depends on nothing else. A
    number N holds out the N smallest keys, and the copies of the last of them. More data can push a sequence out of
    the N, never into them: what was trained on stays in training, and only what is new, or was held out, changes sides.

    Part "eval" has what is held out once in every epoch, whatever the mix. Part "train" has the others. Of a source
    with n of these and weight w an epoch takes m = w * n (half rounded up) from an endlessly repeated shuffle, from
    where the epoch before stopped: from the first epoch on, its sequences occur equally often to within one. The
    shuffle depends on the seed, the source's place among the sources, and n. Weights count as they are written: 0.1
    is 1/10.

    `check_selection` says whether a config makes sense.
    """
    mix = config.mix or {}
    if config.holdout is None and not mix:
        return np.broadcast_to(np.ones(1, np.int32), analysis.num_sequences)  # takes no memory
    held_out = _held_out(analysis, config.holdout)
    if config.part == "eval":
        return held_out.astype(np.int32)
    copies = (~held_out).astype(np.int32)
    for source, path in enumerate(_paths(analysis)):
        if path in mix:
            own = np.flatnonzero((analysis.source == source) & ~held_out)
            if own.size:
                copies[own] = _draw(own.size, Fraction(str(mix[path])), [config.seed, source, _MIX_STREAM], epoch)
    return copies


def resolve_mix(analysis: Analysis, mix: Mapping[str, float]) -> dict[str, float]:
    """`mix` with the paths that the analysis has for its sources; a source may be named by its file name alone.

    Raises:
        UsageError: a name is that of no source, of several, or of one named before; or the analysis has no sources.
    """
    paths = list(dict.fromkeys(_paths(analysis)))
    resolved: dict[str, float] = {}
    for name, weight in mix.items():
        found = [name] if name in paths else [path for path in paths if Path(path).name == name]
        if not found:
            raise _unknown_source(name, analysis, paths)
        if len(found) > 1:
            raise UsageError(
                f"{name} names {len(found)} sources of the analysis: {_shortened(found)}",
                hint="name the source by its whole path",
            )
        if found[0] in resolved:
            raise UsageError(f"the source {found[0]} has two weights", hint="name every source at most once")
        resolved[found[0]] = weight
    return resolved


def check_selection(analysis: Analysis, config: PlanConfig) -> None:
    """Refuse a config that selects nothing or cannot be meant. Names in its mix are whole paths (see `resolve_mix`).

    Raises:
        UsageError: no sequence is left for training or for evaluation; a source of the mix is not in the analysis; the
            weights leave nothing.
        DataError: the tokens cannot be read.
    """
    _check_holdout(analysis, config)
    mix = config.mix or {}
    paths = _paths(analysis)
    for name in mix:
        if name not in paths:
            raise _unknown_source(name, analysis, paths)
    if mix and not expected_copies(analysis, config, 0).any():
        raise UsageError(
            "these weights leave no sequence for training", hint="raise a weight: of n sequences an epoch takes w * n"
        )


def describe_selection(analysis: Analysis, config: PlanConfig) -> Selection:
    """Counts for a manifest: sequences in the analysis, of these held out, and occurrences in the first epoch.

    In total, and for each source of the analysis in its order.
    """
    is_held_out, copies = _held_out(analysis, config.holdout), expected_copies(analysis, config, 0)  # [num_sequences]
    sources = []
    for source, path in enumerate(_paths(analysis)):
        own = analysis.source == source  # [num_sequences]
        sources.append(
            SourceSelection(
                path=path,
                num_sequences=int(own.sum()),
                num_held_out=int(is_held_out[own].sum()),
                num_occurrences=int(copies[own].sum(dtype=np.int64)),
            )
        )
    return Selection(
        num_sequences=analysis.num_sequences,
        num_held_out=int(is_held_out.sum()),
        num_occurrences=int(copies.sum(dtype=np.int64)),
        sources=sources,
    )


def _held_out(analysis: Analysis, holdout: float | int | None) -> BoolArray:
    if holdout is None:
        return np.broadcast_to(np.zeros(1, bool), analysis.num_sequences)
    keys = analysis.content_keys
    if isinstance(holdout, float):
        return keys < np.uint64(math.ceil(Fraction(str(holdout)) * 2**64))
    last = min(holdout, len(keys)) - 1
    threshold: np.uint64 = np.partition(keys, last)[last]
    return keys <= threshold


def _draw(num_sequences: int, weight: Fraction, seed: Sequence[int], epoch: int) -> Int32Array:
    """How often an epoch takes each of the sequences of a source, int32 [num_sequences]."""
    num_taken = math.floor(weight * num_sequences + Fraction(1, 2))
    times, rest = divmod(num_taken, num_sequences)
    if not rest:
        return np.full(num_sequences, times, np.int32)
    first = epoch * num_taken % num_sequences
    # As in the shuffles of epochs: numpy keeps PCG64's raw stream stable between versions.
    order = np.argsort(np.random.PCG64(np.random.SeedSequence(seed)).random_raw(num_sequences), kind="stable")
    copies = np.empty(num_sequences, np.int32)
    copies[order] = times + ((np.arange(num_sequences) - first) % num_sequences < rest)
    return copies


def _check_holdout(analysis: Analysis, config: PlanConfig) -> None:
    holdout = config.holdout
    if holdout is None:
        return
    num_sequences, num_held_out = analysis.num_sequences, int(_held_out(analysis, holdout).sum())
    if num_held_out in (0, num_sequences):
        what, left = ("none", "evaluation") if num_held_out == 0 else ("all", "training")
        raise UsageError(
            f"a holdout of {holdout} takes {what} of the {num_sequences:,} sequences: none is left for {left}",
            hint=f"{'raise' if num_held_out == 0 else 'lower'} it, or analyze more data",
        )


def _paths(analysis: Analysis) -> list[str]:
    return [source["path"] for source in analysis.manifest.get("sources", [])]


def _unknown_source(name: str, analysis: Analysis, paths: Sequence[str]) -> UsageError:
    if not paths:
        return UsageError(
            f"there is no source {name}: {analysis.path} holds lengths without sources",
            hint="analyze the data files themselves to mix them by weight",
        )
    return UsageError(f"the analysis has no source {name}", hint=f"its sources are {_shortened(paths)}")


def _shortened(paths: Sequence[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
