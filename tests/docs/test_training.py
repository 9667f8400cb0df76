"""What docs/training.md says of one process is so; `test_distributed.py` has the others."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from chunkplan.options import options_of
from chunkplan_runtime.train import main
from chunkplan_runtime.training.config import PRECISIONS, TrainConfig
from tests.support.places import ROOT
from tests.support.training_checks import lines

TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("\n## Several processes\n")[0]
SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """An empty folder beside the sample data, after the commands of the document."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    [block] = re.findall(r"```sh\n(.*?)```", TRAINING, re.S)
    [toml] = re.findall(r"```toml\n(.*?)```", TRAINING, re.S)
    (folder / "run.toml").write_text(toml)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(command)
            if program == "python":
                assert arguments[:2] == ["-m", "chunkplan_runtime.train"]
                assert main(arguments[2:]) == 0, command
            else:
                subprocess.run([str(SCRIPTS / program), *arguments], check=True, capture_output=True)
    return folder


def test_the_commands_run_as_written_and_leave_what_is_said(ran):
    [table] = re.findall(r"^\| in the output folder.*?\n\n", TRAINING, re.M | re.S)
    for name in re.findall(r"^\| `([a-z.]+)/?", table, re.M):
        assert (ran / "run" / name).exists() or name in ("sequences.jsonl", "measured.json"), name
    assert [path.name for path in sorted((ran / "run" / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    AutoTokenizer.from_pretrained(ran / "run" / "final")
    model = AutoModelForCausalLM.from_pretrained(ran / "run" / "final")
    PeftModel.from_pretrained(model, ran / "adapted" / "final")
    assert json.loads((ran / "run" / "config.json").read_text())["config"]["lr_schedule"] == "cosine"


def test_every_entry_of_a_line_is_explained(ran):
    [table] = re.findall(r"A line of `metrics.jsonl`:\n\n(.*?)\n\n", TRAINING, re.S)
    named = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(lines(ran / "run" / "metrics.jsonl")[0])
    [sentence] = re.findall(r"A line of `evals.jsonl` has (.*?)\.\n", TRAINING, re.S)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(lines(ran / "run" / "evals.jsonl")[0])


@pytest.mark.docs
def test_the_options_that_are_named_are_there():
    known = {one.flag for one in options_of(TrainConfig).values()}
    known |= {name.replace("--", "--no-", 1) for name in known}
    commands = TRAINING.replace("\\\n", " ")
    commands = re.sub(r"^chunkplan .*$|`chunkplan .*?`|`torchrun .*?`", "", commands, flags=re.M)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", commands))
    assert len(named) > 20
    assert named - {"--config", "--help"} <= known
    [table] = re.findall(r"^\| `--precision`.*?\n\n", TRAINING, re.M | re.S)
    assert set(re.findall(r"^\| `([a-z][a-z0-9-]*)`", table, re.M)) == set(PRECISIONS)
