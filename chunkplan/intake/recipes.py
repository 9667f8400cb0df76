"""Data as other trainers declare them: LLaMA-Factory's dataset_info.json, and the `datasets` of axolotl's YAML.

Each entry becomes the sources that it names, with the schema and the keys that it says. An entry that asks for anything
else stops the run, and the error names its key.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from chunkplan.config.intake import IntakeOptions, SourceOverrides
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.intake.files import is_url
from chunkplan.intake.hub import is_name
from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.keys import COUNTS
from chunkplan.intake.schemas.messages import ROLES
from chunkplan.intake.sources import describe, find_sources

#: Files that may declare data, and perhaps the names of some of their entries.
_DECLARED = re.compile(r"(?P<file>(.*/)?dataset_info\.json|.*\.ya?ml)(:(?P<names>.+))?", re.DOTALL)

#: Where an entry of LLaMA-Factory has its data.
_PLACES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")

#: Columns and tags of LLaMA-Factory -> the roles that they have here.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
_RANKED = {"instruction": "prompt", "conversations": "prompt"}  # of pairs
_SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "role.user", "assistant_tag": "role.assistant"}
_TAGS |= {"observation_tag": "role.tool", "function_tag": "role.function_call", "system_tag": "role.system"}

#: Fields of axolotl's entries -> roles, by the schema of their type; what is read of entries beside these.
_AXOLOTL = {
    "chat_template": ("messages", {"field_messages": "messages", "field_tools": "tools"}),
    "chat_template.default": (
        "preference",
        {"field_messages": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"},
    ),
    "sharegpt": ("conversations", {"field_messages": "conversations"}),
    "alpaca": ("instruction", {}),
    "completion": ("text", {"field": "text"}),
}
_FIELDS = {f"field_{role}": role for role in ("instruction", "input", "output", "system")}

#: Keys that ask for what is not done here -> another way, and what is trained without the key.
_PAIRS = "pairs are read where `ranking` is true, and their prompts are under another key than `prompt`"
#: Of axolotl's `rl`, what is learnt from pairs.
_OF_PAIRS = ("dpo", "ipo", "orpo", "simpo")
_MARKED = 'no option does it, but `"loss": true` in a message of the data; without that the assistant alone is trained'
_PROMPT = "give a template that writes it with --chat-template FILE; without the key the prompt is the chat template's"
_PART = "without the key all records are read, of which `chunkplan build --mix FILE=0.1` takes a tenth in each epoch"
_WAYS = {
    **dict.fromkeys(("ranking", "chosen", "rejected"), _PAIRS),
    **dict.fromkeys(("images", "videos", "audios"), "only text is planned; without the key the text is trained alone"),
    **dict.fromkeys(("num_samples", "shards", "split", "folder"), _PART),
    **dict.fromkeys(("format", "no_input_format", "system_prompt", "system_format", "chat_template"), _PROMPT),
    **dict.fromkeys(("train_on_inputs", "roles_to_train", "message_field_training"), _MARKED),
    "rl": f"it may be {', '.join(_OF_PAIRS)}; without the key the layout of the records says how they are trained",
    "tools": "write the records as sharegpt; without the key the prompts have no tools",
    "pretraining_dataset": "name it in `datasets`, with `type: completion`; without the key it is not trained",
    "type": f"it may be {', '.join(_AXOLOTL)} or fields; without the key the layout of the records is detected",
    "train_on_eos": "as with `turn`, and so without the key, every trained answer counts with its end",
    "message_property_mappings": "rename the key in the data; without this the chat template is not given what it has",
}
_SUFFIXES = {"json": "json", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "text": "txt"}


@dataclass
class Declared:
    """The paths that declarations stand for, and what these say of them: SOURCE -> format, SOURCE:ROLE -> key."""

    paths: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    evaluation: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def options(self, options: IntakeOptions) -> IntakeOptions:
        """`options`, and what is declared."""
        if not self.formats and not self.columns:
            return options
        columns, formats = (SourceOverrides.of(said) for said in (options.columns, options.formats))
        return replace(
            options,
            columns=SourceOverrides({**columns, **self.columns}, {**columns.places, **self.places}, columns.optional),
            formats=SourceOverrides({**formats, **self.formats}, {**formats.places, **self.places}, formats.optional),
        )


@dataclass(frozen=True)
class _Entry:
    """An entry of a declaration, for errors: `rest` says how to read the others."""

    place: str
    values: JsonObject
    rest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise DataError("expected an object of keys and values", where=self.place, hint="fix this entry")

    def refuse(self, key: str, value: Any) -> NoReturn:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        way = _WAYS.get(key.partition(".")[0], "take the key out if the same is to be trained without it")
        raise UsageError(f"{self.place}: `{key}` is {shown}, which is not done here", hint=way + self.rest)

    def only(self, *known: str, **values: tuple[Any, ...]) -> None:
        """Refuse a key that says something and is none of `known`, unless it has one of its `values`."""
        for key, value in self.values.items():
            if value not in (None, False, {}, [], "") and key not in known and value not in values.get(key, ()):
                self.refuse(key, value)


def declared(paths: Sequence[str | Path]) -> Declared:
    """The data that `paths` stand for, those that are no declarations for themselves.

    Raises:
        UsageError: an entry asks for what is not done here, or its data are not there.
        DataError: a file of entries is not what it should be.
    """
    found = Declared()
    for path in map(str, paths):
        match = _DECLARED.fullmatch(path)
        file = Path(match["file"]) if match else Path()
        content = _content(file) if file.is_file() else None
        entries = content if isinstance(content, dict) else {}
        if any(isinstance(entry, dict) and not entry.keys().isdisjoint(_PLACES) for entry in entries.values()):
            _add_llama_factory(found, file, entries, match and match["names"])
        elif isinstance(entries.get("datasets"), list) or entries.get("pretraining_dataset"):
            _add_axolotl(found, file, entries)
        else:
            found.paths.append(path)
    return found


def _add(
    found: Declared, entry: _Entry, path: str, schema: str | None, columns: Mapping[str, str], **more: Any
) -> None:
    """Add the sources of one entry; `more` may have the `suffix` that its files are read as, and `paths` to add to."""
    suffix = more.get("suffix")
    formats = {} if suffix is None or is_url(path) or describe(path) else {path: suffix}
    try:
        sources = [one.path for one in find_sources([path], [], formats) if not one.is_evaluation]
    except UsageError as error:
        raise UsageError(f"{entry.place}: {error.message}", hint=error.hint) from error
    more.get("paths", found.paths).extend(sources)
    for source in sources:
        name = source if is_url(source) or source.startswith("/") else f"./{source}"
        said = ",".join(filter(None, [schema, suffix if formats else None]))
        keys = {f"{name}:{role}": key for role, key in columns.items()}
        for known, new in ((found.formats, {name: said} if said else {}), (found.columns, keys)):
            if other := next((key for key in new if known.get(key, new[key]) != new[key]), None):
                raise UsageError(
                    f"{entry.place} and {found.places[other]} read {source} in two ways", hint="name one of the entries"
                )
            known |= new
        found.places |= dict.fromkeys([name, *keys], entry.place)


def _content(path: Path) -> Any:
    """The content of a file of YAML, of which JSON is a part."""
    import yaml

    try:
        return yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not YAML: {' '.join(str(error).split())}", where=str(path), hint="fix the file") from error


def _add_llama_factory(found: Declared, path: Path, entries: dict[str, JsonObject], names: str | None) -> None:
    chosen = names.split(",") if names else list(entries)
    if missing := next((name for name in chosen if name not in entries), None):
        raise UsageError(f"{path} has no dataset {missing}", hint=f"it has {', '.join(entries)}")
    taken: list[tuple[_Entry, str, str, dict[str, str]]] = []
    here, refused = list[str](), list[ChunkplanError]()
    for name in chosen:
        try:
            entry = _Entry(f"{path}: {name}", entries[name], f"; or name other entries: {path}:NAME,NAME")
            taken.append((entry, *_of_llama_factory(path, entry)))
            if not entry.values.get("hf_hub_url"):
                _add(Declared(), *taken[-1])
                here.append(name)
        except ChunkplanError as error:
            if names:
                raise
            refused.append(error)
    if refused:
        message = f"{refused[0].message} ({len(refused)} of {len(chosen)} entries cannot be read)"
        hint = f"name entries; those that can be read, and are here: {shlex.quote(f'{path}:' + ','.join(here))}"
        raise UsageError(message, hint=hint if here else refused[0].hint)
    for arguments in taken:
        _add(found, *arguments)


def _of_llama_factory(path: Path, entry: _Entry) -> tuple[str, str, dict[str, str]]:
    """The data of an entry, their schema, and the key of each role."""
    entry.only(*_PLACES, "formatting", "columns", "tags", "subset", "split", ranking=(True,))
    values = entry.values
    kind, columns, tags = values.get("formatting", "alpaca"), values.get("columns") or {}, values.get("tags") or {}
    place = next((key for key in _PLACES if values.get(key)), "file_name")
    if place not in ("hf_hub_url", "file_name"):
        entry.refuse(place, values[place])
    if kind not in ("alpaca", "sharegpt", "openai"):
        entry.refuse("formatting", kind)
    roles, is_ranked = {**(_ALPACA if kind == "alpaca" else _SHAREGPT), "kto_tag": "label"}, bool(values.get("ranking"))
    if is_ranked:
        roles = {key: _RANKED.get(role, role) for key, role in roles.items() if role not in ("output", "label")}
        roles |= {"chosen": "chosen", "rejected": "rejected"}
    _Entry(f"{entry.place}: columns", columns, entry.rest).only(*roles)
    _Entry(f"{entry.place}: tags", tags, entry.rest).only(*_TAGS)
    said = {roles[key]: column for key, column in columns.items() if column}
    schema = "instruction" if kind == "alpaca" else "conversations"
    if is_ranked:
        schema, said = "preference", {"prompt": schema, **said}
        if kind == "alpaca" and said["prompt"] == "prompt":  # where texts are joined without a template
            entry.refuse("ranking", True)
    elif kind == "alpaca" and columns and "output" not in said:  # for pretraining
        schema, said = "text", {"text": said.get("instruction", "instruction")}
    said |= {role: tag for role, tag in ((_TAGS[key], tag) for key, tag in tags.items()) if _is_new(role, tag)}
    if place == "file_name":
        return str(path.parent / str(values.get("file_name"))), schema, said
    return _on_hub(values[place], values.get("subset"), values.get("split")), schema, said


def _is_new(role: str, tag: str) -> bool:
    """True if a key of messages or the name of a role has to be said, as no message is read by it otherwise."""
    kind, _, name = role.partition(".")
    if not name:
        return tag not in ({"role", "from"} if kind == "role" else {"content", "value"})
    return tag not in ("function_call", "tool_call") if name == "function_call" else ROLES.get(tag) != name


def _on_hub(name: str, config: str | None, split: str | None) -> str:
    return ":".join(filter(None, [name, "/".join(filter(None, [config, split]))]))


def _add_axolotl(found: Declared, path: Path, config: JsonObject) -> None:
    whole = _Entry(str(path), {key: config.get(key) for key in ("pretraining_dataset", "rl", "train_on_inputs")})
    whole.only(rl=_OF_PAIRS)
    for part, paths in (("datasets", found.paths), ("test_datasets", found.evaluation)):
        for number, values in enumerate(config.get(part) or ()):
            entry = _Entry(f"{path}: {part}[{number}]", values)
            template = values.get("chat_template") or config.get("chat_template") or "tokenizer_default"
            if not str(template).startswith("tokenizer_default"):
                entry.refuse("chat_template", template)
            for data in _places_of(path, entry):
                schema, columns = _said_by(entry)
                suffix = _SUFFIXES.get(str(values.get("ds_type")))
                _add(found, entry, data, schema, columns, suffix=suffix, paths=paths)
    also = {"base_model": "gain --model {}", "sequence_len": "analyze --max-length {} --overlong drop"}
    also |= {} if found.evaluation else {"val_set_size": "build --holdout {}"}
    flags = [flag.format(config[key]) for key, flag in also.items() if config.get(key)]
    if any(values.get("type") == "alpaca" for values in config["datasets"]):
        found.notes.append(f"{path}: of `type: alpaca` the keys are read; the text around them is the chat template's")
    if flags:
        found.notes.append(
            f"{path}: only `datasets` and `test_datasets` are read; instead of others: {', '.join(flags)}"
        )


def _places_of(config: Path, entry: _Entry) -> Iterator[str]:
    """The data of an entry: its files, or its folder, or a dataset on the Hub; relative to here, or to the YAML."""
    path, split, files = str(entry.values.get("path")), entry.values.get("split"), entry.values.get("data_files")
    if split and not re.fullmatch(r"[\w.-]+", str(split)):
        entry.refuse("split", split)
    if Path(path).suffix == "" and path in _SUFFIXES and files:  # the kind of file in place of a path
        path = ""
    for file in ([files] if isinstance(files, str) else files) or [None]:
        place = "/".join(filter(None, [path, file]))
        if not is_url(place) and not Path(place).exists() and (config.parent / place).exists():
            place = str(config.parent / place)
        is_here = is_url(place) or Path(place).exists()
        if not is_here and is_name(path):
            place = f"hf://datasets/{place}" if file else _on_hub(path, entry.values.get("name"), split)
        yield place


def _said_by(entry: _Entry) -> tuple[str | None, dict[str, str]]:
    """The schema of an entry of axolotl, and the key of each role."""
    values, kind = entry.values, entry.values.get("type")
    schema: str | None
    fields: Mapping[str, str]
    if isinstance(kind, dict):
        _Entry(f"{entry.place}: type", kind).only(*_FIELDS)
        schema, fields, values = "instruction", _FIELDS, {**values, **kind}
    elif kind and kind not in _AXOLOTL:
        entry.refuse("type", kind)
    else:
        schema, fields = _AXOLOTL[kind] if kind else (None, {})
    others = ("path", "type", "ds_type", "data_files", "split", "name", "chat_template", "roles", "roles_to_train")
    mapped = ("message_property_mappings", "message_field_role", "message_field_content", "message_field_training")
    entry.only(*others, *mapped, *fields, train_on_eos=("turn",))
    columns = {role: values[name] for name, role in fields.items() if values.get(name)}
    inside = {name: values.get(f"message_field_{name}") for name in ("role", "content")}
    inside |= values.get("message_property_mappings") or {}
    for name, key in inside.items():
        if name in ("role", "content") and key and _is_new(name, key):
            columns[name] = key
        elif name not in ("role", "content") and name != key:
            entry.refuse(f"message_property_mappings.{name}", key)
    for role, names in (values.get("roles") or {}).items():
        new = [str(name) for name in names or () if _is_new(f"role.{role}", str(name))]
        if len(new) > 1 or (new and role not in ("system", "user", "assistant", "tool")):
            entry.refuse(f"roles.{role}", names)
        columns |= {f"role.{role}": name for name in new}
    trained = values.get("roles_to_train")
    if trained is not None and {ROLES.get(name, name) for name in trained} != {"assistant"}:
        entry.refuse("roles_to_train", trained)
    flag = values.get("message_field_training")
    if flag and not COUNTS.get(flag):
        entry.refuse("message_field_training", flag)
    return schema, columns
