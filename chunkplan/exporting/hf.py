"""A dataset of Hugging Face `datasets`, as its `save_to_disk` lays it out; columns as TRL's SFTTrainer names them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from chunkplan.exporting.batches import RowBatch
from chunkplan.exporting.shards import write_shards
from chunkplan.files.json_file import write_json

#: What trainers of that world leave out of the loss.
_IGNORED = -100


def write_hf(folder: Path, batches: Iterable[RowBatch], fingerprint: str) -> list[str]:
    """Write a folder for `datasets.load_from_disk`, whose caches know it by `fingerprint`. Returns names of files."""
    names = write_shards(
        folder, "arrow", map(labelled, batches), lambda path, schema: pa.ipc.new_stream(str(path), schema)
    )
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / "state.json", state, indent=2)
    write_json(folder / "dataset_info.json", {"description": "Packed rows, written by chunkplan export."}, indent=2)
    return names


def labelled(batch: RowBatch) -> pa.RecordBatch:
    """Rows with labels where their targets are: the trainer shifts them."""
    labels = np.where(batch.target, batch.input_ids, np.int32(_IGNORED))
    return batch.to_arrow(
        {"input_ids": batch.input_ids, "labels": labels}, {"seq_lengths": np.diff(batch.segment_tokens)}
    )
