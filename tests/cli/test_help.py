"""Help, shell completion, and that both come at once: what a user meets before anything is done."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import chunkplan
import chunkplan_runtime
from chunkplan.config import intake, plan
from chunkplan.cost.hardware import SHIPPED, load_hardware
from chunkplan.errors import UsageError
from chunkplan.intake.schemas.table import SCHEMAS
from chunkplan.packing import PACKERS
from chunkplan_cli.app import app
from chunkplan_runtime.training.config import ATTENTION

COMMANDS = typer.main.get_command(app()).commands  # type: ignore[attr-defined]
PROGRAM = Path(sys.executable).parent / "chunkplan"

#: The options that every command has.
HELPS = {"--help", "--help-all"}

#: What takes longer to import than help may take.
HEAVY = (
    *("numpy", "polars", "pyarrow", "numba", "ortools", "tokenizers", "jinja2"),
    *("torch", "transformers", "plotly", "datasets", "ray", "fsspec"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_that_parses(name: str, command: Callable[..., Any]) -> None:
    """It is on one line at 80 columns: broken in two, a shell would take it for two commands."""
    ran = command(name, "--help", width=80)
    assert ran.code == 0
    example, *others = [line.strip() for line in ran.out.rpartition("╯")[2].splitlines() if line.strip()]
    program, named, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (program, named) == ("chunkplan", name)
    COMMANDS[name].make_context(name, arguments)
    for line in others:
        assert re.fullmatch(rf"[1-9]\d* more options: chunkplan {name} --help-all", line)


def test_the_list_of_commands_is_the_same_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    listed, imported = (
        app(*words)(["--help"], standalone_mode=False) or capsys.readouterr().out for words in (["--help"], [])
    )
    assert "gain" in listed
    assert listed == imported


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_help_all_shows_every_option(name: str, command: Callable[..., Any]) -> None:
    """60 lines of 80 columns have what is most used; what they leave out is counted below them."""
    short, full = (command(name, flag, width=80) for flag in ("--help", "--help-all"))
    assert (short.code, full.code, short.err, full.err) == (0, 0, "", "")
    assert short.out.count("\n") <= 60
    options = {each.opts[0] for each in COMMANDS[name].params if each.param_type_name == "option"}
    shown, left = ({*re.findall(r"^│ (?:[* ] {1,4})?(--[\w-]+)", ran.out, re.M)} - HELPS for ran in (full, short))
    assert shown == options and left <= options
    counted = re.findall(r"(\d+) more options: ", short.out)
    assert [int(number) for number in counted] == ([len(options - left)] if options - left else [])


def test_the_help_of_all_ends_with_an_example_too(command: Callable[..., Any]) -> None:
    [example] = [line.strip() for line in command("--help").out.rpartition("╯")[2].splitlines() if line.strip()]
    for line in example.removeprefix("Example: ").split(" && "):
        program, named, *arguments = shlex.split(line)
        assert program == "chunkplan"
        COMMANDS[named].make_context(named, arguments)


def test_every_option_says_what_it_is() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_help_and_completion_import_nothing_heavy() -> None:
    """`import chunkplan`, the help of everything, and a completion; in a process that has imported nothing yet."""
    code = (
        "import os, sys, chunkplan\n"
        "from chunkplan_cli.main import main\n"
        "def run(*words):\n"
        "    sys.argv = ['chunkplan', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "commands = sys.argv[2:]\n"
        "heavy = set(sys.argv[1].split(','))\n"
        "run('--help')\n"
        "for name in commands: run(name, '--help')\n"
        "words = {'COMP_WORDS': 'chunkplan build --packing ', 'COMP_CWORD': '3'}\n"
        "os.environ.update(words, _CHUNKPLAN_COMPLETE='complete_bash')\n"
        "run()\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    arguments = [sys.executable, "-c", code, ",".join(HEAVY), *COMMANDS]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Example: chunkplan ") == 1 + len(COMMANDS)
    assert ran.stdout.splitlines()[-1] == plan.PACKERS[-1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_script_for_every_shell(shell: str) -> None:
    ran = complete(f"source_{shell}")
    assert "_CHUNKPLAN_COMPLETE=complete_" + shell in ran.stdout
    assert ran.stderr == ""


def test_bash_completes_what_is_typed_once_completion_is_installed(tmp_path: Path) -> None:
    """Installed by its option into an empty home, read by a bash, and asked as bash asks when a key is pressed."""
    script = (
        "chunkplan --show-completion && chunkplan --install-completion > /dev/null && . ~/.bashrc\n"
        "COMP_WORDS=(chunkplan build --packing m) COMP_CWORD=3\n"
        "_chunkplan_completion chunkplan\n"
        'echo "offered ${COMPREPLY[*]}"\n'
    )
    path = os.pathsep.join([str(PROGRAM.parent), os.environ["PATH"]])
    environment = {"HOME": str(tmp_path), "PATH": path, "SHELL": "/bin/bash"}
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "complete -o default -F _chunkplan_completion chunkplan" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "offered mbs"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chunkplan val", ["validate"]),
        ("chunkplan build --chunk-s", ["--chunk-size"]),
        ("chunkplan build --split ", ["full", "even", "cost", "none"]),
        ("chunkplan build --packing ", [*plan.PACKERS]),
        ("chunkplan build --hardware h", ["h100", "h200"]),
        ("chunkplan simulate --compare 1f1b,z", ["1f1b,zero-bubble", "1f1b,zero-bubble-v"]),
        ("chunkplan analyze --format p", ["prompt+completion", "preference", "prompt_ids+response_ids"]),
        ("chunkplan calibrate --device c", ["cpu", "cuda"]),
    ],
)
def test_the_shell_completes_commands_options_and_names(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]
) -> None:
    monkeypatch.setenv("_CHUNKPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    assert command().out.split() == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chunkplan inspect --step ", ["0", "1", "2"]),
        ("chunkplan inspect chunkplan-out/plan --rank 1 --step ", ["0", "1", "2"]),
        ("chunkplan simulate --workspace chunkplan-out --rank ", ["0", "1"]),
        ("chunkplan simulate chunkplan-out/plan --step 2", ["2"]),
        ("chunkplan inspect no/such/plan --step ", []),
        ("chunkplan inspect lengths.npy --step ", []),
    ],
)
def test_the_shell_completes_steps_and_ranks_of_the_plan(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Callable[..., Any]
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27, 40, 50]))
    assert command("build", "lengths.npy", "--chunk-size", 128, "--k", 1, "--global-batch", 2, "--dp", 2).code == 0
    monkeypatch.setenv("_CHUNKPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    ran = command()
    assert (ran.out.split(), ran.err) == (offered, "")


@pytest.mark.parametrize("package", [chunkplan, chunkplan_runtime])
def test_python_offers_the_public_names_of_a_package(package: Any) -> None:
    """A key in a notebook or a REPL asks `dir`."""
    assert dir(package) == sorted(package.__all__)


def test_names_that_are_completed_are_those_there_are() -> None:
    assert set(plan.PACKERS) == set(PACKERS)
    assert set(intake.SCHEMAS) == set(SCHEMAS)
    with pytest.raises(UsageError) as refused:
        load_hardware("no such profile")
    assert f"one of {', '.join(sorted(SHIPPED))}," in refused.value.hint


def test_kernels_that_are_completed_are_those_there_are() -> None:
    kernel = pytest.importorskip("chunkplan_runtime.attention.kernels", reason="kernels are torch's")
    assert (kernel.AUTO, *kernel.KERNELS) == ATTENTION


def complete(instruction: str) -> subprocess.CompletedProcess[str]:
    """What a shell gets from `chunkplan`, called as its completion script calls it."""
    environment = {**os.environ, "_CHUNKPLAN_COMPLETE": instruction}
    return subprocess.run([str(PROGRAM)], env=environment, capture_output=True, text=True, check=True)


#: What is wrong with it typer finds out, some of it without saying of which command; or the command itself does.
@pytest.mark.parametrize(
    "words",
    [
        *((name, "--json=3") for name in COMMANDS),
        *((name, "--nope") for name in COMMANDS),
        ("inspect", "--step"),
        ("inspect", "a", "b"),
        ("parity", "--chunk-size", "0", "--k", "1", "--lengths", "9"),
        ("simulate", "--chunk-size", "9", "--k", "0", "--lengths", "9"),
        ("tune", "--seed", "-1", "lengths.npy", "--gpus", "1"),
        ("build", "lengths.npy", "--chunk-size", "9", "--k", "0"),
        ("build", "lengths.npy", "--auto", "--dp", "0"),
    ],
    ids=" ".join,
)
def test_a_hint_that_names_the_help_names_that_of_the_command(
    words: tuple[str, ...], command: Callable[..., Any]
) -> None:
    np.save("lengths.npy", np.array([9, 8]))
    ran = command(*words)
    assert (ran.code, ran.out) == (2, "")
    assert f"hint: `chunkplan {words[0]} --help` shows what it takes\n" in ran.err
