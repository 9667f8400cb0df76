"""Selection of the sequences of an epoch: a held-out part for evaluation, and sources mixed by weight.

The tokens alone decide if a sequence is held out, so that copies of a text are never on both sides. Sequences that come
in one step, a group, share what its first one has: its key, its source, its place in a shuffle. The planner builds with
`expected_copies`, and the validator checks against it.

A config has these entries, each of which may be missing: `holdout`, a share in (0, 1) or a number of sequences;
`part`, "train" (the default) or "eval", the sequences that are held out; `mix`, weights by the path of a source, 1 for
those that are not named; `seed` of the shuffles that the mix takes from. `resolve_mix` turns a user's mix, which may
have shares and folders, into weights of paths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.config.plan import PlanConfig, read_share
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.source_columns import is_named
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.manifest import Selection, SourceSelection

#: Sets the shuffles of sources apart from those of epochs, which are seeded by (seed, epoch).
_MIX_STREAM = 1


def expected_copies(analysis: Analysis, config: PlanConfig, epoch: int) -> Int32Array:
    """Occurrences of each sequence in an epoch (from 0) of a plan with this config, int32 [num_sequences].

    A share f holds out the sequences with a content key below f * 2^64: which these are depends on nothing else. A
    number N holds out the N smallest keys, and the copies of the last of them. More data can push a sequence out of
    the N, never into them: what was trained on stays in training, and only what is new, or was held out, changes sides.

    If the analysis has sources for evaluation, exactly their sequences are held out, and other sequences with the same
    tokens as one of these are in neither part.

    Part "eval" has what is held out once in every epoch, whatever the mix. Part "train" has the others. Of a source
    with n of these and weight w an epoch takes m = w * n (half rounded up) from an endlessly repeated shuffle, from
    where the epoch before stopped: from the first epoch on, its sequences occur equally often to within one. The
    shuffle depends on the seed, the source's place among the sources, and n. Weights count as they are written: 0.1
    is 1/10. Of groups all of this is so of whole groups.

    `check_selection` says whether a config makes sense.
    """
    mix = config.mix or {}
    held_out = _held_out(analysis, config.holdout)
    if config.part == "eval":
        return held_out.astype(np.int32)
    if not held_out.any() and not mix:
        return np.broadcast_to(np.ones(1, np.int32), analysis.num_sequences)  # takes no memory
    is_trained = _is_trained(analysis, config.holdout)
    copies = is_trained.astype(np.int32)
    is_drawn = is_trained if analysis.group is None else is_trained & (analysis.group == np.arange(is_trained.size))
    for source, path in enumerate(_paths(analysis)):
        if path in mix:
            own = np.flatnonzero((analysis.source == source) & is_drawn)
            if own.size:
                copies[own] = _draw(own.size, Fraction(str(mix[path])), [config.seed, source, _MIX_STREAM], epoch)
    return copies if analysis.group is None else copies[analysis.group]


def resolve_mix(
    analysis: Analysis, mix: Mapping[str, float | str], holdout: float | int | None = None
) -> dict[str, float]:
    """Weights of sources by their path in the analysis, from `mix`, which has weights or shares by name.

    A name is a path, the end of one source's path alone, or a folder or a pattern, which stands for all of its sources.
    Weights are taken as they are. Shares, such as "70%", become weights with which an epoch has as many sequences as
    the sources in use together, and each name its share of these; sources without a name get the rest in proportion, or
    nothing.

    Raises:
        UsageError: a name is that of no source, of several, or of one named before; the analysis has no sources; shares
            stand beside weights, or do not add up.
    """
    groups: dict[str, list[str]] = {}
    for name in mix:
        groups[name] = found = _named(analysis, name)
        if twice := next((path for path in found for other in groups if other != name and path in groups[other]), None):
            raise UsageError(f"the source {twice} has two weights", hint="name every source at most once")
    shares = {name: share for name, weight in mix.items() if (share := read_share(weight)) is not None}
    if not shares:
        weights: dict[str, float] = {path: mix[name] for name, found in groups.items() for path in found}  # type: ignore[misc]
        return weights
    if len(shares) < len(mix):
        raise UsageError("--mix has shares, such as 70%, beside numbers", hint="give shares of all, or numbers of all")
    return _weights_of(analysis, groups, shares, holdout)


def _weights_of(
    analysis: Analysis, groups: Mapping[str, list[str]], shares: Mapping[str, Fraction], holdout: float | int | None
) -> dict[str, float]:
    """The weights by path with which each of the `groups` of paths has its share of an epoch."""
    is_trained = _is_trained(analysis, holdout)
    counts = dict.fromkeys(_paths(analysis), 0)
    for source, path in enumerate(_paths(analysis)):
        counts[path] += int((is_trained & (analysis.source == source)).sum())
    named = {path for found in groups.values() for path in found}
    parts = [(groups[name], share, name) for name, share in shares.items()]
    others = [path for path in counts if path not in named and counts[path]]
    rest = 1 - sum(shares.values(), Fraction())
    if rest < 0 or (rest and not others):
        needed = "100% or less" if others else "100%, as every source is named"
        raise UsageError(
            f"the shares of --mix add up to {float(100 * (1 - rest)):g}%", hint=f"they have to be {needed}"
        )
    parts.append((others, rest, "what is not named"))
    num_taken = sum(counts[path] for found, share, _ in parts if share for path in found)
    weights: dict[str, float] = {}
    for found, share, name in parts:
        number = sum(counts[path] for path in found)
        if share and not number:
            message = f"the shares of --mix name {name}, which has no sequence to train on"
            raise UsageError(message, hint="leave it out")
        weights |= dict.fromkeys(found, float(share * num_taken / number) if share else 0.0)
    return weights


def _named(analysis: Analysis, name: str) -> list[str]:
    """The paths of the sources that `name` is for."""
    paths = list(dict.fromkeys(_paths(analysis)))
    sources = analysis.manifest.get("sources", [])
    evaluated = {source["path"] for source in sources if source.get("part") == "eval"}
    paths = [path for path in paths if path not in evaluated]
    if name in paths:
        return [name]
    ends = [path for path in paths if is_named(path, name)]
    if len(ends) > 1 and not any(sign in name for sign in "*?["):
        raise UsageError(
            f"{name} names {len(ends)} sources of the analysis: {_shortened(ends)}",
            hint="name the source by its whole path, or all of them by a pattern",
        )
    found = ends or [path for path in paths if f"/{name.strip('/')}/" in f"/{path}"]
    if not found:
        raise _unknown_source(name, analysis, paths)
    return found


@dataclass(frozen=True)
class SourceShare:
    """Share of a trainable source in the first epoch of a plan.

    Of its `num_sequences` it leaves out `num_skipped` and has `num_repeated` more than once: `num_occurrences`, with
    `num_tokens` together.
    """

    path: str
    num_sequences: int
    num_skipped: int
    num_repeated: int
    num_occurrences: int
    num_tokens: int


def describe_mix(analysis: Analysis, config: PlanConfig) -> list[SourceShare]:
    """Shares in the first epoch of each source with trainable sequences; names are whole paths."""
    copies, is_trained = expected_copies(analysis, config, 0), _is_trained(analysis, config.holdout)
    found = []
    for source, path in enumerate(_paths(analysis)):
        own = np.flatnonzero((analysis.source == source) & is_trained)
        times: Int64Array = copies[own].astype(np.int64)
        if own.size:
            num_tokens = int((times * analysis.num_tokens[own]).sum())
            counts = (own.size, int((times == 0).sum()), int((times > 1).sum()), int(times.sum()), num_tokens)
            found.append(SourceShare(path, *counts))
    return found


def check_selection(analysis: Analysis, config: PlanConfig) -> None:
    """Refuse a config that selects nothing or cannot be meant. Names in its mix are whole paths (see `resolve_mix`).

    Raises:
        UsageError: no sequence is left for training or for evaluation; a source of the mix is not in the analysis; the
            weights leave nothing; a group has more sequences than a step.
        DataError: the tokens cannot be read.
    """
    _check_holdout(analysis, config)
    check_groups(analysis, config.global_batch)
    if config.part == "eval" and not _held_out(analysis, config.holdout).any():
        raise UsageError(
            "part is eval, but nothing is held out: there is nothing to evaluate on",
            hint="hold out a share or a number of sequences, for example holdout = 0.01",
        )
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


def _is_trained(analysis: Analysis, holdout: float | int | None) -> BoolArray:
    """True for sequences that may be trained: neither held out nor equal to one to evaluate on."""
    is_trained: BoolArray = ~whole_groups(analysis, _held_out(analysis, holdout) | analysis.is_evaluated_elsewhere)
    return is_trained


def whole_groups(analysis: Analysis, chosen: BoolArray) -> BoolArray:
    """All that is chosen, and the other sequences of its groups."""
    if analysis.group is None:
        return chosen
    is_named = np.zeros(chosen.size, bool)
    is_named[analysis.group[chosen]] = True
    return is_named[analysis.group]


def _held_out(analysis: Analysis, holdout: float | int | None) -> BoolArray:
    if holdout is None:
        return whole_groups(analysis, analysis.is_evaluation)
    keys = analysis.content_keys if analysis.group is None else analysis.content_keys[analysis.group]
    if isinstance(holdout, float):
        return keys < np.uint64(math.ceil(Fraction(str(holdout)) * 2**64))
    last = min(holdout, len(keys)) - 1
    threshold: np.uint64 = np.partition(keys, last)[last]
    return keys <= threshold


def _draw(num_sequences: int, weight: Fraction, seed: Sequence[int], epoch: int) -> Int32Array:
    """Occurrences of each of the sequences of a source in an epoch, int32 [num_sequences]."""
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
        if analysis.is_evaluation.all():
            raise UsageError("all sequences are of files to evaluate on", hint="analyze files to train on too")
        return
    if analysis.is_evaluation.any():
        raise UsageError(
            f"a holdout of {holdout}, but the analysis has files to evaluate on",
            hint="leave --holdout out, or analyze the files to train on alone",
        )
    num_sequences, num_held_out = analysis.num_sequences, int(_held_out(analysis, holdout).sum())
    if num_held_out in (0, num_sequences):
        what, left = ("none", "evaluation") if num_held_out == 0 else ("all", "training")
        raise UsageError(
            f"a holdout of {holdout} takes {what} of the {num_sequences:,} sequences: none is left for {left}",
            hint=f"{'raise' if num_held_out == 0 else 'lower'} it, or analyze more data",
        )


def has_reference(analysis: Analysis) -> bool:
    """True if target tokens have log-probabilities of a reference model."""
    return "reference_log_probs" in analysis.token_columns


def check_groups(analysis: Analysis, global_batch: int) -> None:
    """Raise UsageError where a group has more sequences than a step; DataError where a group is none."""
    group = analysis.group
    if group is None:
        return
    if (group < 0).any() or (group > np.arange(group.size)).any() or (group[group] != group).any():
        hint = f"`chunkplan validate {analysis.path}` says where; analyze again"
        raise DataError("sequences are of groups that do not begin before them", where=str(analysis.path), hint=hint)
    sizes = np.bincount(group)
    largest = int(sizes.argmax())
    if sizes[largest] > global_batch:
        raise UsageError(
            f"{sizes[largest]:,} sequences belong in one step, the group of sequence {largest}, and a global batch has "
            f"{global_batch:,}",
            where=analysis.place(largest),
            hint=f"use a --global-batch of {sizes[largest]} or more, or leave some of them out of the data",
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
