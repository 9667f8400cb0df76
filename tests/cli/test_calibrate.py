"""`chunkplan calibrate` as it is typed: what it measures, prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chunkplan.cost.hardware import load_hardware
from chunkplan_cli.app import run_command
from chunkplan_runtime.devices import device_name

SMALL = ("--model", "model", "--device", "cpu", "--chunk-sizes", "16,24,32", "--prefixes", "32", "--repeats", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., dict[str, Any]]) -> Path:
    """The current folder, with the config of a tiny model in `model/` and lengths in `lengths.npy`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_config("llama")))
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 9000, 500).astype(np.int32))
    return tmp_path


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `chunkplan WORDS` there -> exit code, stdout, stderr."""

    def invoke(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chunkplan", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return invoke


def test_a_calibration_is_a_profile_that_tune_takes(
    folder: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a model's config to a choice, on this machine; every line fits the terminal."""
    code, out, err = run("calibrate", *SMALL, "--output", "here.toml", "--base", "a100", "--layers", "1")
    assert code == 0, err
    assert out.index("Chunks, in tokens") < out.index("Profile") < out.index("Held-out error: ")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    for words in (
        "16 of 8",
        "32 after 32",
        "fp32_flops",
        "1 layer and the head",
        "What one device cannot tell is that of a100",
    ):
        assert words in out
    assert "next: chunkplan tune --model model --hardware here.toml" in err
    profile = load_hardware(folder / "here.toml")
    assert profile.name == f"here ({device_name(torch.device('cpu'))})"
    assert profile.peak_flops == load_hardware("a100").peak_flops
    code, out, err = run(
        "tune", "lengths.npy", "--model", "model", "--hardware", "here.toml", "--chunk-sizes", "1024,4096",
        "--ks", "1", "--global-batch", "16",
    )  # fmt: skip
    assert code == 0, err
    assert "1 x here (" in out


def test_one_json_document_says_all_of_it(folder: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("calibrate", *SMALL, "--output", "here.toml", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert len(document["chunks"]) == 9
    assert sum(chunk["held_out"] for chunk in document["chunks"]) == 3
    held_out = [
        abs(chunk[name])
        for chunk in document["chunks"]
        if chunk["held_out"]
        for name in ("forward_kv_error", "train_error")
    ]
    assert document["held_out_error"]["worst"] == pytest.approx(max(held_out))
    assert document["held_out_error"]["median"] == pytest.approx(np.median(held_out))
    assert document["model"]["num_layers"] == 2
    assert (document["left_out"], document["profile"]) == ([], "here.toml")
    assert document["hardware"]["fp32_flops"] == pytest.approx(load_hardware("here.toml").fp32_flops, rel=1e-5)
    code, _, err = run("calibrate", *SMALL, "--output", "here.toml", "--json")  # its own file is replaced
    assert code == 0, err


REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "a device that is not there": (("--device", "cuda:99"), "--device is cuda:99"),
    "a strange device": (("--device", "tpu"), "--device is 'tpu', expected auto, cpu, cuda"),
    "two sizes": (("--chunk-sizes", "16,32"), "--chunk-sizes is 16,32, expected three or more"),
    "sizes that are no numbers": (
        ("--chunk-sizes", "1X,2K,4K"),
        "--chunk-sizes is '1X,2K,4K', expected a number of tokens",
    ),
    "more layers than there are": (("--layers", "3"), "--layers is 3"),
    "no layers": (("--layers", "0"), "--layers is 0"),
    "no repeats": (("--repeats", "0"), "--repeats is 0"),
    "no such base": (("--base", "b3000"), "b3000 is no hardware profile"),
    "no such kernel": (("--attention", "best"), "there is no attention kernel 'best'"),
    "no such model": (("--model", "./none"), "./none: no config.json"),
    "a file of somebody else": (("--output", "mine.toml"), "mine.toml exists and is no calibration"),
    "no folder": (("--output", "none/here.toml"), "there is no folder none"),
    "no TOML": (("--output", "here.json"), "'here.json' is no name for a profile"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_in_words(
    case: str, folder: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured, and nothing is written."""
    monkeypatch.setenv("COLUMNS", "300")
    (folder / "mine.toml").write_text("mine")
    before = sorted(folder.rglob("*"))
    words, message = REFUSALS[case]
    code, out, err = run("calibrate", *SMALL, "--output", "here.toml", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err
    assert "Traceback" not in err
    assert sorted(folder.rglob("*")) == before
    assert (folder / "mine.toml").read_text() == "mine"


def test_nothing_is_left_of_a_calibration_that_was_interrupted(
    folder: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from chunkplan_runtime.calibration import calibrate as calibration

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "time_probe", interrupted)
    before = sorted(folder.rglob("*"))
    code, _, err = run("calibrate", *SMALL, "--output", "here.toml")
    assert (code, "interrupted" in err) == (130, True)
    assert sorted(folder.rglob("*")) == before
