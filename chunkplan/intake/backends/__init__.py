"""Tokenizers by where they come from: `load_tokenizer` finds the backend that a name is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chunkplan.intake.backends import huggingface, tiktoken_name
from chunkplan.intake.backends.chat_templates import TemplateChoice, read_template
from chunkplan.intake.tokenizer import RecordTokenizer

#: Library -> whether a name is for it, and what loads one. Asked in this order; the last takes everything.
BACKENDS: dict[str, tuple[Callable[[str], bool], Callable[[str, TemplateChoice], RecordTokenizer]]] = {
    "tiktoken": (tiktoken_name.is_encoding, tiktoken_name.load),
    "tokenizers": (huggingface.is_path, huggingface.load_files),
    "transformers": (bool, huggingface.load_from_hub),
}


def load_tokenizer(
    name: str | Path, chat_template: str | Path | None = None, *, today: str | None = None
) -> RecordTokenizer:
    """Load a tokenizer.json or a folder with one, `ORG/NAME` through transformers, or `tiktoken:NAME`.

    Args:
        name: a path that exists is one, whatever it looks like.
        chat_template: a Jinja file, or a JSON file with `chat_template`, in place of the tokenizer's own.
        today: the day, as YYYY-MM-DD, that chat templates print which print one.

    Raises:
        UsageError: there is no such tokenizer, or the library for it is not installed.
        DataError: one of its files is not what it should be.
    """
    own = read_template(Path(chat_template)) if chat_template is not None else None
    load = next(load for takes, load in BACKENDS.values() if takes(str(name)))
    return load(str(name), TemplateChoice(own, today))
