"""What torch.distributed raises when another process is gone, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.exchange import is_lost_connection
from chunkplan_runtime.failures.watchdog import Watchdog


@contextmanager
def lost_peers(watchdog: Watchdog) -> Iterator[None]:
    """Around what waits for other processes: if one vanishes, `watchdog` names it and ends this process.

    Raises:
        ChunkplanError: a connection broke, or nothing came over it in time, and yet nobody died.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        watchdog.await_end()
        first_line = str(error).partition("\n")[0]
        raise ChunkplanError(
            f"the connection to another process broke: {first_line}",
            where=watchdog.heartbeat.activity().words or None,
            hint="check the network between the machines; --resume goes on from the last checkpoint",
        ) from error
