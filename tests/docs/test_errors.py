"""docs/errors.md: every message of its tables is one that the source can print."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import run_here
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
TOKENIZER = ROOT / "sample_data" / "tokenizer"

#: Below so many letters that do not vary, a string of the source could be anything.
LEAST_LETTERS = 5

#: The share of the letters of a message that have to stand in the source. The others are what varies in an example.
LEAST_KNOWN = 2 / 3


def messages_of_the_page() -> list[str]:
    """The first cells of the tables of messages, each message by itself."""
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [double or single for cell in cells for double, single in re.findall(r"`` (.*?) ``|`(.*?)`", cell)]


def letters_of(text: str) -> int:
    return len(re.findall("[A-Za-z]", text))


#: A string of the source: a pattern with a group for each part, and of each whether it is one that does not vary.
Template = tuple[re.Pattern[str], list[bool]]


@pytest.fixture(scope="module")
def templates() -> list[Template]:
    """Every string in the source."""
    files = [path for folder in ("chunkplan", "cli", "runtime") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    named = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    found = {}
    for node in nodes:
        texts = [texts_of(part, named) for part in (node.values if isinstance(node, ast.JoinedStr) else [node])]
        if sum(letters_of(some[0]) for some in texts if some) >= LEAST_LETTERS:
            found["".join(f"({'|'.join(map(re.escape, some)) or '.*?'})" for some in texts)] = [*map(bool, texts)]
    return [(re.compile(pattern), fixed) for pattern, fixed in found.items()]


def texts_of(part: ast.AST, named: dict[str, str]) -> list[str]:
    """What a part of a string may say, `named` being the constants with a name; nothing if it varies."""
    match part:
        case ast.FormattedValue(value=ast.Name(id=name)) if name in named:
            return [named[name], "…"]
        case ast.FormattedValue(value=ast.IfExp(body=ast.Constant(value=one), orelse=ast.Constant(value=other))):
            return [str(one), str(other), "…"]
        case ast.Constant(value=value):
            return [str(value)]
    return []


def letters_known(text: str, templates: list[Template], *, inside: bool = True) -> int:
    """How many letters of `text` stand in the string of the source that fits best, and in those `inside` of it."""
    most = 0
    for pattern, fixed in templates:
        if match := pattern.fullmatch(text):
            parts = [*zip(match.groups(), fixed, strict=True)]
            letters = sum(letters_of(part) for part, stands in parts if stands)
            if inside:
                letters += sum(letters_known(part, templates, inside=False) for part, stands in parts if not stands)
            most = max(most, letters)
    return most


def is_known(message: str, templates: list[Template]) -> bool:
    """Whether most of it stands in the source."""
    return letters_known(message, templates) >= LEAST_KNOWN * letters_of(message)


@pytest.mark.docs
def test_every_message_is_one_of_the_source(templates: list[Template]) -> None:
    messages = messages_of_the_page()
    assert len(messages) > 70
    assert [message for message in messages if not is_known(message, templates)] == []


@pytest.mark.docs
def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = PAGE.split("| extra |")[1]
    explained = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z]+)`", row.split(" | ")[0])}
    assert explained == project["optional-dependencies"].keys() - {"dev"}


def test_the_screen_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([100, 3000, 20]))
    [(command, screen)] = re.findall(r"```console\n\$ chunkplan (.*)\n((?:.*\n)+?)```", PAGE)
    assert run_here(tmp_path, *shlex.split(command)).stderr == screen
