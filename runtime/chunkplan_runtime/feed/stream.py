"""Joins a plan with the tokens of its analysis: for every step and rank, the actions and what their chunks hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import DataError, UsageError, one_line
from chunkplan.operations import BACKWARDS, FORWARDS, KEPT_ATTENTION, OPS
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.likeness import changed_samples, how_to_build_like, samples_of
from chunkplan.planfile.load import load_plan, load_same_analysis
from chunkplan.planfile.plan import VALIDATE_HINT, Action, Chunk, Plan, PlanStep
from chunkplan_runtime.devices import pinned
from chunkplan_runtime.feed.samples import SampleReader, StepSamples
from chunkplan_runtime.layout import (
    RankLayout,
    Run,
    SharedPart,
    Span,
    block_of,
    check_sharing,
    one_pipeline,
    refuse_other_replicas,
    shared_part,
)
from chunkplan_runtime.trees import Prefixes, join_trees

T = TypeVar("T")

#: The label of a position that predicts nothing.
NO_TARGET = -100

#: Marks the end of the items that are read ahead.
_END: Any = object()


def shifted_labels(input_ids: Int32Array, target: npt.NDArray[np.bool_]) -> Int32Array:
    """The label of every position of a sequence: the next token where that is a target, else `NO_TARGET`.

    For a segment, give one token more than it has: the target across its border counts.
    """
    labels = np.full(len(input_ids), NO_TARGET, np.int32)
    np.copyto(labels[:-1], input_ids[1:], where=target[1:])
    return labels


@dataclass(frozen=True)
class ChunkTensors:
    """A chunk as the model takes it: input_ids and position_ids int32 [1, num_tokens], labels int32 [num_tokens].

    Labels are shifted already: entry i is the token that position i predicts, or `NO_TARGET`. A zero-loss chunk is one
    padding token that predicts nothing. Of a chunk that other processes have slices of, `spans` are those of this one,
    and `shared` is the whole. Of a chunk with trees, `joined` are the spans with each tree, or part of one, as one; and
    `begun` those of sequences that begin with tokens of others here; `counts` [num_tokens] says how many sequences have
    each token, where some have more than one.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    spans: tuple[Span, ...]
    shared: SharedPart | None = None
    joined: tuple[Span, ...] = ()
    begun: tuple[Span, ...] = ()
    counts: Tensor | None = None

    @property
    def attended(self) -> tuple[Span, ...]:
        """The spans in which attention takes the chunk."""
        return self.joined or self.spans

    @property
    def of_sequences(self) -> tuple[Span, ...]:
        """All spans of sequences, of which several may have the same tokens of a tree."""
        return *self.spans, *self.begun

    @cached_property
    def rows(self) -> Tensor:
        """The tokens of the chunk in `of_sequences`, one span after another: int64 [n]."""
        return torch.cat([torch.arange(span.chunk_start, span.chunk_stop) for span in self.of_sequences])

    @property
    def parts(self) -> list[Span]:
        """The parts of sequences whose keys and values other chunks, or other processes, need."""
        if self.shared is None:
            return [span for span in self.attended if span.is_split]
        return [self.shared.span] if self.shared.span.is_split or self.shared.is_paged else []


def padding_tensors() -> ChunkTensors:
    """The tensors of a zero-loss chunk: one padding token without a target."""
    token = torch.zeros(1, 1, dtype=torch.int32)
    label = torch.tensor([NO_TARGET], dtype=torch.int32)
    return ChunkTensors(token, token, label, (Span(-1, 0, 1, length=1, chunk_start=0),))


@dataclass(frozen=True)
class RankWork:
    """The work of one data-parallel rank, or a stage of it, in one step; `chunks` and their `tensors` by chunk_id."""

    step: int
    dp_rank: int
    actions: list[Action]
    chunks: dict[int, Chunk]
    tensors: dict[int, ChunkTensors]


