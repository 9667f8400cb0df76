"""Compiles the planner's loops ahead, in a process of its own, while data are read: `python -m chunkplan.compiling`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: The last function that is compiled for plans.
_LAST = "schedule/auto.py", "auto.auto_step-*.nbi"


@contextmanager
def compiled_ahead(report: Callable[[str], None], after: float = 2.0) -> Iterator[None]:
    """In a block that takes longer than `after` seconds compile what plans need, if nothing has since the installation.

    It ends with the block; what is compiled by then is kept. `report` is called with why it failed, if it did.
    """
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        if not _is_compiled():
            words = (sys.executable, "-m", "chunkplan.compiling")
            started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))

    timer = threading.Timer(after, start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for process in started:
            is_over = process.poll() is not None
            process.terminate()
            _, said = process.communicate()
            if is_over and process.returncode:
                report(f"compiling ahead failed: {(said.splitlines() or [f'exit code {process.returncode}'])[-1]}")


def _is_compiled() -> bool:
    """True if one of numba's cache folders holds machine code that is newer than the installation."""
    package, (source, index) = Path(__file__).parent, _LAST
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    kept = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(kept)] if kept else [package / "schedule" / "__pycache__", home]
    installed = (package / source).stat().st_ctime
    return any(path.stat().st_mtime > installed for folder in folders for path in folder.rglob(index))


def main() -> None:
    """Plan a few sequences that are packed, split and shared, on one stage and on two."""
    import numpy as np

    from chunkplan.building import build
    from chunkplan.config.plan import PlanConfig

    os.nice(10)  # what is waited for comes first
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder, "lengths.npy")
        np.save(lengths, np.array([100, 5, 6, 7, 300, 20, 9, 40]))
        for pp in (1, 2):
            build(lengths, Path(folder, "plan"), PlanConfig(chunk_size=16, k=1, dp=2, pp=pp, global_batch=8))


if __name__ == "__main__":
    main()
