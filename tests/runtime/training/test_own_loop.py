"""Training loops of one's own: the example and the page run as they are, and a run goes on as if it never stopped."""

from __future__ import annotations

import re
import runpy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.places import ROOT

EXAMPLE = ROOT / "examples" / "own_loop.py"


@pytest.fixture
def workspace(tmp_path, monkeypatch, tiny_config, handmade_plan, random_sequences):
    """An empty folder but for a model and a plan of four steps, under the names that the page calls them by."""
    plan, _ = handmade_plan(random_sequences([12] * 4), [{0: [[(step, 0, 8)], [(step, 8, 12)]]} for step in range(4)])
    (tmp_path / "chunkplan-out").mkdir()
    (tmp_path / "chunkplan-out" / "plan").symlink_to(plan)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config())).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("example", ["own_loop.py", "chunk_trainer.py"])
@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_an_example_says_what_it_takes(monkeypatch, example, arguments):
    path = EXAMPLE.with_name(example)
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    with pytest.raises(SystemExit, match=rf"python {example} [A-Z]+"):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("example", ["own_loop.py", "chunk_trainer.py"])
def test_an_example_says_what_is_wrong_with_a_plan_and_what_to_do(
    workspace, monkeypatch, capsys, example, handmade_plan, random_sequences
):
    staged, _ = handmade_plan(random_sequences([5]), [{0: [[(0, 0, 5)]]}], pp=2, actions=[])
    monkeypatch.setattr("sys.argv", [example, "path/to/model", str(staged), "output"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE.with_name(example)), run_name="__main__")
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error == f"error: {staged}: the plan is for 2 pipeline stages, one is there"
    assert hint.startswith(f"hint: `chunkplan build --like {staged} --dp 1 --pp 1 ")


def test_a_run_in_two_halves_is_the_run_in_one(workspace, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), "path/to/model", "chunkplan-out/plan", *map(str, arguments)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    whole = run("whole")
    assert [line.split()[:2] for line in whole] == [["step", str(step)] for step in range(4)]
    halves = run("halves", 2)
    assert len(halves) == 2
    halves += run("halves")
    assert halves == whole
    assert run("halves") == []
    first, one, other = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("path/to/model", "whole", "halves")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], first[name]) for name in one)


def test_the_loop_of_the_page_trains(workspace, capsys):
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    [loop, _, _] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "import Executor" in block]
    assert len(loop.splitlines()) <= 20
    exec(loop, {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "3"]
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("path/to/model", "trained"))
    changed = [not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def test_the_weights_of_the_page_are_trained_where_they_are_not_frozen(workspace, capsys):
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    [_, recipe, _] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "import Executor" in block]
    torch.save(AutoModelForCausalLM.from_pretrained("path/to/model").state_dict(), "weights.pt")
    variables = {}
    exec(recipe, variables)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "3"]
    assert variables["trained"] and all(".self_attn." in name for name in variables["trained"])


def test_the_loss_of_the_page_is_one(workspace, capsys):
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    [_, _, recipe] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "import Executor" in block]
    exec(recipe, {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "3"]
