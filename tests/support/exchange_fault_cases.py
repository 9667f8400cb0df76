"""What processes do in tests of a process that dies, stops or is late in the middle of an exchange.

`python -m tests.support.exchange_fault_cases FOLDER` runs all cases as `watchdog_cases` does, on the plans that FOLDER
has for processes that share heads and pages: `heads-2`, `pages-3`, and `config.json`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.distributed.job import lost_peers, make_groups
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.failures import watchdog as watching
from chunkplan_runtime.failures.watchdog import Watchdog
from chunkplan_runtime.feed.stream import PlanStream
from chunkplan_runtime.layout import Exchanges, RankLayout, choose_layout, used_blocks
from chunkplan_runtime.models.model import new_model, read_config
from tests.support.distributed_cases import open_for_its_stages
from tests.support.watchdog_cases import Case, fail, run_all

#: Seconds for which the one that is late sleeps, and after how many the others say that they wait.
LATE, STALLED_AFTER = 2.0, 0.5

#: The method of `Exchanges` by which a step comes to an exchange, and the first word of what it is then said to do.
CALLS = {"heads": ("waiting", "exchanging"), "pages": ("gather", ""), "sums": ("waiting", "adding")}


def fault(watchdog: Watchdog, rank: int, *, folder: Path, what: str, where: str, how: str, who: int) -> None:
    """Run a step in which process `who` comes to an exchange `what` within the action `where`, and does not do it."""
    way = "heads" if what == "heads" else "pages"
    plan, analysis = open_for_its_stages(folder / f"{way}-{dist.get_world_size()}")
    model = new_model(read_config(folder / "config.json"), torch.float64, seed=1)
    layout = choose_layout(plan, dist.get_world_size(), rank)
    groups = make_groups(layout, torch.device("cpu"), timedelta(seconds=60), used_blocks(plan))
    executor = RankExecutor(model, exchanges=groups.exchanges)
    [work] = next(iter(PlanStream(plan, analysis, vocab_size=97, max_positions=256, layout=layout))).ranks
    name, word = CALLS[what]
    exchange, times = getattr(Exchanges, name), []

    def late(exchanges: Exchanges, *given: Any) -> Any:
        """At the second exchange of the action die, stop or sleep, when all others wait."""
        if where in executor.doing and (not word or given[0].startswith(word)):
            times.append(how)
            if len(times) == 2:
                time.sleep(LATE if how == "sleep" else 0.3)
                if how != "sleep":
                    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return exchange(exchanges, *given)

    watching.STALLED_AFTER = STALLED_AFTER if how == "sleep" else watching.STALLED_AFTER
    executor.doing = "step 0, before its first action"
    try:
        with (
            patch.object(Exchanges, name, late if rank == who else exchange),
            lost_peers(watchdog),
            watchdog.heartbeat.reporting(lambda: executor.activity, lambda: None),
        ):
            executor.run(work, 1)
    except ChunkplanError as error:
        fail(watchdog, error.exit_code, str(error))
    dist.barrier()
    watchdog.stop()


def cases(folder: Path) -> dict[str, Case]:
    """By name, `what-where-how`; two processes share heads, three share pages."""
    made = {}
    for name, who in (
        ("heads-forward-kill", 1),
        ("heads-backward-kill", 1),
        ("pages-forward-kill", 2),
        ("sums-backward-kill", 0),
        ("pages-forward-stop", 2),
        ("heads-forward-sleep", 0),
    ):
        what, where, how = name.split("-")
        work = partial(fault, folder=folder, what=what, where=f"the {where}", how=how, who=who)
        made[name] = Case(work, RankLayout(dp=2 if what == "heads" else 3), step=0)
    return made


if __name__ == "__main__":
    run_all(cases(Path(sys.argv[1])), Path(sys.argv[1]))
