"""Where the workspace and the tokenizer are looked for, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkplan.errors import UsageError
from chunkplan.workspace import Workspace, find_tokenizer


def test_the_option_comes_before_the_environment_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKPLAN_WORKSPACE", raising=False)
    assert Workspace.find().root == Path("chunkplan-out")
    monkeypatch.setenv("CHUNKPLAN_WORKSPACE", "")
    assert Workspace.find().root == Path("chunkplan-out")
    monkeypatch.setenv("CHUNKPLAN_WORKSPACE", "env")
    assert Workspace.find().root == Path("env")
    assert Workspace.find(Path("option")) == Workspace(Path("option"))
    assert (Workspace.find().analysis, Workspace.find().plan) == (Path("env/analysis"), Path("env/plan"))


def test_a_tokenizer_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    monkeypatch.setenv("CHUNKPLAN_TOKENIZER", "")
    assert find_tokenizer(None, workspace) is None
    (tmp_path / "workspace.toml").write_text("# nothing set\n")
    assert find_tokenizer(None, workspace) is None
    (tmp_path / "workspace.toml").write_text('tokenizer = "../models/t"\n')
    assert find_tokenizer(None, workspace) == str(tmp_path / "../models/t")
    (tmp_path / "workspace.toml").write_text('tokenizer = "/models/t"\n')
    assert find_tokenizer(None, workspace) == "/models/t"
    for name in ("Qwen/Qwen2.5-7B", "tiktoken:cl100k_base"):
        (tmp_path / "workspace.toml").write_text(f'tokenizer = "{name}"\n')
        assert find_tokenizer(None, workspace) == name
    monkeypatch.setenv("CHUNKPLAN_TOKENIZER", "env")
    assert find_tokenizer(None, workspace) == "env"
    assert find_tokenizer("option", workspace) == "option"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"tokenizer = \n", "line 1"),
        (b"\xff", "not TOML"),
        (b'tokeniser = "t"\n', "unknown entry `tokeniser`"),
        (b"tokenizer = 3\n", "`tokenizer` is 3, expected the path"),
        (b'tokenizer = ""\n', '`tokenizer` is "", expected the path'),
        (b'[columns."a.jsonl"]\ntext = true\n', '`columns."a.jsonl".text` is true, expected keys by role'),
        (b"turns = 'last'\n", "unknown entry `turns`"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "workspace.toml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Workspace(tmp_path).tokenizer()
    assert caught.value.where == str(tmp_path / "workspace.toml")
    assert message in caught.value.message


def test_the_hint_of_a_file_that_is_not_toml_is_a_line_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "workspace.toml"
    file.write_text("schema = ")
    with pytest.raises(UsageError, match="not TOML") as caught:
        Workspace(tmp_path).settings()
    file.write_text(caught.value.hint.removeprefix("lines such as "))
    assert Workspace(tmp_path).settings() == {"schema": "text"}
