"""Tokenizers by where they come from, one backend a file: `load_tokenizer` finds the one that a name is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chunkplan.intake.backends import files, hub, tiktoken_name
from chunkplan.intake.backends.chat_templates import TemplateChoice, read_template
from chunkplan.intake.tokenizer import RecordTokenizer


@dataclass(frozen=True)
class Backend:
    """Where tokenizers come from: `takes` says whether a name is for this backend, and `load` loads what it names."""

    takes: Callable[[str], bool]
    load: Callable[[str, TemplateChoice], RecordTokenizer]


#: Asked in this order; the last takes everything.
BACKENDS = {
    "tiktoken": Backend(tiktoken_name.takes, tiktoken_name.load),
    "tokenizers": Backend(files.takes, files.load),
    "transformers": Backend(hub.takes, hub.load),
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
    backend = next(backend for backend in BACKENDS.values() if backend.takes(str(name)))
    return backend.load(str(name), TemplateChoice(own, today))
