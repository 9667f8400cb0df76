"""Joins a plan with the tokens of its analysis: for every step and rank, the actions and what their chunks hold.

Tokens are read when a chunk is about to run, so that memory does not depend on the size of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_plan, load_plan_analysis
from chunkplan.planfile.plan import Action, Chunk, Plan, PlanStep
from chunkplan_runtime.loss import NO_TARGET, shifted_labels
from chunkplan_runtime.state import Span


@dataclass(frozen=True)
class ChunkTensors:
    """A chunk as the model takes it: input_ids and position_ids int64 [1, num_tokens], labels int64 [num_tokens].

    Labels are shifted already: entry i is the token that position i predicts, or `NO_TARGET`. A zero-loss chunk is one
    padding token that predicts nothing.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RankWork:
    """What one data-parallel rank does in one step."""

    step: int
    dp_rank: int
    actions: list[Action]
    chunks: dict[int, Chunk]


def open_plan(plan: str | Path, analysis: str | Path | None = None) -> tuple[Plan, Analysis]:
    """Open a plan and the analysis it was built from: at `analysis`, or where the plan says it was.

    Raises:
        UsageError: one is not there, or the plan is for a pipeline of several stages.
        DataError: one is damaged, or the analysis is not the plan's.
    """
    opened = load_plan(plan)
    if opened.config["pp"] != 1:
        raise UsageError(
            f"the plan {opened.path} is for {opened.config['pp']} pipeline stages; this runtime has one",
            hint="build the plan with `--pp 1`",
        )
    found = load_plan_analysis(opened, analysis)
    expected = opened.manifest["analysis"]["content_hash"]
    if found.content_hash != expected:
        raise DataError(
            f"not the analysis of the plan: content hash {found.content_hash[:12]}, the plan has {expected[:12]}",
            where=str(found.path),
            hint="build the plan again from this analysis, or give its own with `--analysis`",
        )
    return opened, found


class PlanStream:
    """The steps of a plan with access to their tokens.

    Raises:
        UsageError: the analysis has no tokens, a token is not in the vocabulary, or a sequence is longer than
            `max_positions`.
    """

    def __init__(self, plan: Plan, analysis: Analysis, *, vocab_size: int, max_positions: int) -> None:
        self._plan = plan
        self._analysis = analysis
        self._tokens = analysis.tokens()
        self._vocab_size = vocab_size
        largest = analysis.manifest["max_token_id"]
        if largest is not None and largest >= vocab_size:
            raise UsageError(
                f"the data has token id {largest:,}, the model's vocabulary has {vocab_size:,}",
                where=str(analysis.path),
                hint="analyze with the tokenizer that belongs to the model",
            )
        longest = int(analysis.num_tokens.argmax())
        if analysis.num_tokens[longest] > max_positions:
            raise UsageError(
                f"sequence {longest} has {analysis.num_tokens[longest]:,} tokens, "
                f"the model takes {max_positions:,} positions (max_position_embeddings)",
                hint="use a model with a longer context, or leave out what is too long for this one",
            )

    def __iter__(self) -> Iterator[tuple[PlanStep, list[RankWork]]]:
        """The steps in order, each with the work of its ranks in order of dp_rank."""
        for step in self._plan.iter_steps():
            ranks = sorted(step.chunks.keys() | {dp_rank for dp_rank, _ in step.actions})
            yield (
                step,
                [
                    RankWork(
                        step=step.step,
                        dp_rank=dp_rank,
                        actions=step.actions.get((dp_rank, 0), []),
                        chunks={chunk.chunk_id: chunk for chunk in step.chunks.get(dp_rank, [])},
                    )
                    for dp_rank in ranks
                ],
            )

    def load(self, chunk: Chunk) -> ChunkTensors:
        """The tensors of a chunk.

        Raises:
            DataError: the analysis has no such tokens, or not as many targets as the plan counted.
            UsageError: a token is not in the model's vocabulary.
        """
        if not chunk.segments:
            padding = torch.zeros(1, 1, dtype=torch.int64)
            return ChunkTensors(padding, padding, torch.tensor([NO_TARGET]), (Span(-1, 0, 1, length=1, first=0),))
        ids, positions, labels, spans = [], [], [], []
        first = 0
        for segment in chunk.segments:
            sequence_id, start, end = segment.sequence_id, segment.start, segment.end
            if not 0 <= sequence_id < self._analysis.num_sequences:
                raise DataError(
                    f"there is no sequence {sequence_id}", where=str(self._analysis.path), hint="build the plan again"
                )
            input_ids, target = self._tokens(sequence_id)
            if not 0 <= start < end <= len(input_ids):
                raise DataError(
                    f"sequence {sequence_id} has {len(input_ids)} tokens; the plan asks for {start} to {end}",
                    where=str(self._analysis.path),
                    hint="build the plan again",
                )
            wrong = np.flatnonzero((input_ids[start:end] < 0) | (input_ids[start:end] >= self._vocab_size))
            if wrong.size:
                token = start + int(wrong[0])
                raise UsageError(
                    f"token {token} of sequence {sequence_id} is id {input_ids[token]}, "
                    f"the model's vocabulary has {self._vocab_size:,}",
                    hint="analyze with the tokenizer that belongs to the model",
                )
            # One token past the end is needed for the label of the last.
            ids.append(input_ids[start:end].astype(np.int64))
            labels.append(shifted_labels(input_ids[start : end + 1], target[start : end + 1])[: end - start])
            positions.append(np.arange(start, end))
            spans.append(Span(sequence_id, start, end, length=len(input_ids), first=first, group_id=chunk.group_id))
            first += end - start
        joined = np.concatenate(labels)
        found = int((joined != NO_TARGET).sum())
        if found != chunk.num_target_tokens or first != chunk.num_tokens:
            raise DataError(
                f"chunk {chunk.chunk_id} has {first} tokens with {found} targets; "
                f"the plan counted {chunk.num_tokens} with {chunk.num_target_tokens}",
                where=str(self._plan.path),
                hint="build the plan again",
            )
        return ChunkTensors(
            input_ids=torch.from_numpy(np.concatenate(ids))[None],
            position_ids=torch.from_numpy(np.concatenate(positions))[None],
            labels=torch.from_numpy(joined),
            spans=tuple(spans),
        )