@dataclass(frozen=True)
class StepWork:
    """One optimizer step of a plan: its row, and the work of a process's data-parallel ranks in order of dp_rank.

    `reduces_early`: whether gradients may be reduced in the last backwards of its processes (`may_reduce`). `samples`:
    what sequences have beside tokens; None where they are ordinary.
    """

    step: PlanStep
    ranks: list[RankWork]
    plan: Plan
    reduces_early: bool
    samples: StepSamples | None = None

    @property
    def last(self) -> RankWork | None:
        """The work whose last action is this process's last one, if gradients may be reduced in it."""
        return next((work for work in reversed(self.ranks) if self.reduces_early and work.actions), None)


def _outdated(message: str, path: Path) -> DataError:
    return DataError(message, where=str(path), hint="build the plan again")


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield `items`, of which a thread makes up to `depth` ahead; an error is raised where its item would have come."""
    pool = ThreadPoolExecutor(1, "chunkplan-read-ahead")
    try:
        coming: deque[Future[T]] = deque(pool.submit(next, items, _END) for _ in range(depth))
        while (item := coming.popleft().result()) is not _END:
            coming.append(pool.submit(next, items, _END))
            yield item
    finally:
        with suppress(RuntimeError):  # the garbage collector may come here in the thread itself
            pool.shutdown(cancel_futures=True)


def open_plan(
    plan: str | Path, analysis: str | Path | None = None, *, dp: int = 1, pp: int = 1, option: str = "analysis="
) -> tuple[Plan, Analysis]:
    """Open a plan for `pp` pipeline stages and the analysis it was built from: at `analysis`, or where the plan says.

    `dp`: how many replicas there are of each stage, and `option`: what says where the analysis is, for hints. Raises
    UsageError: one is not there, or the plan is for other stages or for what the runtime does not do; DataError: one is
    damaged, or the analysis is not the plan's.
    """
    opened = load_plan(plan)
    check_runnable(opened)
    if opened.config.pp != pp:
        raise UsageError(
            f"the plan is for {opened.config.pp} pipeline stages, {'one is' if pp == 1 else f'{pp} are'} there",
            where=str(opened.path),
            hint=f"`{how_to_build_like(opened, dp, pp)}` builds one of the same steps for these; or train with "
            f"`chunkplan train --nproc {opened.config.pp}`",
        )
    return opened, load_same_analysis(opened, analysis, option=option)


class PlanStream(IterableDataset[StepWork]):
    """The steps of a plan with their tokens: iterate over it, or give it to a `DataLoader(stream, batch_size=None)`.

    An iteration begins at the stream's position and moves it. A thread makes up to `prefetch` steps ahead; with 0 there
    is none. With `pin_memory` tensors lie in page-locked memory where there is CUDA. In a DataLoader with workers one
    of them does it all, and the stream here does not move: what comes next is `work.step.step + 1`. `layout`: of
    several processes each has a stream of its own, of the work of its stage and data-parallel ranks. Raises UsageError:
    the analysis has no tokens, a token is not in the vocabulary, or a sequence is longer than `max_positions` (None:
    any may be); or see `refuse_other_replicas`.
    """

    def __init__(
        self,
        plan: Plan,
        analysis: Analysis,
        *,
        vocab_size: int,
        max_positions: int | None,
        prefetch: int = 2,
        pin_memory: bool = False,
        layout: RankLayout | None = None,
    ) -> None:
        if prefetch < 0:
            raise UsageError(f"prefetch is {prefetch}", hint="give a number of steps, 0 for no thread")
        _check_fits(analysis, vocab_size, max_positions)
        self._layout = layout or one_pipeline(plan)
        refuse_other_replicas(plan, self._layout.dp, then="open that, which goes on from a position in this one")
        self._plan, self._analysis, self._vocab_size = plan, analysis, vocab_size
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._next = 0

    @property
    def num_steps(self) -> int:
        """The number of steps of the plan."""
        num_steps: int = self._plan.manifest["totals"]["num_steps"]
        return num_steps

    def __len__(self) -> int:
        """The number of steps that are left, of `num_steps`."""
        return self.num_steps - self._next

    def state_dict(self) -> dict[str, Any]:
        """The position: which samples the plan's steps have, and the step after the last one that was handed out."""
        return {"samples": samples_of(self._plan.manifest), "step": self._next}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Begin the next iteration at a position from `state_dict`, of this plan or one like it.

        Raises UsageError: it is of a plan whose steps have other samples, or not a position.
        """
        samples, step = state.get("samples"), state.get("step")
        if changes := changed_samples(samples, samples_of(self._plan.manifest)):
            raise UsageError(
                f"the position is of another plan: {changes}",
                where=str(self._plan.path),
                hint="go on with the plan that the run began with, or begin a run of its own with this one",
            )
        if type(step) is not int or not 0 <= step <= self.num_steps:
            raise UsageError(
                f"the position is step {step!r}, the plan has {self.num_steps} steps",
                where=str(self._plan.path),
                hint="give what `state_dict` returned",
            )
        self._next = step

    def __iter__(self) -> Iterator[StepWork]:
        """The steps from the position on.

        Raises DataError: plan or analysis are damaged, or do not belong together; UsageError: a token is not in the
        model's vocabulary.
        """
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return
        steps = self._read()
        with closing(read_ahead(steps, self._prefetch) if self._prefetch else steps) as coming:
            for work in coming:
                self._next = work.step.step + 1
                if self._pin_memory and worker is None:
                    # Not in the thread that reads ahead: pinning may wait for the device, and no step is at work here.
                    work = replace(work, ranks=[_pinned(rank) for rank in work.ranks])
                yield work

    def _read(self) -> Generator[StepWork, None, None]:
        reader = self._analysis.tokens()
        read_samples = SampleReader(self._analysis, reader)
        dp_ranks = self._layout.dp_ranks(self._plan.config.dp)
        for step in self._plan.iter_steps(self._next):
            for dp_rank in dp_ranks:
                _check_words(step, dp_rank)
                check_sharing(step, dp_rank)
                _check_links(step, dp_rank, self._layout)
            ranks = [self._with_tensors(work, reader, step.prefixes) for work in self._work_of(step, dp_ranks)]
            reduces_early = self._plan.config.cp == "off" or may_reduce(self._last_chunks(step))
            yield StepWork(step, ranks, self._plan, reduces_early, read_samples(step, dp_ranks))

    def _work_of(self, step: PlanStep, dp_ranks: range) -> list[RankWork]:
        """The work of a step for the process of these ranks on this stage, without tensors."""
        works = []
        for dp_rank in dp_ranks:
            if dp_rank in step.chunks or (dp_rank, 0) in step.actions:
                chunks = {chunk.chunk_id: chunk for chunk in step.chunks.get(dp_rank, [])}
                actions = step.actions.get((dp_rank, self._layout.stage), [])
                works.append(RankWork(step.step, dp_rank, actions, chunks, {}))
        return works

    def _last_chunks(self, step: PlanStep) -> list[Chunk | None]:
        """The chunk that each process of this stage runs backward last."""
        rows = self._layout.rows(self._plan.config.dp)
        works = [[work for work in self._work_of(step, row) if work.actions] for row in rows]
        return [each[-1].chunks.get(each[-1].actions[-1].chunk_id) if each else None for each in works]

    def _with_tensors(self, work: RankWork, reader: TokenReader, prefixes: Prefixes) -> RankWork:
        how = reader.gather, self._lengths, self._vocab_size, self._plan.path
        tensors = chunk_tensors([*work.chunks.values()], prefixes, *how)
        for each in tensors.values():
            self._compare_begun(each, reader)
        shared = [chunk for chunk in work.chunks.values() if chunk.cp_size > 1]
        parts: dict[int | None, list[Run]] = {}  # by its group, where each chunk of a shared sequence lies in it
        for chunk in shared:
            parts.setdefault(chunk.group_id, []).append((chunk.prefix_tokens, chunk.prefix_tokens + chunk.cp_tokens))
        for chunk in shared:
            part = shared_part(chunk, parts[chunk.group_id], work.dp_rank)
            tensors[chunk.chunk_id] = replace(tensors[chunk.chunk_id], shared=part)
        return replace(work, tensors=tensors)

    def _compare_begun(self, tensors: ChunkTensors, reader: TokenReader) -> None:
        """Refuse sequences that begin with tokens of others in a chunk, where these are not their own tokens."""
        if not tensors.begun:
            return
        columns = zip(*((span.sequence_id, span.start, span.stop) for span in tensors.begun), strict=True)
        sequence_ids, starts, stops = map(np.array, columns)
        self._lengths(sequence_ids, starts, stops + 1)
        input_ids, _ = reader.gather(sequence_ids, starts, stops)
        next_ids, next_target = reader.gather(sequence_ids, starts + 1, stops + 1)
        rows = tensors.rows[-len(input_ids) :]
        same_ids = tensors.input_ids[0, rows].numpy() == input_ids
        same = same_ids & (tensors.labels[rows].numpy() == np.where(next_target, next_ids, NO_TARGET))
        for wrong in np.flatnonzero(~same)[:1]:
            span = tensors.begun[int(np.searchsorted(np.cumsum(stops - starts), wrong, side="right"))]
            token = int(tensors.position_ids[0, rows[wrong]]) + bool(same_ids[wrong])
            raise DataError(
                f"token {token} of sequence {span.sequence_id}, or whether it is a target, is not as in the sequence "
                f"whose tokens {span.start} to {span.stop} the plan takes for its own",
                where=self._analysis.place(span.sequence_id),
                hint="build the plan again",
            )

    def _lengths(self, sequence_ids: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """The lengths of the sequences, after a check that the analysis has them with the hashes of the plan."""
        wrong = np.flatnonzero((sequence_ids < 0) | (sequence_ids >= self._analysis.num_sequences))
        if wrong.size:
            raise _outdated(f"there is no sequence {sequence_ids[wrong[0]]}", self._analysis.path)
        lengths = self._analysis.num_tokens[sequence_ids].astype(np.int64)
        for first in np.flatnonzero((starts < 0) | (starts >= stops) | (stops > lengths))[:1]:
            raise _outdated(
                f"sequence {sequence_ids[first]} has {lengths[first]} tokens; "
                f"the plan asks for {starts[first]} to {stops[first]}",
                self._analysis.path,
            )
        return lengths


def chunk_tensors(
    chunks: Sequence[Chunk],
    prefixes: Prefixes,
    gather: Callable[[Int64Array, Int64Array, Int64Array], tuple[Int32Array, npt.NDArray[np.bool_]]],
    lengths_of: Callable[[Int64Array, Int64Array, Int64Array], Int64Array],
    vocab_size: int,
    where: Path,
) -> dict[int, ChunkTensors]:
    """The tensors of chunks by chunk_id, of those with segments views of one for all of them.

    In numpy passes over all of a rank's, with next to nothing done for each segment. `prefixes`: those of the step.
    `gather` gives the tokens of segments, see `TokenReader.gather`, `lengths_of` the lengths of their sequences. Raises
    UsageError: a token is not in the vocabulary; DataError: chunks of the plan `where` hold something else than it
    counted.
    """
    tensors = {chunk.chunk_id: padding_tensors() for chunk in chunks if not chunk.segments}
    chunks = [chunk for chunk in chunks if chunk.segments]
    if not chunks:
        return tensors
    segments = [segment for chunk in chunks for segment in chunk.segments]
    sequence_ids = np.array([segment.sequence_id for segment in segments])  # [num_segments], as all below
    starts = np.array([segment.start for segment in segments])
    stops = np.array([segment.end for segment in segments])
    lengths = lengths_of(sequence_ids, starts, stops)
    sizes = stops - starts
    read_stops = np.cumsum(sizes)  # [num_segments]: where each lies in what is read
    read_starts = read_stops - sizes
    input_ids, target = gather(sequence_ids, starts, stops)
    if input_ids.min() < 0 or input_ids.max() >= vocab_size:
        wrong = int(np.flatnonzero((input_ids < 0) | (input_ids >= vocab_size))[0])
        segment = int(np.searchsorted(read_stops, wrong, side="right"))
        raise UsageError(
            f"token {starts[segment] + wrong - read_starts[segment]} of sequence {sequence_ids[segment]} is id "
            f"{input_ids[wrong]}, the model's vocabulary has {vocab_size:,}",
            hint="analyze with the tokenizer that belongs to the model",
        )
    labels = shifted_labels(input_ids, target)
    # A segment's last token predicts what its own sequence goes on with, in this chunk or not.
    labels[read_stops - 1] = NO_TARGET
    cut = np.flatnonzero(stops < lengths)
    next_ids, next_target = gather(sequence_ids[cut], stops[cut], stops[cut] + 1)
    labels[read_stops[cut] - 1] = np.where(next_target, next_ids, NO_TARGET)
    num_segments = [len(chunk.segments) for chunk in chunks]
    edges = np.concatenate([[0], read_stops])[np.cumsum([0, *num_segments])]  # [num_chunks + 1]
    targets = np.add.reduceat((labels != NO_TARGET).astype(np.int64), edges[:-1])
    for chunk, num_tokens, found in zip(chunks, np.diff(edges).tolist(), targets.tolist(), strict=True):
        if found != chunk.num_target_tokens or num_tokens != chunk.num_tokens:
            raise _outdated(
                f"chunk {chunk.chunk_id} has {num_tokens} tokens with {found} targets; "
                f"the plan counted {chunk.num_tokens} with {chunk.num_target_tokens}",
                where,
            )
    chunk_starts = read_starts - np.repeat(edges[:-1], num_segments)
    groups = [chunk.group_id for chunk in chunks for _ in chunk.segments]
    columns = (column.tolist() for column in (sequence_ids, starts, stops, lengths, chunk_starts))
    spans = map(Span, *columns, groups)
    positions = (np.arange(len(input_ids)) + np.repeat(starts - read_starts, sizes)).astype(np.int32)
    of_all = torch.from_numpy(input_ids)[None], torch.from_numpy(positions)[None], torch.from_numpy(labels)
    by_chunk = [torch.split(tensor, np.diff(edges).tolist(), -1) for tensor in of_all]
    for chunk, ids, places, targets in zip(chunks, *by_chunk, strict=True):
        tensors[chunk.chunk_id] = ChunkTensors(ids, places, targets, tuple(islice(spans, len(chunk.segments))))
    if prefixes:
        own = {chunk.chunk_id: tensors[chunk.chunk_id].spans for chunk in chunks}
        for chunk_id, (joined, begun) in join_trees(chunks, own, prefixes).items():
            tree = replace(tensors[chunk_id], joined=joined, begun=begun)
            counts = torch.bincount(tree.rows, minlength=len(tree.labels)) if begun else None
            tensors[chunk_id] = replace(tree, counts=counts)
    return tensors


def _pinned(work: RankWork) -> RankWork:
    """`work` with its tensors in page-locked memory."""
    tensors = {}
    for chunk_id, each in work.tensors.items():
        input_ids, position_ids, labels = map(pinned, (each.input_ids, each.position_ids, each.labels))
        counts = None if each.counts is None else pinned(each.counts)
        tensors[chunk_id] = replace(each, input_ids=input_ids, position_ids=position_ids, labels=labels, counts=counts)
    return replace(work, tensors=tensors)


def check_runnable(plan: Plan) -> None:
    """Raise UsageError of a plan for what the runtime does not do, naming it."""
    tp = plan.manifest["predictions"]["cost_model"]["tp"]
    if tp > 1:
        raise UsageError(
            f"the plan is for tensor parallelism (tp {tp}), which the runtime does not do",
            where=str(plan.path),
            hint="build it with `--tp 1`, and more --dp or --pp",
        )


def _check_fits(analysis: Analysis, vocab_size: int, max_positions: int | None) -> None:
    """Refuse an analysis without tokens, with tokens outside of the vocabulary, or with too long sequences."""
    analysis.tokens()
    largest = analysis.manifest["max_token_id"]
    if largest is not None and largest >= vocab_size:
        raise UsageError(
            f"the data has token id {largest:,}, the model's vocabulary has {vocab_size:,}",
            where=str(analysis.path),
            hint="analyze with the tokenizer that belongs to the model",
        )
    longest = int(analysis.num_tokens.argmax())
    if max_positions is not None and analysis.num_tokens[longest] > max_positions:
        raise UsageError(
            f"sequence {longest} has {analysis.num_tokens[longest]:,} tokens, "
            f"the model takes {max_positions:,} positions (max_position_embeddings and rope scaling)",
            where=analysis.place(longest),
            hint="use a model with a longer context, such as one stretched by YaRN, or `chunkplan analyze` with "
            f"--max-length {max_positions}, which cuts {(analysis.num_tokens > max_positions).sum():,} sequences short",
        )


def broken_plan(message: str, where: str) -> DataError:
    """An error of a plan whose actions do not belong together."""
    return DataError(message, where=where, hint=VALIDATE_HINT)


def _check_words(step: PlanStep, dp_rank: int) -> None:
    """Refuse values of `kept_attention` and `op` that are not known here, naming the first chunk that has one."""
    actions = [each for (rank, _), own in step.actions.items() if rank == dp_rank for each in own]
    chunks = step.chunks.get(dp_rank, [])
    for name, known, named in (("kept_attention", KEPT_ATTENTION, chunks), ("op", OPS, actions)):
        for each in named:
            if (word := getattr(each, name)) not in known:
                expected = ", ".join(f'"{one}"' for one in known)
                where = f"step {step.step}, rank {dp_rank}, chunk {each.chunk_id}"
                raise broken_plan(f'{name} is "{one_line(word)}", expected one of {expected}', where)


def _check_links(step: PlanStep, dp_rank: int, layout: RankLayout) -> None:
    """Refuse stages that exchange chunks in different orders: they would take one for another, or deadlock."""
    for ops, what in ((FORWARDS, "activations"), (BACKWARDS, "gradients")):
        orders: list[list[int]] = [[] for _ in range(layout.num_model_stages)]  # chunks by model stage
        for stage in range(layout.pp):
            model_stages = layout.model_stages(stage)
            for action in step.actions.get((dp_rank, stage), []):
                # The executor refuses other virtual stages.
                if action.op in ops and 0 <= action.virtual_stage < layout.virtual_stages:
                    orders[model_stages[action.virtual_stage]].append(action.chunk_id)
        for model_stage, (order, after) in enumerate(pairwise(orders)):
            if order != after and layout.stage_of(model_stage) != layout.stage_of(model_stage + 1):
                kind = "stages" if layout.virtual_stages == 1 else "model stages"
                message = f"{kind} {model_stage} and {model_stage + 1} exchange {what} in different orders"
                raise broken_plan(message, f"step {step.step}, rank {dp_rank}")


def may_reduce(last: Sequence[Chunk | None]) -> bool:
    """True if the replicas of a stage may reduce gradients, layer by layer, while their last backwards run.

    `last`: the chunk that each of them runs backward last; None where it has no chunk. They may if no last backward is
    of a chunk that another process shares without having it last (docs/context-parallel.md). Otherwise one that is done
    would reduce a layer that another one reaches only after it has met the first one in the layers below.
    """
    named = [None if chunk is None else (chunk.group_id, chunk.group_index) for chunk in last]  # as all ranks name it
    blocks = [block_of(chunk) for chunk in last if chunk is not None]
    return not any(block.size > 1 and len({named[rank] for rank in block.ranks}) > 1 for block in blocks)
