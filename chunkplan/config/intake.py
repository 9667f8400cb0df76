"""Options of the intake besides data and tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from chunkplan.domains import FLAG, SHARE, WORDS, Domain, one_of, tokens
from chunkplan.errors import UsageError
from chunkplan.options import Advanced, Options, option

#: The schemas that `chunkplan.intake.schemas.table` has.
SCHEMAS = (
    *("text", "messages", "conversations", "prompt+completion", "instruction", "question+answer", "preference"),
    *("input_ids", "prompt_ids+response_ids", "length"),
)

#: Those whose records are conversations of any number of turns.
CONVERSATIONS = ("messages", "conversations")

#: The trained turns of a conversation.
Turns = Literal["rendered", "last", "each"]

#: What is read of one record at most. Encoding takes up to 130 times as much memory where it is encoded whole.
MAX_RECORD_BYTES = 8_000_000

#: As people count the bytes of a record.
MEGABYTE = 1_000_000


class SourceOverrides(dict[str, str]):
    """Options of single sources; `places` has the place in a file of those not given as a flag.

    Those that are `optional` are of no account in a run that has no source of theirs.
    """

    def __init__(
        self, entries: Mapping[str, str], places: Mapping[str, str] | None = None, optional: Collection[str] = ()
    ) -> None:
        super().__init__(entries)
        self.places = dict(places or {})
        self.optional = frozenset(optional)

    @classmethod
    def of(cls, entries: Mapping[str, str]) -> SourceOverrides:
        """`entries`, which may know where they were said."""
        return entries if isinstance(entries, SourceOverrides) else cls(entries)

    def place(self, entry: str, flag: str) -> str:
        """The place of `entry` for an error: that in a file, or the option as typed after `flag`."""
        return self.places.get(entry) or f"{flag} {entry}={self[entry]}"


#: What is said of the messages of a conversation: the key of who speaks, and of what is said; and who speaks where the
#: data have another name, role.user=customer.
SPEAKERS = ("system", "user", "assistant", "tool", "function_call")
IN_MESSAGES = ("role", "content", *(f"role.{name}" for name in SPEAKERS))
_NEXT = re.compile(rf",(?=(?:{'|'.join(map(re.escape, IN_MESSAGES))})=)")


def _read_columns(typed: list[str]) -> dict[str, str]:
    """The key of each role, as typed: {"text": "body", "a.jsonl:text": "code"} for ["text=body", "a.jsonl:text=code"].

    The first part of what stands before a colon names sources (see `source_columns`), also for what is said of messages
    behind commas: {"role": "by", "content": "said"} for ["role=by,content=said"].
    """
    columns: dict[str, str] = {}
    for words in (part for entry in typed for part in _apart(entry)):
        entry, sign, key = words.partition("=")
        source, colon, role = entry.rpartition(":")
        if not (role and sign and key) or (colon and not source):
            raise ValueError(words)
        if columns.get(entry, key) != key:
            of_source = f" of {source}" if source else ""
            raise UsageError(f"two columns for the role {role}{of_source}", hint="give every role at most once")
        columns[entry] = key
    return columns


def _apart(typed: str) -> list[str]:
    """Split the value of one --column; every part gets the source prefix of the first."""
    first, *others = _NEXT.split(typed)
    source, colon, _ = first.partition("=")[0].rpartition(":")
    return [first, *(f"{source}{colon}{other}" for other in others)]


def _load_columns(value: Any) -> Any:
    """Keys by role, where those of some sources stand under their name: {"a.jsonl": {"text": "code"}}."""
    if not isinstance(value, Mapping):
        return value
    columns: dict[Any, Any] = {}
    for entry, key in value.items():
        if not isinstance(key, Mapping):
            columns[entry] = key
            continue
        of_source = {f"{entry}:{role}": inner for role, inner in key.items()}
        if not entry or any(not role or ":" in role for role in key) or not of_source.keys().isdisjoint(value):
            return value  # which is no mapping of strings
        columns |= of_source
    said = SourceOverrides.of(value)
    return SourceOverrides(columns, said.places, said.optional)


def _read_formats(typed: list[str]) -> dict[str, str | dict[str, str]]:
    """Parse formats as typed, for all sources and for single ones: ["text", "a.log=jsonl"]."""
    found: dict[str, str | dict[str, str]] = {}
    formats: dict[str, str] = {}
    for words in typed:
        source, equals, name = words.rpartition("=")
        if not name or bool(equals) != bool(source):
            raise ValueError(words)
        if source in formats or (not source and "schema" in found):
            of_source = f"of {source}" if source else "for all sources"
            raise UsageError(f"two formats {of_source}", hint="of some sources: --format SOURCE=NAME or =NAME,NAME")
        if source:
            found["formats"] = formats
            formats[source] = name
        else:
            found["schema"] = name
    return found


FORMAT = Domain(
    lambda value: value in SCHEMAS,
    f"one of {', '.join(SCHEMAS)}",
    read=_read_formats,
    typed="NAME or SOURCE=NAME",
    metavar="NAME",
    completed=SCHEMAS,
    example="data.log=jsonl",
    is_repeated=True,
)
FORMATS = Domain(WORDS.holds, "names of formats by source")
COLUMNS = Domain(
    WORDS.holds,
    "keys by role, or by source and role",
    load=_load_columns,
    read=_read_columns,
    typed="ROLE=KEY or SOURCE:ROLE=KEY",
    metavar="ROLE=KEY",
    example="text=body",
    is_repeated=True,
)
IGNORED = Domain(
    lambda value: isinstance(value, tuple) and all(isinstance(key, str) and key for key in value),
    "a list of keys",
    read=lambda typed: tuple(dict.fromkeys(typed)),
    load=lambda value: tuple(value) if isinstance(value, list) else value,
    typed="KEY or SOURCE:KEY",
    metavar="KEY",
    example="weight",
    is_repeated=True,
)
FILES = replace(
    IGNORED, expected="a list of files, folders or patterns", typed="FILE", metavar="FILE", example="dev.jsonl"
)


def _read_variables(typed: list[str]) -> dict[str, Any]:
    """Values by name: of JSON where they are, else texts; ["enable_thinking=false", "effort=high"]."""
    found: dict[str, Any] = {}
    for words in typed:
        name, sign, value = words.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(words)
        found[name] = value
        with suppress(ValueError, RecursionError):
            found[name] = json.loads(value)
    return found


VARIABLES = Domain(
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
    "values by name",
    read=_read_variables,
    typed="NAME=VALUE",
    metavar="KEY=VAL",
    example="enable_thinking=false",
    is_repeated=True,
)

#: Signs that a separator of texts has as they are typed.
_SIGNS = {r"\n": "\n", r"\t": "\t", r"\f": "\f", r"\r": "\r"}
SEPARATOR = Domain(
    lambda value: isinstance(value, str) and bool(value),
    r"line, or what stands between two texts, such as '\n\n'",
    read=lambda typed: re.sub(r"\\[ntfr]", lambda sign: _SIGNS[sign[0]], typed),
    metavar="SEP",
    completed=("line",),
    example="line",
)
RECORD_BYTES = Domain(
    holds=lambda value: type(value) is int and 1 <= value < 10**15,
    expected="megabytes above 0",
    read=lambda typed: round(float(typed) * MEGABYTE),
    metavar="MB",
    example="16",
)

_TOKENS, _DATA = "Records and tokens", "What is read and what is kept"

#: Options that a manifest has only where they are given.
_UNSAID: dict[str, object] = {"chat_template_kwargs": {}, "text_split": None, "text_end": "auto"}


@dataclass(frozen=True, kw_only=True)
class IntakeOptions(Options):
    """Options for reading data, as `analyze` does.

    Example: `chunkplan.IntakeOptions(max_length=32768, long="drop")`

    `columns`: role -> key of the records, for keys that are not named like the roles of a schema, or of messages
    (`role`, `content`), or role.NAME -> what the data call this speaker; SOURCE:role -> key
    for the sources whose path ends in SOURCE or matches it as a pattern, which goes before what is for all; so may
    SOURCE -> {role -> key}. `ignore_columns` are keys that are as if they were not there, KEY or SOURCE:KEY, where
    `messages[].KEY` is one of each message. `formats`: SOURCE -> a schema, or how the name of the file would end if it
    said what the file is (`jsonl`, `json.gz`, ...), or both with a comma between. Of a `sample` nothing can be trained:
    no tokens are stored.

    Raises:
        UsageError: one makes no sense.
    """

    schema: str | None = option(
        FORMAT,
        "Layout: text, messages, conversations, prompt+completion, instruction, question+answer, "
        "preference, input_ids, prompt_ids+response_ids or length, of some sources qa.jsonl=question+answer; or the "
        "type of a file, data.log=jsonl. Repeatable.",
        group=_TOKENS,
        default=None,
        default_words="detected for each source",
        flag="--format",
        fills=("schema", "formats"),
    )
    formats: Mapping[str, str] = option(
        FORMATS, "Formats of some sources.", group=_TOKENS, default={}, default_words="", flag=""
    )
    columns: Mapping[str, str] = option(
        COLUMNS,
        "The key of a role: text=body, of some sources code.jsonl:text=body, of messages "
        "role=from,content=value,role.user=me. Repeatable.",
        group=_TOKENS,
        default={},
        default_words="",
        flag="--column",
    )
    ignore_columns: tuple[str, ...] = option(
        IGNORED,
        "A key that is read as if it was not there, also messages[].KEY, or for some sources only: code.jsonl:KEY. "
        "Repeatable.",
        group=Advanced(_TOKENS),
        default=(),
        default_words="",
        flag="--ignore-column",
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        VARIABLES,
        "A variable for the chat template, such as enable_thinking=false; `chat_template_kwargs` of a record goes "
        "before it. Repeatable.",
        group=Advanced(_TOKENS),
        default={},
        default_words="",
        flag="--template-kwargs",
    )
    text_split: str | None = option(
        SEPARATOR,
        r"Split text files (.txt) into a record for each line (line), or at a separator such as '\n\n'.",
        group=Advanced(_TOKENS),
        default=None,
        default_words="a file is one record",
    )
    text_end: Literal["auto", "eos"] = option(
        one_of("auto", "eos", metavar="WHAT"),
        "The token behind each plain text: as the tokenizer's configuration says (auto), or its `eos_token` (eos).",
        group=Advanced(_TOKENS),
        default="auto",
    )
    turns: Turns = option(
        one_of("rendered", "last", "each", metavar="WHAT"),
        "Turns of the assistant that are trained: all, as the chat template renders them (rendered), the last one "
        "(last), or each, in a sequence of its own that ends with it (each).",
        group=_TOKENS,
        called="train-turns",
        default="rendered",
    )
    max_length: int | None = option(
        tokens(), "Most tokens of a sequence.", group=_TOKENS, default=None, default_words="any"
    )
    long: Literal["error", "drop", "truncate"] = option(
        one_of("error", "drop", "truncate", metavar="WHAT"),
        "What to do with sequences over --max-length: error, drop or truncate.",
        group=_TOKENS,
        called="overlong",
        default="truncate",
    )
    on_error: Literal["stop", "skip"] = option(
        one_of("stop", "skip", metavar="WHAT"),
        "At a record that cannot become a sequence: stop, or skip (count it, list it and go on). Blank records are "
        "only counted.",
        group=Advanced(_DATA),
        default="stop",
    )
    undesirable: Literal["error", "drop", "keep"] = option(
        one_of("error", "drop", "keep", metavar="WHAT"),
        "What to do with answers that are labelled as bad, as in data for KTO (`label`: false): error, drop, or keep "
        "them and all labels, for a loss that takes both.",
        group=Advanced(_DATA),
        called="kto-negatives",
        default="error",
    )
    tokens: bool = option(
        FLAG,
        "Store lengths only: enough to plan, not to train.",
        group=Advanced(_DATA),
        default=True,
        default_words="",
        flag="--no-tokens",
    )
    sample: float | None = option(
        SHARE,
        "Read only this share of the records, for a rough plan.",
        group=Advanced(_DATA),
        default=None,
    )
    max_record_bytes: int = option(
        RECORD_BYTES,
        "Size of the largest record; each MB may take 130 MB of memory in each process.",
        group=Advanced(_DATA),
        default=MAX_RECORD_BYTES,
        default_words=str(MAX_RECORD_BYTES // MEGABYTE),
        flag="--max-record-mb",
    )

    def check_together(self) -> None:
        """Refuse to treat long sequences where none is too long."""
        if self.long != "truncate" and self.max_length is None:
            raise UsageError(
                f"--overlong {self.long} without a maximum length", hint="say with --max-length what is too long"
            )

    @property
    def stores_tokens(self) -> bool:
        """True if tokens, where there are any, are stored."""
        return self.tokens and self.sample is None

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        found = asdict(self) | {"columns": dict(self.columns), "formats": dict(self.formats)}
        return {name: value for name, value in found.items() if name not in _UNSAID or value != _UNSAID[name]}
