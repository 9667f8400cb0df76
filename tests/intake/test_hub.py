"""Datasets by their name on the Hub, fetched by the real client from a stand-in on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hub_stand_in import hub_with

_README = """---
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: train_gen
    path: data/train_gen-*
  - split: test_sft
    path: data/test_sft-*
---
# Chats
"""
_CONFIGS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: [main/test.jsonl]}
- config_name: socratic
  data_files: socratic/*.jsonl
---
"""


def _lines(*lengths: int) -> bytes:
    return "".join(json.dumps({"length": length}) + "\n" for length in lengths).encode()


_DATASETS = {
    "org/chats": {
        "README.md": _README.encode(),
        "data/train_sft-0.jsonl": _lines(11),
        "data/train_gen-0.jsonl": _lines(12),
        "data/test_sft-0.jsonl": _lines(13),
    },
    "org/several.v1": {
        "README.md": _CONFIGS.encode(),
        "main/train.jsonl": _lines(21),
        "main/test.jsonl": _lines(22),
        "socratic/a.jsonl": _lines(23),
    },
    "org/bare": {
        "train.jsonl": _lines(31),
        "validation.csv": b"length\n32\n",
        "dataset_infos.json": b"{}",
        "x.py": b"",
    },
    "org/code": {"x.py": b"", "README.md": b"# Nothing"},
}

#: Analyses the first argument and prints the lengths to train on and to evaluate on, or the error.
_SCRIPT = """
import json, sys
from chunkplan import analyze
from chunkplan.errors import UsageError
try:
    found = analyze({"train": sys.argv[1], "eval": sys.argv[2:]}, "out")
    parts = [part["part"] if "part" in part else "train" for part in found.manifest["sources"]]
    lengths = dict(zip(map(parts.__getitem__, found.source.tolist()), found.num_tokens.tolist()))
    print(json.dumps(lengths))
except UsageError as error:
    print(json.dumps([error.message, error.hint]))
"""

Ask = Callable[..., object]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, list[str]]]:
    with hub_with(_DATASETS) as hub:
        yield hub


@pytest.fixture
def ask(tmp_path: Path, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Analyses in a process of its own, as the client reads the address of the Hub when it is imported."""

    def run(*data: str, **environment: str) -> object:
        for name, value in {"HF_ENDPOINT": served[0], "HF_HOME": str(tmp_path / "hf"), **environment}.items():
            monkeypatch.setenv(name, value)
        ran = subprocess.run([sys.executable, "-c", _SCRIPT, *data], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return run


def test_the_files_of_a_split_are_fetched_and_no_others(ask: Ask, served: tuple[str, list[str]]) -> None:
    served[1].clear()
    assert ask("org/chats:train_sft", "org/chats:test_sft") == {"train": 11, "eval": 13}
    assert set(served[1]) == {"README.md", "data/train_sft-0.jsonl", "data/test_sft-0.jsonl"}
    assert ask("org/chats:train_sft", HF_HUB_OFFLINE="1") == {"train": 11}
    assert ask("org/chats:train_sft", HF_ENDPOINT="http://127.0.0.1:9") == {"train": 11}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("org/several.v1:main", {"train": 21, "eval": 22}),
        ("org/several.v1:main/test", {"train": 22}),
        ("org/several.v1:socratic", {"train": 23}),
        ("org/bare", {"train": 31, "eval": 32}),
        ("org/bare:validation", {"train": 32}),
    ],
)
def test_configs_and_splits_are_those_of_the_readme_or_of_the_files(ask: Ask, data: str, found: object) -> None:
    assert ask(data) == found


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ("org/chats", "has the splits train_sft, train_gen, test_sft", "such as org/chats:train_sft"),
        ("org/several.v1", "has the configs main, socratic", "such as org/several.v1:main"),
        ("org/chats:train", "has no config or split train", "org/chats:default/train_sft"),
        ("org/several.v1:main/dev", "has no config or split main/dev", "org/several.v1:main/train"),
        (
            "org/code",
            "the dataset org/code on the Hub has no files of kinds that are read",
            "hf://datasets/org/code/FILE",
        ),
        ("org/none", "there is no file org/none, and no dataset of that name can be fetched", "check the name"),
        ("data/train.jsonl", "there is no file data/train.jsonl", "give files"),
    ],
)
def test_what_is_not_clear_or_not_there_is_said_with_what_to_type(ask: Ask, data: str, message: str, hint: str) -> None:
    found = ask(data)
    assert isinstance(found, list)
    assert message in found[0] and hint in found[1]


def test_offline_it_is_said_what_was_looked_for(ask: Ask) -> None:
    found = ask("org/chats:train_sft", HF_HUB_OFFLINE="1")
    assert isinstance(found, list) and "HF_HUB_OFFLINE is set, and it was not fetched before" in found[0]


def test_a_path_that_exists_goes_before_a_name(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "org" / "chats").mkdir(parents=True)
    (tmp_path / "org" / "chats" / "a.jsonl").write_bytes(_lines(41))
    assert ask("org/chats") == {"train": 41}
    assert "there is no file org/bare" in ask("org/bare")[0]  # type: ignore[index]  # its folder is here
