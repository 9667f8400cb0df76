"""Compiled loops: what they give, where they are kept, what the command line says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from chunkplan import compiled, compiling
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


def test_code_kept_from_an_earlier_version_with_other_classes_is_compiled_anew(tmp_path: Path) -> None:
    module = """
from typing import NamedTuple
from chunkplan.compiled import compiled
class {name}(NamedTuple):
    value: int
@compiled
def value_of(pair):
    return pair.value + {added}
print(value_of({name}(1)))
"""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "cli"))
    for name, added in (("Before", 1), ("Renamed", 20)):
        (tmp_path / "kept.py").write_text(module.format(name=name, added=added))
        ran = subprocess.run(
            [sys.executable, "-c", "import kept"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{path}{os.pathsep}{tmp_path}"},
            capture_output=True,
            text=True,
        )
        assert ran.stdout == f"{1 + added}\n", ran.stderr


def test_the_loops_are_plain_python_too() -> None:
    """Uncompiled they give the same, which is how to step through them in a debugger."""
    assert pack(NUMBA_DISABLE_JIT="1")[0].startswith("[0, 1] 2")


def test_it_works_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    real = numba.njit

    def without_cache(*arguments: object, **options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(compiled.numba, "njit", without_cache)

    def double(values: np.ndarray) -> np.ndarray:
        return values * 2

    assert compiled.compiled(double)(np.array([1, 2])).tolist() == [2, 4]


@compiled.compiled_in_place
def first_of(values: np.ndarray) -> int:
    if not values.size:
        raise ValueError("no values")
    return int(values[0])


@compiled.compiled
def twice_the_first_of(values: np.ndarray) -> int:
    return 2 * first_of(values)


def test_what_compiled_functions_call_python_may_call_too() -> None:
    """In either order, with the same errors."""
    for function, expected in ((twice_the_first_of, 6), (first_of, 3), (twice_the_first_of, 6)):
        assert function(np.array([3, 4])) == expected
        with pytest.raises(ValueError, match="no values"):
            function(np.zeros(0, np.int64))


def test_compiling_ahead_ends_with_what_it_ran_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It begins only if that takes a while, is ended without a word, and says why it failed."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    with compiling.compiled_ahead(said.append, after=60):
        assert children() == []
    with compiling.compiled_ahead(said.append, after=0):
        while not children():
            time.sleep(0.01)
    assert (children(), said) == ([], [])
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    with compiling.compiled_ahead(said.append, after=0):
        time.sleep(0.5)
    assert said == ["compiling ahead failed: exit code 1"]
    (tmp_path / "auto.auto_step-1.py311.nbi").touch()
    with compiling.compiled_ahead(said.append, after=0):
        time.sleep(0.5)
    assert len(said) == 1, "all is there: nothing is begun"


def children() -> list[str]:
    """Processes of this one that compile."""
    words = ("pgrep", "--parent", str(os.getpid()), "--full", "chunkplan.compiling")
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


@pytest.mark.soak
def test_what_was_compiled_ahead_needs_no_more_compiling(tmp_path: Path) -> None:
    """A build on one stage and one on two find all their loops."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-m", "chunkplan.compiling"], env=environment, check=True, cwd=ROOT)
    np.save(tmp_path / "lengths.npy", np.array([50, 6, 7, 8]))
    plans = "build('lengths.npy', 'plan', PlanConfig(chunk_size=8, k=1, dp=2, pp=pp))"
    code = f"from chunkplan import build, PlanConfig\nfor pp in (1, 2): {plans}\n"
    code += "from chunkplan.compiled import num_compiled\nprint(num_compiled())"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
