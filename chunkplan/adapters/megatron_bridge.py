"""Packed rows of Megatron-Bridge out of a plan or an analysis, read one at a time: its packed files are not written.

After `install()` the paths of its packed data, `PackedSequenceSpecs.packed_train_data_path`, may name either folder. An
analysis is packed when it is opened, so that another `packed_sequence_size` costs no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from megatron.bridge.data.packing import parquet

from chunkplan.adapters import value_errors
from chunkplan.arrays import offsets_of, run_starts, sum_runs
from chunkplan.exporting.batches import LazyRows
from chunkplan.exporting.export import open_rows
from chunkplan.files.folder import MANIFEST


class ChunkplanPackedDataset(parquet.GPTSFTPackedParquetDataset):  # type: ignore[misc]
    """Its data set of packed rows, of a plan or an analysis too. What `install` sets says what is done with parts.

    Ranks take a row of a plan each in turn: in "single" loaders, of micro-batches of one row, every rank has its own.

    Raises:
        ValueError: rows do not fit into `max_seq_length`, or the folder cannot be used, and why.
    """

    choices: ClassVar[dict[str, bool]] = {}

    def __init__(self, file_path: str, tokenizer: Any, *, pad_cu_seqlens: bool = False, **options: Any) -> None:
        self._rows: LazyRows | None = None
        if not (Path(file_path) / MANIFEST).is_file():
            super().__init__(file_path, tokenizer, pad_cu_seqlens=pad_cu_seqlens, **options)
            return
        multiple = options.get("pad_seq_to_mult") or 1
        most = options.get("max_seq_length", 1024)
        with value_errors():
            self._rows = open_rows(file_path, most, multiple=multiple, **self.choices)
        options |= {"pad_seq_to_mult": multiple, "pack_metadata_file_path": None}
        super().__init__(file_path, tokenizer, **options)
        assert self.pad_to_max_length or not pad_cu_seqlens, "pad_cu_seqlens needs pad_to_max_length=True"
        self.pad_cu_seqlens = pad_cu_seqlens
        rows, inputs = self._rows.rows, self._rows.rows.num_inputs(multiple)
        facts = inputs.max(), np.diff(rows.rows).max(), sum_runs(inputs, rows.rows).min()
        names = "dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen"
        self.pack_metadata = [dict(zip(names, map(int, facts), strict=True))]
        self._order = np.arange(len(self._rows))
        if rows.step is not None and rows.dp_rank is not None:
            self._order = np.lexsort((rows.dp_rank, self._order - run_starts(rows.dp_rank), rows.step))

    def _load_dataset(self) -> None:
        if self._rows is None:
            super()._load_dataset()
        else:
            self._num_rows = len(self._rows)

    def __getitem__(self, idx: int) -> Any:
        """Implements `GPTSFTPackedParquetDataset.__getitem__`."""
        if self._rows is None:
            return super().__getitem__(idx)
        place = idx if self.samples_mapping is None else self.samples_mapping[idx]
        row = self._rows[self._order[place]]
        inputs = np.diff(row.segment_tokens) - 1
        edges = offsets_of(-(-inputs // self._pad_seq_to_mult) * self._pad_seq_to_mult + 1)
        places = np.arange(row.input_ids.size) + np.repeat(edges[:-1] - row.segment_tokens[:-1], inputs + 1)
        input_ids, loss_mask = np.full(edges[-1], self.tokenizer.eod, np.int32), np.zeros(edges[-1], np.int8)
        input_ids[places] = row.input_ids
        loss_mask[places] = row.predicts & (min(idx, place) >= 0)  # a negative index pads a batch
        return {"input_ids": input_ids, "seq_boundaries": edges.tolist(), "loss_mask": loss_mask}


def install(*, whole_only: bool = False, allow_split: bool = False) -> None:
    """Put the data set in place of Megatron-Bridge's: call it in every process before the data are loaded.

    Sequences in parts are refused, unless `whole_only` leaves them out or `allow_split` trains each part by itself.
    """
    ChunkplanPackedDataset.choices = {"whole_only": whole_only, "allow_split": allow_split}
    parquet.GPTSFTPackedParquetDataset = ChunkplanPackedDataset
