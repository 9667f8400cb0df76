"""Finds the chat template of a tokenizer and records where it is from."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import JsonObject
from chunkplan.intake.template import ChatTemplate

HINT = "fix this file, or give another tokenizer"


@dataclass(frozen=True)
class TemplateSource:
    """The text of a chat template, what it is from, for errors, and that of the one for conversations with tools."""

    text: str
    where: str
    for_tools: str | None = None


@dataclass(frozen=True)
class TemplateChoice:
    """A template that the user gave in place of the tokenizer's own, and the day on which it is rendered."""

    given: TemplateSource | None
    today: str | None

    def make(
        self, own: TemplateSource | None, special_tokens: dict[str, str], ends: Collection[str]
    ) -> ChatTemplate | None:
        """The template to use, where there is one; `own` is the tokenizer's; raises DataError where it is not Jinja."""
        source = self.given or own
        if source is None:
            return None
        return ChatTemplate(
            source.text, special_tokens, source.where, self.today, for_tools=source.for_tools, ends=ends
        )


def read_template(path: Path) -> TemplateSource:
    """Read a template file that the user named: Jinja, or JSON with a `chat_template`.

    Raises UsageError where there is no such file, DataError where it is not UTF-8, or JSON without a template.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the chat template {path}: {error.strerror}", hint="--chat-template takes a Jinja file"
        ) from error
    if path.suffix != ".json":
        return TemplateSource(decode_template(content, path), str(path))
    source = choose_template(read_object(content, path).get("chat_template"), str(path))
    if source is None:
        raise DataError("no `chat_template` in it", where=str(path), hint=HINT)
    return source


def decode_template(content: bytes, path: Path) -> str:
    """Decode `content`, of a Jinja file; raises DataError where it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error}", where=str(path), hint=HINT) from error


def choose_template(value: Any, where: str) -> TemplateSource | None:
    """Choose from a `chat_template`: one, or several by name, "default" and "tool_use"; raises DataError else."""
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    for_tools = None
    if isinstance(value, dict):
        if "default" not in value:
            raise DataError('`chat_template` has no template named "default"', where=where, hint=HINT)
        value, for_tools = value["default"], value.get("tool_use")
    if value is None:
        return None
    if not isinstance(value, str) or not isinstance(for_tools, (str, type(None))):
        raise DataError("`chat_template` is neither a template nor a list of named ones", where=where, hint=HINT)
    return TemplateSource(value, where, for_tools)


def read_object(content: bytes, file: Path) -> JsonObject:
    """Parse `content`, of a file beside a tokenizer; raises DataError where it is no JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=str(file), hint=HINT) from error
    if not isinstance(value, dict):
        raise DataError("expected a JSON object", where=str(file), hint=HINT)
    return value
