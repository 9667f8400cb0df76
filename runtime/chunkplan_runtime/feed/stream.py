"""Joins a plan with the tokens of its analysis: for every step and rank, the actions and what their chunks hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis, join_runs
from chunkplan.planfile.likeness import changed_samples, how_to_build_like, samples_of
from chunkplan.planfile.load import load_plan, load_same_analysis
from chunkplan.planfile.plan import Action, Chunk, Plan, PlanStep
from chunkplan_runtime.devices import pinned
from chunkplan_runtime.feed.order import check_links, check_words, may_reduce
from chunkplan_runtime.layout import RankLayout, one_pipeline, refuse_other_replicas
from chunkplan_runtime.sharing import Run, SharedPart, Span, check_sharing, shared_part

T = TypeVar("T")

#: The label of a position that predicts nothing.
NO_TARGET = -100

#: What comes after the last item that is made ahead.
_END = object()


def shifted_labels(input_ids: Int32Array, target: npt.NDArray[np.bool_]) -> Int32Array:
    """The label of every position of a sequence: the next token where that is a target, else `NO_TARGET`.

    The last position has none. For a segment, give one token more than it has: the target across its border counts.
    """
    labels = np.full(len(input_ids), NO_TARGET, np.int32)
    np.copyto(labels[:-1], input_ids[1:], where=target[1:])
    return labels


@dataclass(frozen=True)
class ChunkTensors:
    """A chunk as the model takes it: input_ids and position_ids int32 [1, num_tokens], labels int32 [num_tokens].

    Labels are shifted already: entry i is the token that position i predicts, or `NO_TARGET`. A zero-loss chunk is one
    padding token that predicts nothing. Of a chunk that other processes have slices of, `spans` are those of this one,
    and `shared` is the whole.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    spans: tuple[Span, ...]
    shared: SharedPart | None = None

    @property
    def parts(self) -> list[Span]:
        """The parts of sequences whose keys and values other chunks, or other processes, need."""
        if self.shared is None:
            return [span for span in self.spans if span.is_split]
        return [self.shared.span] if self.shared.span.is_split or self.shared.is_paged else []


@dataclass(frozen=True)
class RankWork:
    """What one data-parallel rank, or a stage of it, does in one step; `chunks` and their `tensors` by chunk_id."""

    step: int
    dp_rank: int
    actions: list[Action]
    chunks: dict[int, Chunk]
    tensors: dict[int, ChunkTensors]


@dataclass(frozen=True)
class StepWork:
    """One optimizer step of a plan: its row, and the work of a process's data-parallel ranks in order of dp_rank.

    `reduces_early`: whether gradients may be reduced in the last backwards of its processes (`feed.order.may_reduce`).
    """

    step: PlanStep
    ranks: list[RankWork]
    plan: Plan
    reduces_early: bool

    @property
    def last(self) -> RankWork | None:
        """The work whose last action is this process's last one, if gradients may be reduced in it."""
        return next((work for work in reversed(self.ranks) if self.reduces_early and work.actions), None)


