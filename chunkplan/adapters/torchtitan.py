"""A dataset of torchtitan: packed rows out of a plan or an analysis, read one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import grain.python as grain
import numpy as np
from torchtitan.components.data import DatasetBuildContext, DatasetIterationPolicy, SingleDatasetConfig, TextSequence
from torchtitan.components.loss import IGNORE_INDEX

from chunkplan.adapters import value_errors
from chunkplan.exporting.batches import LazyRows
from chunkplan.exporting.export import open_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkplanRowsConfig:
    """Rows of the plan or the analysis at `path`, for `GrainDataLoader.Config(dataset=...)`: each fills a batch.

    Each rank takes its own rows of a plan, in their order; those of an analysis are shuffled and shared as torchtitan
    does. Sequences in parts are refused, unless `whole_only` leaves them out or `allow_split` trains each by itself.
    """

    path: str
    whole_only: bool = False
    allow_split: bool = False

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> grain.MapDataset:
        """The rows as `TextSequence`s; raises ValueError where the folder cannot be used so, and why."""
        policy, most = dataset_iteration_policy, context.num_tokens_per_batch
        with value_errors():
            packed = open_rows(self.path, most, whole_only=self.whole_only, allow_split=self.allow_split)
        rows = packed.rows
        if rows.dp_rank is not None:
            if rows.dp_rank.max() + 1 != policy.dp_world_size:
                raise ValueError(
                    f"{self.path} is a plan for {rows.dp_rank.max() + 1} data-parallel ranks, not "
                    f"{policy.dp_world_size}; build it with --dp {policy.dp_world_size}, or give its analysis"
                )
            packed = LazyRows(rows.only(np.repeat(rows.dp_rank == policy.dp_rank, np.diff(rows.rows))), packed.tokens)
            policy = replace(policy, shuffle=False, dp_rank=0, dp_world_size=1)
        source = SimpleNamespace(build=lambda dataset_iteration_policy: _TextSequences(packed))
        return SingleDatasetConfig(source=source).build(context=context, dataset_iteration_policy=policy)


class _TextSequences:
    """Rows as torchtitan has them: the last token of a sequence is a label and no input."""

    def __init__(self, rows: LazyRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> TextSequence:
        row = self._rows[place]
        positions = np.arange(row.input_ids.size) - np.repeat(row.segment_tokens[:-1], np.diff(row.segment_tokens))
        labels = np.where(row.predicts, np.roll(row.input_ids, -1), IGNORE_INDEX)
        is_input = np.append(positions[1:] != 0, False)
        values = (each[is_input].astype(np.int64) for each in (row.input_ids, labels, positions))
        return TextSequence(**dict(zip(("input_ids", "labels", "positions"), values, strict=True)))
