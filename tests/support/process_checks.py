"""What tests of commands that are ended from outside share: commands at work, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

PIECE_BYTES = 60_000

#: The command, with pieces so small that there are many of them in little data.
_COMMAND = f"""
from chunkplan.intake import pieces, reading
from chunkplan_cli.main import main
reading.ONE_PROCESS_BYTES, pieces.PIECE_BYTES = 0, {PIECE_BYTES}
main()
"""


def begin(*arguments: str | Path, workspace: Path) -> subprocess.Popen[str]:
    """A command, at work in a process group of its own, as a terminal has it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "runtime", "cli")),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    program = ["-c", _COMMAND] if "analyze" in arguments else ["-m", "chunkplan_cli.main"]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments), "--workspace", str(workspace)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def begin_analyze(*arguments: str | Path, workspace: Path) -> subprocess.Popen[str]:
    """`chunkplan analyze` with the tokenizer of the sample data, and two workers if nothing else is said."""
    return begin("analyze", "--tokenizer", TOKENIZER, "--workers", "2", *arguments, workspace=workspace)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what comes within a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def left_behind(folder: Path) -> list[Path]:
    """What only a run at work may have below a folder: what is half written, and locks."""
    return [
        path
        for path in folder.rglob(".*")
        if ".tmp-" in path.name or ".old-" in path.name or path.name.endswith(".lock")
    ]


def in_group(group: int) -> list[int]:
    """The processes of a group, less those that only wait to be reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(of) == group and state != "Z":
            found.append(int(path.parent.name))
    return found
