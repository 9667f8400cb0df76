"""Compiled loops: what they give, where they are kept, what the command line says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.places import ROOT

#: Packs two items, then has the patience of commands end; says what came out, and whether something was compiled.
PACK = """
import time
import numpy as np
from chunkplan.compiled import has_compiled
from chunkplan.packing.heuristics import best_fit
from chunkplan_cli import progress
none = np.zeros(0, np.int64)
bins, number = best_fit(np.array([6, 5]), 10, none, none > 0, 0)
progress.PATIENCE = 0
with progress.note_compilation():
    time.sleep(0.3)
print(bins.tolist(), number, has_compiled())
"""


def pack(**environment: str) -> tuple[str, str]:
    """Both outputs of PACK in a process of its own."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "cli"))
    ran = subprocess.run(
        [sys.executable, "-c", PACK],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip(), ran.stderr


def test_code_is_compiled_once_and_kept(tmp_path: Path) -> None:
    """In a fresh cache folder the first process compiles, and says so; the second one finds the code, and is silent."""
    (first, said), (second, nothing) = (pack(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first == "[0, 1] 2 True"
    assert "compiling the planner's loops" in said
    assert second == "[0, 1] 2 False"
    assert nothing == ""


def test_the_loops_are_plain_python_too() -> None:
    """Uncompiled they give the same, which is how to step through them in a debugger."""
    assert pack(NUMBA_DISABLE_JIT="1")[0].startswith("[0, 1] 2")


def test_it_works_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from chunkplan import compiled

    real = numba.njit

    def without_cache(*arguments: object, **options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(compiled.numba, "njit", without_cache)

    def double(values: np.ndarray) -> np.ndarray:
        return values * 2

    assert compiled.compiled(double)(np.array([1, 2])).tolist() == [2, 4]


#: The command, which looks later whether it compiles: a busy machine may not have begun to after 2 seconds.
PATIENT = "from chunkplan_cli import main, progress; progress.PATIENCE = 6; main.main()"


@pytest.mark.soak
def test_a_long_compilation_is_explained(tmp_path: Path) -> None:
    """All of it: the first build after an installation says why nothing happens; a later one is silent about it."""
    np.save(tmp_path / "lengths.npy", np.array([5, 6, 7]))
    words = ["build", "lengths.npy", "--chunk-size", "8", "--k", "1"]
    said = [
        subprocess.run(
            [sys.executable, "-c", PATIENT, *words],
            cwd=tmp_path,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for _ in range(2)
    ]
    assert "compiling the planner's loops" in said[0]
    assert "compiling" not in said[1]