class TokenGather:
    """Reads the tokens of chunks: numpy passes over all of a rank's, and next to nothing done for each segment."""

    def __init__(self, plan: Plan, analysis: Analysis, vocab_size: int) -> None:
        self._plan = plan
        self._analysis = analysis
        self._vocab_size = vocab_size
        self._reader = analysis.tokens()
        self._positions = np.arange(analysis.num_tokens.max(), dtype=np.int32).data.cast("B")

    def __call__(self, chunks: Sequence[Chunk]) -> dict[int, ChunkTensors]:
        """The tensors of chunks by chunk_id, of those with segments views of one for all of them.

        Raises:
            DataError: the analysis has no such tokens, or not as many targets as the plan counted.
            UsageError: a token is not in the model's vocabulary.
        """
        tensors = {chunk.chunk_id: padding_tensors() for chunk in chunks if not chunk.segments}
        chunks = [chunk for chunk in chunks if chunk.segments]
        if not chunks:
            return tensors
        segments = [segment for chunk in chunks for segment in chunk.segments]
        sequence_ids = np.array([segment.sequence_id for segment in segments])  # [num_segments], as all below
        starts = np.array([segment.start for segment in segments])
        stops = np.array([segment.end for segment in segments])
        lengths = self._lengths(sequence_ids, starts, stops)
        sizes = stops - starts
        gathered_stops = np.cumsum(sizes)  # [num_segments]: where each lies in what is gathered
        gathered_starts = gathered_stops - sizes
        input_ids, target = self._reader.gather(sequence_ids, starts, stops)
        if input_ids.min() < 0 or input_ids.max() >= self._vocab_size:
            wrong = int(np.flatnonzero((input_ids < 0) | (input_ids >= self._vocab_size))[0])
            segment = int(np.searchsorted(gathered_stops, wrong, side="right"))
            raise UsageError(
                f"token {starts[segment] + wrong - gathered_starts[segment]} of sequence {sequence_ids[segment]} is id "
                f"{input_ids[wrong]}, the model's vocabulary has {self._vocab_size:,}",
                hint="analyze with the tokenizer that belongs to the model",
            )
        labels = shifted_labels(input_ids, target)
        # A segment's last token predicts what its own sequence goes on with, in this chunk or not.
        labels[gathered_stops - 1] = NO_TARGET
        cut = np.flatnonzero(stops < lengths)
        next_ids, next_target = self._reader.gather(sequence_ids[cut], stops[cut], stops[cut] + 1)
        labels[gathered_stops[cut] - 1] = np.where(next_target, next_ids, NO_TARGET)
        edges = np.concatenate([[0], gathered_stops])[np.cumsum([0, *(len(chunk.segments) for chunk in chunks)])]
        self._check_counts(chunks, edges.tolist(), labels)
        chunk_of = np.repeat(np.arange(len(chunks)), [len(chunk.segments) for chunk in chunks])
        groups = [chunk.group_id for chunk in chunks for _ in chunk.segments]
        columns = (sequence_ids, starts, stops, lengths, gathered_starts - edges[chunk_of])
        spans = map(Span, *(column.tolist() for column in columns), groups)
        positions = np.frombuffer(join_runs(repeat(self._positions), 4 * starts, 4 * stops), np.int32)
        of_all = torch.from_numpy(input_ids)[None], torch.from_numpy(positions)[None], torch.from_numpy(labels)
        by_chunk = [torch.split(tensor, np.diff(edges).tolist(), -1) for tensor in of_all]
        for chunk, ids, places, targets in zip(chunks, *by_chunk, strict=True):
            tensors[chunk.chunk_id] = ChunkTensors(ids, places, targets, tuple(islice(spans, len(chunk.segments))))
        return tensors

    def _lengths(self, sequence_ids: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """How many tokens the sequences have, after a check that they are there and have what is asked for."""
        wrong = np.flatnonzero((sequence_ids < 0) | (sequence_ids >= self._analysis.num_sequences))
        if wrong.size:
            raise DataError(
                f"there is no sequence {sequence_ids[wrong[0]]}",
                where=str(self._analysis.path),
                hint="build the plan again",
            )
        lengths = self._analysis.num_tokens[sequence_ids].astype(np.int64)
        wrong = np.flatnonzero((starts < 0) | (starts >= stops) | (stops > lengths))
        if wrong.size:
            first = wrong[0]
            raise DataError(
                f"sequence {sequence_ids[first]} has {lengths[first]} tokens; "
                f"the plan asks for {starts[first]} to {stops[first]}",
                where=str(self._analysis.path),
                hint="build the plan again",
            )
        return lengths

    def _check_counts(self, chunks: Sequence[Chunk], edges: list[int], labels: Int32Array) -> None:
        is_target = labels != NO_TARGET
        for chunk, (start, stop) in zip(chunks, pairwise(edges), strict=True):
            found = np.count_nonzero(is_target[start:stop])
            if found != chunk.num_target_tokens or stop - start != chunk.num_tokens:
                raise DataError(
                    f"chunk {chunk.chunk_id} has {stop - start} tokens with {found} targets; "
                    f"the plan counted {chunk.num_tokens} with {chunk.num_target_tokens}",
                    where=str(self._plan.path),
                    hint="build the plan again",
                )


class ReadAhead(Generic[T]):
    """Iterates over `items` with up to `depth` of them made ahead, in a thread.

    An error is raised where its item would have come. After it, and after `close`, there are no more items.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._pool = ThreadPoolExecutor(1, "chunkplan-read-ahead")
        self._coming: deque[Future[Any]] = deque(self._pool.submit(next, items, _END) for _ in range(depth))

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if not self._coming:
            raise StopIteration
        first = self._coming[0]
        error = first.exception()  # Control-C may interrupt this
        if error is not None or first.result() is _END:
            self.close()
            raise StopIteration if error is None else error
        self._coming.popleft()
        self._coming.append(self._pool.submit(next, self._items, _END))
        item: T = first.result()
        return item

    def close(self) -> None:
        """End the thread: what it is making is waited for, and there are no more items."""
        self._coming.clear()
        with suppress(RuntimeError):  # the garbage collector may come here in the thread itself
            self._pool.shutdown(cancel_futures=True)


class StreamPosition(TypedDict):
    """Where a stream is: what decides the samples of its steps (`samples_of`), and the step that comes next."""

    samples: Mapping[str, Any]
    step: int


def open_plan(
    plan: str | Path,
    analysis: str | Path | None = None,
    *,
    dp: int = 1,
    pp: int = 1,
    option: str = "analysis=",
) -> tuple[Plan, Analysis]:
    """Open a plan for `pp` pipeline stages and the analysis it was built from: at `analysis`, or where the plan says.

    `dp`: how many replicas there are of each stage, and `option`: what says where the analysis is, for hints.

    Raises:
        UsageError: one is not there, or the plan is for other stages or for what the runtime does not do.
        DataError: one is damaged, or the analysis is not the plan's.
    """
    opened = load_plan(plan)
    check_runnable(opened)
    if opened.config.pp != pp:
        raise UsageError(
            f"the plan is for {opened.config.pp} pipeline stages, {'one is' if pp == 1 else f'{pp} are'} there",
            where=str(opened.path),
            hint=f"`{how_to_build_like(opened, dp, pp)}` builds one of the same steps for these; or train with "
            f"`torchrun --nproc-per-node {opened.config.pp} -m chunkplan_runtime.train`",
        )
    return opened, load_same_analysis(opened, analysis, option=option)


class PlanStream(IterableDataset[StepWork]):
    """The steps of a plan with their tokens: iterate over it, or give it to a `DataLoader(stream, batch_size=None)`.

    An iteration begins at the stream's position and moves it: `state_dict` is for a checkpoint, `load_state_dict` goes
    on from there, after the last step there is nothing more. A thread makes up to `prefetch` steps ahead; with 0 there
    is none. With `pin_memory` tensors lie in page-locked memory where there is CUDA. In a DataLoader with workers one
    of them does it all, and the stream here does not move: what comes next is `work.step.step + 1`.

    `layout`: of several processes each has a stream of its own, of the work of its stage and data-parallel ranks.

    Raises:
        UsageError: the analysis has no tokens, a token is not in the vocabulary, or a sequence is longer than
            `max_positions` (None: any may be); or see `refuse_other_replicas`.
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
        check_fits(analysis, vocab_size, max_positions)
        layout = one_pipeline(plan) if layout is None else layout
        refuse_other_replicas(plan, layout.dp, then="open that, which goes on from a position in this one")
        self._plan = plan
        self._analysis = analysis
        self._vocab_size = vocab_size
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._layout = layout
        self._dp_ranks = self._layout.dp_ranks(plan.config.dp)
        self._next = 0

    @property
    def num_steps(self) -> int:
        """How many steps the plan has."""
        num_steps: int = self._plan.manifest["totals"]["num_steps"]
        return num_steps

    def __len__(self) -> int:
        """How many steps are left, of `num_steps`."""
        return self.num_steps - self._next

    def state_dict(self) -> StreamPosition:
        """The position: which samples the plan's steps have, and the step after the last one that was handed out."""
        return {"samples": samples_of(self._plan.manifest), "step": self._next}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next iteration begin at a position that `state_dict` gave, of this plan or one like it.

        Raises:
            UsageError: it is of a plan whose steps have other samples, or not a position.
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

        Raises:
            DataError: plan or analysis are damaged, or do not belong together.
            UsageError: a token is not in the model's vocabulary.
        """
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return
        pin_memory = self._pin_memory and worker is None
        with closing(ReadAhead(self._read(), self._prefetch) if self._prefetch else self._read()) as steps:
            for work in steps:
                self._next = work.step.step + 1
                # Not in the thread that reads ahead: pinning may wait for the device, and no step is at work here.
                yield replace(work, ranks=[_pinned(rank) for rank in work.ranks]) if pin_memory else work

    def _read(self) -> Generator[StepWork, None, None]:
        gather = TokenGather(self._plan, self._analysis, self._vocab_size)
        for step in self._plan.iter_steps(self._next):
            for dp_rank in self._dp_ranks:
                check_words(step, dp_rank)
                check_sharing(step, dp_rank)
                check_links(step, dp_rank, self._layout)
            ranks = [self._with_tensors(work, gather) for work in self._work_of(step, self._dp_ranks)]
            reduces_early = self._plan.config.cp == "off" or may_reduce(self._last_chunks(step))
            yield StepWork(step, ranks, self._plan, reduces_early)

    def _work_of(self, step: PlanStep, dp_ranks: range) -> list[RankWork]:
        """What the process of these ranks does in a step on this stage, without tensors."""
        stage = self._layout.stage
        found = []
        for dp_rank in dp_ranks:
            if dp_rank in step.chunks or (dp_rank, 0) in step.actions:
                chunks = {chunk.chunk_id: chunk for chunk in step.chunks.get(dp_rank, [])}
                found.append(RankWork(step.step, dp_rank, step.actions.get((dp_rank, stage), []), chunks, {}))
        return found

    def _last_chunks(self, step: PlanStep) -> list[Chunk | None]:
        """The chunk that each process of this stage runs backward last."""
        processes = [self._work_of(step, dp_ranks) for dp_ranks in self._layout.rows(self._plan.config.dp)]
        lasts = (next((work for work in reversed(ranks) if work.actions), None) for ranks in processes)
        return [None if work is None else work.chunks.get(work.actions[-1].chunk_id) for work in lasts]

    def _with_tensors(self, work: RankWork, gather: TokenGather) -> RankWork:
        tensors = gather([*work.chunks.values()])
        parts: dict[int | None, list[Run]] = {}  # by its group, where each chunk of a shared sequence lies in it
        for chunk in work.chunks.values():
            if chunk.cp_size > 1:
                run = chunk.prefix_tokens, chunk.prefix_tokens + chunk.cp_tokens
                parts.setdefault(chunk.group_id, []).append(run)
        for chunk_id, chunk in work.chunks.items():
            if chunk.cp_size > 1:
                shared = shared_part(chunk, parts[chunk.group_id], work.dp_rank)
                tensors[chunk_id] = replace(tensors[chunk_id], shared=shared)
        return replace(work, tensors=tensors)


def check_runnable(plan: Plan) -> None:
    """Refuse a plan for what the runtime does not do.

    Raises:
        UsageError: naming it.
    """
    tp = plan.manifest["predictions"]["cost_model"]["tp"]
    if tp > 1:
        raise UsageError(
            f"the plan is for tensor parallelism (tp {tp}), which the runtime does not do",
            where=str(plan.path),
            hint="build it with `--tp 1`, and more --dp or --pp",
        )


def check_fits(analysis: Analysis, vocab_size: int, max_positions: int | None) -> None:
    """Refuse an analysis that a model cannot be trained on.

    Raises:
        UsageError: it has no tokens, a token is not in the vocabulary, or a sequence is longer than `max_positions`.
    """
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


def _pinned(work: RankWork) -> RankWork:
    """`work` with its tensors in page-locked memory, where they are views of one for all chunks too."""
    if not work.tensors:
        return work
    chunks = work.tensors.values()
    sizes = [len(each.labels) for each in chunks]
    of_chunks = zip(*((each.input_ids, each.position_ids, each.labels) for each in chunks), strict=True)
    columns = [torch.split(pinned(torch.cat(column, -1)), sizes, -1) for column in of_chunks]
    moved = {
        chunk_id: replace(each, input_ids=input_ids, position_ids=position_ids, labels=labels)
        for (chunk_id, each), input_ids, position_ids, labels in zip(work.tensors.items(), *columns, strict=True)
    }
    return replace(work, tensors=moved)


def padding_tensors() -> ChunkTensors:
    """The tensors of a zero-loss chunk: one padding token without a target."""
    token = torch.zeros(1, 1, dtype=torch.int32)
    label = torch.tensor([NO_TARGET], dtype=torch.int32)
    return ChunkTensors(token, token, label, (Span(-1, 0, 1, length=1, chunk_start=0),))
