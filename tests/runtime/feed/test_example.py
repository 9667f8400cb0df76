"""The example of a training loop of one's own runs as it is, and goes on where it stopped as if it never had."""

from __future__ import annotations

import json
import runpy

import pytest
import torch

from tests.support.places import ROOT

EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("example", ["own_loop.py", "chunk_trainer.py"])
@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_an_example_says_what_it_takes(monkeypatch, example, arguments):
    path = EXAMPLE.with_name(example)
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    with pytest.raises(SystemExit, match=rf"python {example} [A-Z]+"):
        runpy.run_path(str(path), run_name="__main__")


def test_a_run_in_two_halves_is_the_run_in_one(
    tmp_path, monkeypatch, capsys, tiny_config, handmade_plan, random_sequences
):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), str(plan), str(config), *map(str, arguments)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    steps = [{0: [[(step, 0, 8)], [(step, 8, 12)]]} for step in range(4)]
    plan, _ = handmade_plan(random_sequences([12] * 4), steps)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config()))
    whole = run(tmp_path / "whole.pt")
    assert [line.split()[:2] for line in whole] == [["step", str(step)] for step in range(4)]
    halves = run(tmp_path / "halves.pt", 2)
    assert len(halves) == 2
    halves += run(tmp_path / "halves.pt")
    assert halves == whole
    assert run(tmp_path / "halves.pt") == []
    one, other = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("whole.pt", "halves.pt"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
