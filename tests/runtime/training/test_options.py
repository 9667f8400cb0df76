"""Options of training: flags and TOML say the same, flags win, and what is wrong is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkplan.errors import UsageError
from chunkplan_runtime.train import main, read_options

NEEDED = ["--plan", "p", "--output", "o", "--model", "m"]


def read(*arguments):
    return read_options([str(argument) for argument in arguments])


def set_exactly(names, given, monkeypatch):
    """Set of the variables `names` what is given, the others not; what the test sets of them is taken back."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"WORLD_SIZE": "2"}, {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        (
            {"WORLD_SIZE": "2", "CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": "16"},
            {"CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": "16"},
        ),
        ({}, {}),
    ],
)
def test_several_processes_have_cuda_not_wait_for_devices_unless_it_is_set(given, expected, monkeypatch):
    names = {*(name for name in os.environ if name.startswith(("CUDA_", "WORLD_"))), *expected}
    set_exactly(names, given, monkeypatch)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert {name: value for name, value in os.environ.items() if name.startswith("CUDA_")} == expected


def test_what_torch_reads_is_set_before_it_is_there():
    program = """
import os, sys
from chunkplan_runtime.train import main
try:
    main(["--help"])
finally:
    print(os.environ["CUDA_MODULE_LOADING"], "torch" in sys.modules, file=sys.stderr)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "EAGER False"


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "y:2"}])
def test_memory_of_a_gpu_is_taken_in_segments_that_grow_unless_its_allocator_is_set(given, monkeypatch):
    set_exactly(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), given, monkeypatch)
    with pytest.raises(SystemExit):
        main(["--help"])
    names = [name for name in os.environ if name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF")]
    found = {name: os.environ[name] for name in names}
    assert found == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_file_says_what_flags_say_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'plan = "p"\noutput = "o"\nmodel = "m"\nlr = 1\nwarmup = 0.1\nmax-steps = 7\nresume = true\n'
        'lora_rank = 4\nlora-targets = ["q_proj", "v_proj"]\nlr_schedule = "cosine"\n'
    )
    same = ("--lr", 1, "--warmup", 0.1, "--max-steps", 7, "--resume")
    same += ("--lora-rank", 4, "--lora-targets", "q_proj,v_proj")
    assert read("--config", file) == read(*NEEDED, *same, "--lr-schedule", "cosine")
    config = read("--config", file, "--lr", 2, "--no-resume", "--plan", "other")
    assert (config.lr, config.resume, config.plan, config.max_steps) == (2.0, False, Path("other"), 7)
    assert type(read("--config", file).lr) is float


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("learning-rate = 1", "unknown entry `learning-rate`", "it is one of plan, analysis, "),
        ("max_stepz = 1", "unknown entry `max_stepz`", "max-steps"),
        ("max-steps = 1.5", "expected a whole number", ""),
        ("max-steps = true", "expected a whole number", ""),
        ('lr = "high"', "expected a number", ""),
        ("plan = 1", "expected a path", ""),
        ('resume = "yes"', "expected true or false", ""),
        ("lora-targets = [1]", "expected a string, or several with commas between", ""),
        ("lr =", "not TOML", ""),
    ],
)
def test_a_wrong_entry_of_a_file_is_named_with_the_file(tmp_path, line, message, hint):
    file = tmp_path / "run.toml"
    file.write_text(line)
    with pytest.raises(UsageError) as raised:
        read(*NEEDED, "--config", file)
    assert message in str(raised.value) and str(file) in str(raised.value)
    assert hint in raised.value.hint


def test_a_file_that_is_not_there_and_options_that_are_missing_are_named(tmp_path):
    with pytest.raises(UsageError, match="toml: cannot be read"):
        read(*NEEDED, "--config", tmp_path / "no.toml")
    with pytest.raises(UsageError, match="--plan is missing"):
        read("--output", "o", "--model", "m")
    with pytest.raises(UsageError, match="neither is given"):
        read("--plan", "p", "--output", "o")
    with pytest.raises(UsageError, match="both are given"):
        read(*NEEDED, "--model-config", "c")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("--max-steps", "0"),
        ("--max-epochs", "0"),
        ("--keep-last", "0"),
        ("--save-every", "-1"),
        ("--eval-every", "-1"),
        ("--lora-rank", "-1"),
        ("--lora-dropout", "1.0"),
        ("--lora-alpha", "0.0"),
        ("--lr", "0.0"),
        ("--lr", "nan"),
        ("--min-lr", "1.5"),
        ("--warmup", "1.5"),
        ("--warmup", "-1.0"),
        ("--weight-decay", "-0.1"),
        ("--beta1", "1.0"),
        ("--beta2", "-1.0"),
        ("--eps", "0.0"),
        ("--max-grad-norm", "-1.0"),
        ("--max-grad-norm", "inf"),
        ("--loss-spike-factor", "1.0"),
        ("--loss-spike-factor", "nan"),
        ("--seed", "-1"),
        ("--device", "tpu"),
    ],
)
def test_a_value_out_of_range_is_named_by_its_flag(name, wrong):
    with pytest.raises(UsageError, match=f"{name} is '?{wrong}.*, expected "):
        read(*NEEDED, name, wrong)


@pytest.mark.parametrize("more", [["--precision", "int8"], ["--max-steps", "x"], ["--no-such"], ["--max-step", "1"]])
def test_options_that_do_not_parse_exit_2_with_a_hint(more, capsys):
    assert main([*NEEDED, *more]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and hint.startswith("hint: ")


def test_choices_hold_for_files_too(tmp_path):
    (tmp_path / "run.toml").write_text('precision = "int8"')
    with pytest.raises(UsageError, match='`precision` is "int8", expected fp32 or fp64'):
        read(*NEEDED, "--config", tmp_path / "run.toml")


def test_adapters_of_a_model_that_nothing_keeps_and_options_without_effect_are_refused():
    with pytest.raises(UsageError, match="random weights that nothing keeps"):
        read("--plan", "p", "--output", "o", "--model-config", "c", "--lora-rank", 4)
    with pytest.raises(UsageError, match="--lora-alpha without --lora-rank would do nothing"):
        read(*NEEDED, "--lora-rank", 0, "--lora-alpha", 8)
    with pytest.raises(UsageError, match="--load-in-4bit without --lora-rank would do nothing"):
        read(*NEEDED, "--lora-rank", 0, "--load-in-4bit")
    assert read(*NEEDED, "--lora-alpha", 8).lora_rank is None, "as planned, which is not known yet"
