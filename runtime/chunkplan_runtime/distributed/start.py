"""Starts the processes of a run on this machine, as torchrun does, and passes on the exit code of one that failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def start(arguments: list[str], num_processes: int) -> int:
    """Run `python -m chunkplan_runtime.train` with `arguments` on as many processes; returns the exit code of the run.

    What went wrong is printed by the processes: of several that fail, the code is that of the first.
    """
    logging.disable()  # the processes say themselves what torch would say of them here
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # a name of this machine need not resolve
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "chunkplan_runtime.train", *arguments)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
