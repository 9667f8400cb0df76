"""A tokenizer from its files: tokenizer.json, and beside it tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.backends.chat_templates import TemplateChoice, TemplateSource, choose_template, decode_template
from chunkplan.intake.backends.fast import FastTokenizer
from chunkplan.intake.backends.json_object import HINT, read_object
from chunkplan.intake.records import JsonObject
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.tokenizer_hash import tokenizer_hashes

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"

#: What transformers shows to chat templates, where it is set, beside all else that a configuration calls a token.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def takes(name: str) -> bool:
    """Whether a name is a path: one that exists here, or looks as if it should."""
    return Path(name).exists() or name.endswith(".json") or name[:1] in (".", "/", "~") or name.count("/") > 1


def load(name: str, choice: TemplateChoice) -> RecordTokenizer:
    """Load a tokenizer.json or a folder with one.

    Raises:
        UsageError: there is no such file.
        DataError: one of the files is not what it should be.
    """
    path = Path(name)
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no {_FILE}" if path.is_dir() else f"there is no tokenizer at {path}"
        raise UsageError(what, hint=f"--tokenizer takes a {_FILE} or a folder with one, a name, or tiktoken:NAME")
    content = file.read_bytes()
    try:
        description = read_object(content, file)
        content_hash, file_hash = tokenizer_hashes(description, content)  # before it is changed
        library = FastTokenizer(description, content.decode())
    except ValueError as error:
        raise DataError(f"not a tokenizer: {error}", where=str(file), hint=HINT) from error
    config_file = file.with_name(_CONFIG)
    config = read_object(config_file.read_bytes(), config_file) if config_file.is_file() else {}
    special_tokens = {
        key: token for key in _SPECIAL_TOKENS if (token := _special_token(config, key, config_file)) is not None
    }
    named = {key: token for key, token in config.items() if key.endswith("_token")}
    more = config.get("extra_special_tokens")
    named.update(more if isinstance(more, dict) else {})
    special_tokens.update({key: token for key, token in named.items() if isinstance(token, str)})
    eos = special_tokens.get("eos_token")
    if eos and library.find(eos) is None:
        raise DataError(f"`eos_token` is {eos!r}, which {file} does not know", where=str(config_file), hint=HINT)
    return RecordTokenizer(
        path=name,
        content_hash=content_hash,
        earlier_hash=file_hash,
        bos=library.find(special_tokens.get("bos_token")),
        eos=library.find(eos),
        begins_text=config.get("add_bos_token") is True,
        ends_text=config.get("add_eos_token") is True,
        template=choice.make(_own_template(file, config, config_file), special_tokens, library.special_tokens),
        library=library,
        pad=library.find(special_tokens.get("pad_token")),
    )


def _special_token(config: JsonObject, name: str, file: Path) -> str | None:
    """A special token is written as a string or as an object with its `content`."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"`{name}` is {token!r}, expected a string", where=str(file), hint=HINT)
    return token


def _own_template(file: Path, config: JsonObject, config_file: Path) -> TemplateSource | None:
    template_file = file.with_name(_TEMPLATE)
    if template_file.is_file():
        source = decode_template(template_file.read_bytes(), template_file)
        tools_file = file.parent / _TOOL_TEMPLATE
        if tools_file.is_file():
            return replace(source, for_tools=decode_template(tools_file.read_bytes(), tools_file).text)
        return source
    return choose_template(config.get("chat_template"), str(config_file))
