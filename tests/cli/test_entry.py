"""The first and the last moments of a command: Ctrl-C in them, and an installation that lacks what it needs."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest

from tests.support.places import ROOT

TOKENIZER = str(ROOT / "sample_data" / "tokenizer")
BUILD = ("build", "lengths.npy", "--chunk-size", "8", "--k", "1")

#: Runs `chunkplan` with what comes before it.
RUN = "\nfrom chunkplan_cli.main import main\nmain()"

#: Ctrl-C as soon as a module is looked for.
INTERRUPTED_AT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""

#: Ctrl-C when Python ends.
INTERRUPTED_AT_THE_END = """
import atexit, os, signal, time
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)  # for a thread that waits for it
atexit.register(interrupt)
"""

#: A signal as compiled code returns: Python wraps what the handler raises.
SIGNALLED_IN_COMPILED_CODE = """
import signal
import chunkplan_cli.app
def app(*words, **more):
    try:
        signal.raise_signal(signal.{name})
    except BaseException as error:
        raise SystemError("returned a result with an exception set") from error
chunkplan_cli.app.app = lambda *words: app
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with a file of lengths, and one of texts."""
    np.save(tmp_path / "lengths.npy", np.array([3, 4]))
    (tmp_path / "data.jsonl").write_text('{"text": "a text of some words"}\n')
    return tmp_path


def run(folder: Path, first: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`chunkplan WORDS` in a process of its own, which runs `first` first."""
    command = [sys.executable, "-c", first + RUN, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    ["chunkplan_cli.app", "pyarrow"]
    + [pytest.param(each, marks=pytest.mark.soak) for each in ("typer", "rich.console", "chunkplan_cli.build")],
)
def test_ctrl_c_while_modules_are_imported_ends_in_words(folder: Path, module: str) -> None:
    ran = run(folder, INTERRUPTED_AT.format(module=module), *BUILD)
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGINT, "", "interrupted\n")


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", ""), ("SIGINT", "interrupted\n")])
def test_a_signal_while_compiled_code_returns_is_no_bug(folder: Path, name: str, said: str) -> None:
    ran = run(folder, SIGNALLED_IN_COMPILED_CODE.format(name=name), "analyze", "data.jsonl")
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.Signals[name], "", said)


def test_ctrl_c_when_all_is_done_changes_nothing(folder: Path) -> None:
    ran = run(folder, INTERRUPTED_AT_THE_END, *BUILD)
    assert ran.returncode == 0 and "plan in chunkplan-out/plan" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("pyarrow", BUILD),
        ("tokenizers", ("analyze", "data.jsonl", "--tokenizer", TOKENIZER)),
        ("typer", ("--help",)),
        ("rich", ("--version",)),
        ("tokenizers", ("parity", "--lengths", "9,8", "--chunk-size", "4", "--k", "1")),
    ],
)
def test_what_is_missing_of_an_installation_is_named_with_its_bounds(
    folder: Path, module: str, words: tuple[str, ...]
) -> None:
    ran = run(folder, f"import sys; sys.modules[{module!r}] = None", *words)
    [requirement] = [each for each in requires("chunkplan") or [] if each.startswith(module)]
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr == f"error: {module} is not installed\nhint: pip install '{requirement}'\n"


def test_another_module_that_is_missing_is_a_bug(folder: Path) -> None:
    ran = run(folder, "import sys; sys.modules['chunkplan.planning.batches'] = None", *BUILD)
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr and "error: this is a bug in chunkplan" in ran.stderr
