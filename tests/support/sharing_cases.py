"""What processes do in tests of sequences that they share: count what they send, hang, and end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.errors import UsageError
from chunkplan_runtime import layout as layouts
from chunkplan_runtime.failures import watchdog as watching
from chunkplan_runtime.kv.store import GatheredMemory
from chunkplan_runtime.layout import Exchanges, RankLayout
from chunkplan_runtime.models.model import new_model, read_config
from tests.support.distributed_cases import make_stage, open_for_its_stages
from tests.support.training_cases import run_main


def sent_bytes(rank: int, *, plan: Path, config: Path, dtype: torch.dtype) -> Counter[tuple[str, torch.dtype]]:
    """The bytes that this process gets from others in the forwards and backwards of the first step, by what and dtype.

    Of gradients that are summed, so many as a process sends that passes sums on.
    """
    counts: Counter[tuple[str, torch.dtype]] = Counter()
    all_to_all, gather, reduce = dist.all_to_all_single, layouts.all_gather, layouts.reduce_scatter

    def counted_all_to_all(
        out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        own = received[dist.get_rank(group)] * out.shape[1]
        counts["heads", out.dtype] += (out.numel() - own) * out.itemsize
        all_to_all(out, rows, received, sent, group=group)

    def counted_gather(out: Tensor, rows: Tensor, **how: Any) -> dist.Work:
        counts["pages", out.dtype] += out.nbytes - rows.nbytes
        return gather(out, rows, **how)

    def counted_reduce(out: Tensor, rows: Tensor, **how: Any) -> None:
        counts["gradients", out.dtype] += rows.nbytes - out.nbytes
        reduce(out, rows, **how)

    opened, analysis = open_for_its_stages(plan)
    stage = make_stage(rank, opened, analysis, new_model(read_config(config), dtype, seed=1))
    with (
        patch.object(dist, "all_to_all_single", counted_all_to_all),
        patch.object(layouts, "all_gather", counted_gather),
        patch.object(layouts, "reduce_scatter", counted_reduce),
    ):
        stage.run(stage.work(0))
    return counts


def refused_backend(rank: int) -> str:
    """What is said of a group whose backend does nothing for tensors on this device."""
    dist.Backend.register_backend("idle", lambda store, rank, size, timeout: _Idle(rank, size), devices=["cpu"])
    members = tuple(range(dist.get_world_size()))
    exchanges = Exchanges(RankLayout(dp=len(members), process=rank), {members: dist.new_group(backend="idle")})
    try:
        exchanges.use_once(torch.device("cpu"))
    except UsageError as error:
        return f"{error}; {error.hint}"
    return ""


class _Idle(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return "idle"


def made_groups(rank: int, *, plan: Path, config: Path) -> tuple[int, list[int]]:
    """How many groups this process says it is in, and how many processes each has that it makes."""
    opened, analysis = open_for_its_stages(plan)
    of_torch = dist.distributed_c10d._world.pg_map
    before = set(of_torch)
    stage = make_stage(rank, opened, analysis, new_model(read_config(config), torch.float32, seed=1))
    return stage.groups.num_groups, sorted(dist.get_world_size(group) for group in of_torch if group not in before)


def stalled_exchange(rank: int, **how: Any) -> tuple[int, str]:
    """`run_main` where the first process is late for its first page of a step, and half a second is long."""
    launch, was_late = GatheredMemory._launch, []

    def late(*args: Any) -> Any:
        if rank == 0 and not was_late:
            was_late.append(True)
            time.sleep(2)
        return launch(*args)

    with patch.object(watching, "STALLED_AFTER", 0.5), patch.object(GatheredMemory, "_launch", late):
        return run_main(rank, **how)
