"""An option is declared once: its flag, its entry in files, its check and its words come from its field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import CostModel, IntakeOptions, PlanConfig, TuneOptions, load_plan
from chunkplan.domains import find_mismatch, read_tokens
from chunkplan.errors import UsageError
from chunkplan.options import UNSET, entries_of, options_of, read_settings
from chunkplan.planfile.manifest import PLAN
from chunkplan_cli.app import app
from chunkplan_runtime.training.config import TrainConfig
from tests.support.command_line import Run

CONFIGS = [IntakeOptions, PlanConfig, CostModel, TuneOptions, TrainConfig]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.array([300, 20_000, 5_000, 70]))
    return command


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (TrainConfig, "early_stopping", "--early-stopping is 0, expected a whole number from 1"),
        (PlanConfig, "dp", "--dp is 0, expected a whole number from 1 to 65,536"),
    ],
)
def test_a_bound_is_said_that_anybody_could_meet(config: Any, name: str, words: str) -> None:
    """Which the largest number of 64 bits is not."""
    with pytest.raises(UsageError) as refused:
        options_of(config)[name].check(0)
    assert str(refused.value) == words


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_declared_and_its_default_is_one_of_its_values(config: Any) -> None:
    declared = options_of(config)
    assert [field.name for field in dataclasses.fields(config)] == list(declared)
    for one in declared.values():
        assert one.help.endswith("."), one.name
        if not one.is_required and one.default is not UNSET:
            one.check(one.domain.load(one.default))


@pytest.mark.parametrize("config", CONFIGS)
def test_no_flag_stands_for_two_options(config: Any) -> None:
    flags = [flag for one in options_of(config).values() if one.flag for flag in (one.flag, *one.also)]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [("8192", 8192), ("8k", 8192), ("8K", 8192), ("128K", 131_072), ("1M", 1_048_576), ("1.5k", 1536), (" 4k ", 4096)],
)
def test_tokens_are_typed_as_people_write_them(typed: str, tokens: int) -> None:
    assert read_tokens(typed) == tokens


@pytest.mark.parametrize("typed", ["", "k", "8kb", "-8k", "8 k", "1.3", "0.0001k", "8G", "٨", "1e3", "8192.5"])
def test_what_is_no_number_of_tokens_is_none(typed: str) -> None:
    with pytest.raises(ValueError):
        read_tokens(typed)


@given(st.integers(1, 2**31 - 1))
def test_a_number_of_tokens_is_itself(tokens: int) -> None:
    assert read_tokens(str(tokens)) == tokens


def test_tokens_may_have_a_unit_wherever_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('chunk-size = "4k"\nk = 2\nmax_activation_tokens = "16k"\n')
    assert run("build", "lengths.npy", "--config", "plan.toml", "--output", "of-file").code == 0
    assert run("build", "lengths.npy", "--chunk-size", "4K", "--k", "2,16k:1", "--output", "of-flags").code == 0
    of_file, of_flags = (load_plan(tmp_path / name).config for name in ("of-file", "of-flags"))
    assert (of_file.chunk_size, of_file.memory_tokens, of_file.k_by_length) == (4096, 16_384, None)
    assert (of_flags.chunk_size, of_flags.k, of_flags.k_by_length) == (4096, 2, ((16_384, 1),))
    assert run("tune", "lengths.npy", "--chunk-sizes", "4k,8K", "--gpu-memory", "900GiB", "--json").code == 0
    assert run("simulate", "--lengths", "1k,9K", "--chunk-size", "2k", "--k", "2").code == 0
    assert run("export", "lengths.npy", "--to", "jsonl", "--chunk-size", "1X").code == 2


@pytest.mark.parametrize("name", options_of(PlanConfig))
def test_a_flag_a_file_and_python_refuse_the_same_value_in_the_same_words(name: str, run: Run, tmp_path: Path) -> None:
    """A text with a blank is a value of no option of a plan. What part a plan is of follows from --holdout alone."""
    one = options_of(PlanConfig)[name]
    with pytest.raises(UsageError, match=re.escape(f"expected {one.domain.expected}")):
        PlanConfig(**({"chunk_size": 8, "k": 1} | {name: "no way"}))
    (tmp_path / "plan.toml").write_text(f'{one.called} = "no way"\n')
    in_file = one.domain.expected if name != "part" else "unknown entry `part`"
    with pytest.raises(UsageError, match=re.escape(in_file)):
        read_settings(tmp_path / "plan.toml", PlanConfig)
    assert find_mismatch("no way", entries_of(PlanConfig)[name], name) is not None
    if one.flag and one.domain.metavar:
        ran = run("build", "lengths.npy", "--chunk-size", "8", "--k", "1", one.flag, "no way")
        assert ran.code == 2
        assert f"{one.flag} is 'no way', expected {one.domain.typed or one.domain.expected}" in ran.err


def test_yaml_says_what_toml_says(tmp_path: Path) -> None:
    """Also what it takes for text or for true and false, such as 1e-5, 8K and off; and in sections of commands."""
    in_toml = 'chunk-size = "8K"\nk = 1\ncp = "off"\nkeep_attention = "auto"\nholdout = 0.01\n'
    (tmp_path / "plan.toml").write_text(in_toml)
    in_yaml = "chunk-size: 8K\nk: 1\ncp: off\nkeep_attention: auto\nholdout: 1e-2\n"
    (tmp_path / "plan.yaml").write_text(in_yaml)
    sections = "train: {lr: 1e-5, report-to: tensorboard, freeze: ['*.mlp.*']}\nbuild:\n  "
    (tmp_path / "both.yml").write_text(sections + in_yaml.replace("\n", "\n  "))
    names = ("plan.toml", "plan.yaml", "both.yml")
    first, *others = (read_settings(tmp_path / name, PlanConfig, section="build") for name in names)
    assert others == [first, first] and (first["chunk_size"], first["cp"]) == (8192, "off")
    of_run = read_settings(tmp_path / "both.yml", TrainConfig, section="train")
    assert of_run == {"lr": 1e-5, "report_to": ("tensorboard",), "freeze": ("*.mlp.*",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k: [1", "not YAML: while parsing a flow sequence"),
        ("- k", "not YAML: there are no names with values"),
        ("", "not YAML: there are no names with values"),
        ("k: many", '`k` is "many", expected a whole number'),
        ("k:", "`k` is null, expected a whole number"),
        ("chunk-sice: 8", "unknown entry `chunk-sice`"),
    ],
)
def test_what_is_wrong_in_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        read_settings(tmp_path / "plan.yaml", PlanConfig)
    assert str(tmp_path / "plan.yaml") in str(refused.value)


def test_the_check_of_a_manifest_has_every_option_of_a_plan() -> None:
    assert {name.removesuffix("?") for name in PLAN["config"]} == {*options_of(PlanConfig)}


def test_a_configuration_out_of_a_file_is_taken_as_it_is() -> None:
    """Whether options go together is not asked of a plan that is there; missing ones have their defaults."""
    config = PlanConfig.from_entries({"chunk_size": 8, "k": 1, "pp": 2, "virtual_stages": 3, "k_by_length": [[9, 2]]})
    assert (config.schedule, config.virtual_stages, config.k_by_length) == ("auto", 3, ((9, 2),))
    assert not config.tail_sharing and config.global_batch == 256
    with pytest.raises(UsageError, match="one virtual stage"):
        PlanConfig(chunk_size=8, k=1, pp=2, virtual_stages=3)


@pytest.mark.parametrize("name", [command.name for command in app().registered_commands])
def test_help_shows_no_types_of_python(name: str, command: Run) -> None:
    shown = command(name, "--help", width=80).out
    assert not re.search(r"<\w+(\[\w+\])?>", shown)
