"""Loads a tokenizer from its files: tokenizer.json, and beside it tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.tokenizer import RecordTokenizer

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_HINT = "mend this file, or give another tokenizer"


def load_tokenizer(path: Path) -> RecordTokenizer:
    """Load `path`, a tokenizer.json or a folder with one.

    Lengths must be those of the data, so a truncation or padding stored in the file is switched off, and so is the
    trimming of spaces from offsets, under which a token of nothing but spaces has no place in the text.

    Raises:
        UsageError: there is no such file.
        DataError: one of the files is not what it should be.
    """
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no {_FILE}" if path.is_dir() else f"there is no tokenizer at {path}"
        raise UsageError(what, hint=f"--tokenizer takes a {_FILE} or a folder with one")
    content = file.read_bytes()
    tokenizer = _read_tokenizer(content, file)
    config_file = file.with_name(_CONFIG)
    config = _read_object(config_file.read_bytes(), config_file) if config_file.is_file() else {}
    special_tokens = {
        name: token for name in ("bos_token", "eos_token") if (token := _special_token(config, name, config_file))
    }
    eos = special_tokens.get("eos_token")
    eos_id = tokenizer.token_to_id(eos) if eos else None
    if eos and eos_id is None:
        raise DataError(f"`eos_token` is {eos!r}, which {file} does not know", where=str(config_file), hint=_HINT)
    return RecordTokenizer(
        path=path,
        content_hash=hashlib.sha256(content).hexdigest(),
        eos=(eos, eos_id) if eos and eos_id is not None else None,
        ends_text=config.get("add_eos_token") is True,
        template=_load_template(file, config, config_file, special_tokens),
        tokenizer=tokenizer,
    )


def _read_tokenizer(content: bytes, file: Path) -> Tokenizer:
    description = _read_object(content, file)
    description.update(truncation=None, padding=None)
    _keep_spaces(description.get("post_processor"))
    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises nothing more precise
        raise DataError(f"not a tokenizer: {error}", where=str(file), hint=_HINT) from error


def _keep_spaces(post_processor: Any) -> None:
    if isinstance(post_processor, dict):
        if "trim_offsets" in post_processor:
            post_processor["trim_offsets"] = False
        for processor in post_processor.get("processors") or []:
            _keep_spaces(processor)


def _read_object(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=str(file), hint=_HINT) from error
    if not isinstance(value, dict):
        raise DataError("expected a JSON object", where=str(file), hint=_HINT)
    return value


def _special_token(config: dict[str, Any], name: str, file: Path) -> str | None:
    """A special token is written as a string or as an object with its `content`."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"`{name}` is {token!r}, expected a string", where=str(file), hint=_HINT)
    return token


def _load_template(
    file: Path, config: dict[str, Any], config_file: Path, special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """chat_template.jinja, else the `chat_template` of the configuration: one, or the "default" of several."""
    template_file = file.with_name(_TEMPLATE)
    if template_file.is_file():
        try:
            return ChatTemplate(template_file.read_text(encoding="utf-8"), special_tokens, str(template_file))
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8: {error}", where=str(template_file), hint=_HINT) from error
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        if "default" not in named:
            raise DataError('`chat_template` has no template named "default"', where=str(config_file), hint=_HINT)
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise DataError(
            "`chat_template` is neither a template nor a list of named ones", where=str(config_file), hint=_HINT
        )
    return ChatTemplate(source, special_tokens, str(config_file))
