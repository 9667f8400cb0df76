"""How much is read at once. None of these changes a result, only memory and time."""

from __future__ import annotations

#: What one process reads of a source before it hands on what came of it.
PIECE_BYTES = 8 << 20

#: Whole lines are read together up to this many bytes; a longer line is read alone.
BLOCK_BYTES = 1 << 20

#: Records in a batch: of any schema, and of those that are columns of numbers.
BATCH_RECORDS = 1024
COLUMN_RECORDS = 65_536
