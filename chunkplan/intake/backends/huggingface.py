"""Tokenizers from their files, or by their name on the Hugging Face hub through transformers (the `hub` extra).

The files are tokenizer.json, and beside it tokenizer_config.json and chat_template.jinja.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from chunkplan.errors import DataError, UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.backends.chat_templates import (
    HINT,
    TemplateChoice,
    TemplateSource,
    choose_template,
    decode_template,
    read_object,
)
from chunkplan.intake.backends.fast import FastTokenizer
from chunkplan.intake.hub import silent_hub
from chunkplan.intake.records import JsonObject
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.tokenizer_hash import tokenizer_hash

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"

#: What transformers shows to chat templates, where it is set, beside all else that a configuration calls a token.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def is_path(name: str) -> bool:
    """Return whether a name is a path: one that exists here, or looks as if it should."""
    return Path(name).exists() or name.endswith(".json") or name[:1] in (".", "/", "~") or name.count("/") > 1


def load_files(name: str, choice: TemplateChoice) -> RecordTokenizer:
    """Load a tokenizer.json or a folder with one; raises UsageError for a missing, DataError for a damaged one."""
    path = Path(name)
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no {_FILE}" if path.is_dir() else f"there is no tokenizer at {path}"
        raise UsageError(what, hint=f"--tokenizer takes a {_FILE} or a folder with one, a name, or tiktoken:NAME")
    content = file.read_bytes()
    try:
        description = read_object(content, file)
        content_hash = tokenizer_hash(description)  # before it is changed
        library = FastTokenizer(description, content.decode())
    except ValueError as error:
        raise DataError(f"not a tokenizer: {error}", where=str(file), hint=HINT) from error
    config_file = file.with_name(_CONFIG)
    config = read_object(config_file.read_bytes(), config_file) if config_file.is_file() else {}
    special_tokens = _special_tokens(config, config_file)
    eos = special_tokens.get("eos_token")
    if eos and library.find(eos) is None:
        raise DataError(f"`eos_token` is {eos!r}, which {file} does not know", where=str(config_file), hint=HINT)
    template = choose_template(config.get("chat_template"), str(config_file))
    template_file, tool_file = file.with_name(_TEMPLATE), file.parent / _TOOL_TEMPLATE
    if template_file.is_file():
        for_tools = decode_template(tool_file.read_bytes(), tool_file) if tool_file.is_file() else None
        text = decode_template(template_file.read_bytes(), template_file)
        template = TemplateSource(text, str(template_file), for_tools)
    adds = config.get("add_bos_token") is True, config.get("add_eos_token") is True
    return _loaded(name, library, content_hash, special_tokens, adds, choice, template)


def _special_tokens(config: JsonObject, file: Path) -> dict[str, str]:
    """The special tokens by name, each of which is written as a string or as an object with its `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise DataError(f"`{name}` is {token!r}, expected a string", where=str(file), hint=HINT)
        found |= {} if token is None else {name: token}
    named = {key: token for key, token in config.items() if key.endswith("_token")}
    more = config.get("extra_special_tokens")
    named |= more if isinstance(more, dict) else {}
    return found | {key: token for key, token in named.items() if isinstance(token, str)}


def load_from_hub(name: str, choice: TemplateChoice) -> RecordTokenizer:
    """Load a tokenizer through transformers, from its cache or the hub.

    Raises UsageError where there is no such tokenizer or no transformers, DataError where its chat template is not one.
    """
    if len(Path(name).parts) > 1 and Path(name).parent.is_dir():  # a path with a slip of the pen
        raise UsageError(f"there is no tokenizer at {name}", hint="give a tokenizer.json or a folder with one")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        message = f"there is no tokenizer at {name}, and a name on the hub needs transformers"
        raise UsageError(message, hint=pip_install("hub")) from error
    silent = silent_hub()
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=silent is not None)
    except Exception as error:  # it raises whatever came of the network, the cache and the files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if silent is not None:
            reason = f"{silent}, and it was not fetched before"
        raise UsageError(
            f"there is no tokenizer at {name}, and transformers cannot load one of that name: {reason}",
            hint="check the name, the network and HF_HOME, or give a tokenizer.json or a folder with one",
        ) from error
    own = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(own, Tokenizer):
        raise UsageError(
            f"the tokenizer {name} ({type(loaded).__name__}) is not one of the tokenizers library",
            hint="give a tokenizer that has a tokenizer.json",
        )
    content = own.to_str()
    description = json.loads(content)
    content_hash = tokenizer_hash(description)  # before it is changed
    adds = getattr(loaded, "add_bos_token", False) is True, getattr(loaded, "add_eos_token", False) is True
    template = choose_template(loaded.chat_template, name)
    library = FastTokenizer(description, content)
    return _loaded(name, library, content_hash, loaded.special_tokens_map, adds, choice, template)


def _loaded(
    name: str,
    library: FastTokenizer,
    content_hash: str,
    special_tokens: dict[str, str],
    adds: tuple[bool, bool],
    choice: TemplateChoice,
    template: TemplateSource | None,
) -> RecordTokenizer:
    """The tokenizer; `adds` says whether texts get what begins and what ends them, `template` is its own."""
    bos, eos, pad = (library.find(special_tokens.get(f"{token}_token")) for token in ("bos", "eos", "pad"))
    return RecordTokenizer(
        path=name,
        content_hash=content_hash,
        bos=bos,
        eos=eos,
        begins_text=adds[0],
        ends_text=adds[1],
        template=choice.make(template, special_tokens, library.special_tokens),
        library=library,
        pad=pad,
    )
