"""Small plans in which ranks share sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.arrays import Int64Array
from chunkplan.cost.model import CostModel
from chunkplan.planfile.plan import Plan
from chunkplan.planning import method
from chunkplan.planning.ranks import Sequences, Shares
from tests.support.plain import PLAIN
from tests.support.plan_rows import Rows, find

#: Links so fast that small sequences are shared too; a message may take some nanoseconds.
FAST = replace(PLAIN, kernel_ns=1e-6, gpu_link_bytes=1e15, node_link_bytes=1e15)

LENGTHS = [5, 9, 3, 40, 7, 7, 2, 12, 50, 6, 4, 11, 13, 9, 10, 8, 12, 9, 14, 10, 300, 200, 37]


def build_shared(folder: Path, link_ns: float = 1e-6, lengths: list[int] = LENGTHS, **config: Any) -> Plan:
    """A plan in `folder` of ChunkSize 16, by links on which a message takes `link_ns`."""
    np.save(folder / "lengths.npy", np.array(lengths))
    given = {"chunk_size": 16, "k": 2, "global_batch": len(lengths), "tail_sharing": True, "cp": "auto", **config}
    cost = CostModel(hardware=replace(FAST, link_ns=link_ns))
    return build(folder / "lengths.npy", folder / "plan", PlanConfig(**given), cost=cost, workers=1)


def build_blocks(folder: Path, blocks: Mapping[int, tuple[int, ...]], **config: Any) -> Plan:
    """The same where it is given, and not chosen, who shares what, see `given_blocks`."""
    with given_blocks(blocks):
        return build_shared(folder, **config)


@contextmanager
def given_blocks(blocks: Mapping[int, tuple[int, ...]]) -> Iterator[None]:
    """Within the block plans share what they are told to: of a sequence of so many tokens the block of ranks.

    That is its first rank, its size and, unless all share pages, how many share heads; others are on one rank each.
    """

    def given(step_starts: Int64Array, sequences: Sequences, *others: Any) -> tuple[Shares, Int64Array]:
        shares = Shares(*(np.copy(values) for values in Shares.none(sequences.tokens.size)))
        for tokens, (first_rank, size, *heads) in blocks.items():
            at = np.flatnonzero(sequences.tokens == tokens)
            shares.first_rank[at], shares.size[at], shares.work[at] = first_rank, size, sequences.work[at] // size
            shares.heads[at] = heads or [1]
        return shares, np.ones(step_starts.size - 1, np.int64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "share_sequences", given)
        yield


def at(rows: Rows, rank: int, chunk_id: int) -> dict[str, Any]:
    return find(rows, dp_rank=rank, chunk_id=chunk_id)
