"""How long `chunkplan --help` takes, as a whole process: a JSON line.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

from machine import machine

RUNS = 10
COMMAND = [str(Path(sys.executable).parent / "chunkplan"), "--help"]


def measure() -> tuple[float, float]:
    """Measure the seconds from start to end, and those of processor time, of one run."""
    before, start = getrusage(RUSAGE_CHILDREN), perf_counter()
    subprocess.run(COMMAND, stdout=subprocess.DEVNULL, check=True)
    seconds, after = perf_counter() - start, getrusage(RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the least of several runs, and how many there were."""
    seconds, processor = zip(*(measure() for _ in range(RUNS)), strict=True)
    figures = {"seconds": round(min(seconds), 3), "processor_seconds": round(min(processor), 3), "runs": RUNS}
    print(json.dumps({"command": "chunkplan --help", **figures, **machine("typer", "rich")}))


if __name__ == "__main__":
    main()
