"""Resolves the arguments of `analyze`, folders and patterns among them, to a list of sources in order.

The same arguments give the same list on every machine: what a folder or a pattern stands for is sorted by path.

Folders and patterns leave out files that are no data: hidden ones, files of models, tokenizers and datasets that are
known by name (`config.json`, `tokenizer.json`, `README.txt`, ...), folders of an analysis, a shard, a plan, its order
or a cache of ours, and the description of an export of rows. So are files and folders that Spark hides: those that
begin with `_`, except partitions (`_year=2026`). A file that is named itself is read, whatever its name.

The first bytes of a file decide its compression and whether it is a table, whatever its name.

Links to folders are not followed, as they may form cycles; such a link is a source without records, after all others,
so that it is reported. A file that looks like data and cannot be opened is a source too: its `damage` says why.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

from chunkplan.config.intake import SCHEMAS, SourceOverrides
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import CACHE_TAG, EXPORT, MANIFEST
from chunkplan.intake import hub
from chunkplan.intake.files import STDIN, Files, files_of, is_url, join, name_of, open_file, reading
from chunkplan.intake.signatures import by_bytes, what_to_do
from chunkplan.intake.source_columns import is_named

#: Suffixes that may follow that of a kind of text.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": "npy",
}
_TEXT_KINDS = ("jsonl", "json", "text", "csv", "tsv")

#: Suffixes that are read, for people.
KNOWN = f"{', '.join(_KINDS)}; {', '.join(k for k, v in _KINDS.items() if v in _TEXT_KINDS)} also with " + ", ".join(
    COMPRESSIONS
)

#: What `save_to_disk` of Hugging Face datasets writes beside the data: of one split, and of a folder of splits.
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"

#: Files that lie beside data, models and tokenizers, by name; texts about data in upper or lower case.
_NO_DATA = re.compile(
    r"(dataset_(dict|infos?)|(adapter_|generation_|preprocessor_|processor_|tokenizer_)?config|(trainer_)?state"
    r"|tokenizer|special_tokens_map|added_tokens|chat_template|vocab|package(-lock)?|.*\.index)\.json"
    r"|(vocab|merges)\.txt|(?i:(readme|licen[sc]e|copying|notice|citation)\.txt)"
)

#: How files, and folders of files, are called by what they are for: train-00000.parquet, gsm8k_test.jsonl, dev/.
_SPLIT = re.compile(r"(?:^|[^a-z])(train(?:ing)?|valid(?:ation)?|val|dev|test(?:ing)?|eval(?:uation)?)(?![a-z])", re.I)

#: The kind of a link to a folder.
LINK = "link"

#: Beginning of the manifest of a folder of ours.
_OURS = re.compile(rb'\s*\{\s*"kind":\s*"(analysis|plan|shard)"')

#: Beginning of the description of an export, with its own path first.
_EXPORTED = re.compile(rb'\s*\{\s*"path":.*\s*"format":\s*"([\w-]+)",\s*"tool_version":')
_LONGEST_PATH = 1 << 16


@dataclass(frozen=True)
class SourceFile:
    """One input. `kind` is one of `_KINDS` or link; `compression` None, gzip, zstd or bz2.

    `path` is a path, a URL, or "-". `num_bytes` is None for what can only be read once: the standard input and pipes.
    A link is one to a folder, in which nothing is read. `damage` says why something in a folder cannot be opened.
    What `is_evaluation` is evaluated on, and not trained. A text is a record for each line where `text_split` is
    "line", or for each stretch between two separators.
    """

    path: str
    kind: str
    compression: str | None
    num_bytes: int | None
    damage: str | None = None
    is_evaluation: bool = False
    text_split: str | None = None


def describe(path: str) -> tuple[str, str | None] | None:
    """The kind and the compression that the name of a file says, or None where it says nothing that is known.

    A name without any suffix is JSONL.
    """
    stem, dot, suffix = name_of(path).lower().rpartition(".")
    compression = COMPRESSIONS.get(f".{suffix}") if stem else None
    if compression:
        stem, dot, suffix = stem.rpartition(".")
    if not (dot and stem):  # no suffix at all; a name such as .json is none either
        return "jsonl", compression
    kind = _KINDS.get(f".{suffix}")
    if kind is None or (compression and kind not in _TEXT_KINDS):
        return None
    return kind, compression


@dataclass(frozen=True)
class _Search:
    """State of a search: `suffixes` are the user's (see `find_sources`), `beside` collects files that are no data."""

    beside: list[str]
    suffixes: Mapping[str, str]
    text_split: str | None = None

    def describe(self, path: str) -> tuple[str, str | None] | None:
        """Like `describe`, by the user's suffix if one is given."""
        said = self._said(path)
        return describe(path if said is None else f"x.{said.removeprefix('.')}")

    def is_data(self, path: str) -> bool:
        """True if a file of a folder or a pattern is data, by its name."""
        name = name_of(path)
        if name.startswith("."):
            return False
        if self._said(path) is not None:
            return True
        return "." in name and not _NO_DATA.fullmatch(name) and describe(path) is not None

    def _said(self, path: str) -> str | None:
        return next((suffix for source, suffix in self.suffixes.items() if is_named(path, source)), None)


def find_sources(
    paths: Sequence[str | Path],
    beside: list[str] | None = None,
    suffixes: Mapping[str, str] | None = None,
    *,
    evaluation: Sequence[str | Path] = (),
    text_split: str | None = None,
) -> list[SourceFile]:
    """The sources that `paths` name, in order, then those to evaluate on; a file that is named twice is two of them.

    Sources of `evaluation` are evaluated on, also if `paths` name them, and so are files in a folder that are named as
    evaluation data beside training data: `dev.jsonl` beside `train.jsonl`, `test/` beside `train/`.

    Files in folders and patterns that are no data are added to `beside`. `suffixes` overrides the suffixes of names:
    SOURCE -> suffix, for files that `is_named` so.

    A path is a file, a folder (all data in and below it), a pattern with `*`, `?`, `[...]` and `**` (the data and the
    folders that it matches; `**` matches no folders), "-" for JSONL from the standard input, a URL of any of these, or
    the name of a dataset on the Hugging Face Hub (`hub`). A folder of Hugging Face `save_to_disk` stands for the files
    its `state.json` lists, a folder of splits for all of these, in the order written there. Raises UsageError: there is
    no such path, nothing in a folder or of a pattern, a suffix is not known, no access, or the standard input is given
    another format than JSON lines; DataError: a folder of `save_to_disk` does not list its files.
    """
    search = _Search([] if beside is None else beside, suffixes or {}, text_split)
    for name, suffix in search.suffixes.items():
        if describe(f"x.{suffix.removeprefix('.')}") is None:
            place = SourceOverrides.of(search.suffixes).place(name, "--format")
            raise UsageError(
                f"{place}: there is no such schema, and no such kind of file",
                hint=f"a schema is one of {', '.join(SCHEMAS)}; a file is one of "
                f"{', '.join(suffix[1:] for suffix in _KINDS)}, the first six also such as jsonl.gz",
            )
    evaluated = [replace(one, is_evaluation=True) for path in map(str, evaluation) for one in _find(path, search)]
    places = {_place(source) for source in evaluated}
    found = [source for path in map(str, paths) for source in _find(path, search) if _place(source) not in places]
    sources = sorted([*found, *evaluated], key=lambda source: (source.kind == LINK, source.is_evaluation))
    if evaluated and not found:
        raise UsageError("--eval takes all of the data: none is left to train on", hint="give other files to train on")
    if not sources:
        raise UsageError("no data", hint="give files, folders, patterns or URLs of data, or - for the standard input")
    if sum(source.path == STDIN for source in sources) > 1:
        raise UsageError("the standard input can be read once", hint="give - once")
    return sources


def named_again(sources: Sequence[SourceFile]) -> list[str]:
    """The paths by which several sources are one file or URL, each once."""
    counts = Counter(_place(source) for source in sources if source.kind != LINK)
    return [*dict.fromkeys(source.path for source in sources if counts[_place(source)] > 1)]


def _place(source: SourceFile) -> str:
    return source.path if source.path == STDIN or is_url(source.path) else os.path.realpath(source.path)


def _find(path: str, search: _Search) -> list[SourceFile]:
    if path == STDIN:
        if search.suffixes and search.describe(path) != describe(path):
            raise UsageError("the standard input is JSON lines", hint="write it to a file, and name that")
        return [SourceFile(STDIN, "jsonl", None, None)]
    with reading(path):
        files = files_of(path)
        if files.is_folder(path):
            found = [_found(files, each, search) for each in _below(files, path, search)]
            found = _check_any(found, f"{path} has no data in it or below", search.beside)
            return _by_split(found, [one.path[len(path) :] for one in found])
        if files.exists(path):
            return [_source(files, path, search)]
        if any(sign in path for sign in "*?["):
            return _of_pattern(files, path, search)
    if hub.is_name(path) and ("." not in name_of(path) or describe(path) is None):
        return _of_dataset(path, search)
    raise UsageError(f"there is no file {path}", hint="give files, folders, patterns or URLs of data")


def _source(files: Files, path: str, search: _Search) -> SourceFile:
    described = search.describe(path)
    if described is None:
        hint = f"known are {KNOWN}; {what_to_do(path)}"
        if path.endswith((".yaml", ".yml")) and not is_url(path):
            raise UsageError(f"{path} has no list `datasets:`, as axolotl's YAML has", hint=hint)
        raise UsageError(f"{path} has a suffix that is not known", hint=hint)
    num_bytes = files.size(path)
    if described[0] in _TEXT_KINDS and num_bytes and not is_url(path):
        described = by_bytes(path, *described)
    split = search.text_split if described[0] == "text" else None
    return SourceFile(path, *described, num_bytes, text_split=split)


def _found(files: Files, path: str, search: _Search) -> SourceFile:
    """The source for a path found in a folder or by a pattern: data, or a link to a folder."""
    if files.is_folder_link(path):
        return SourceFile(path, LINK, None, 0)
    damage = files.damage(path)
    if damage is None:
        return _source(files, path, search)
    return SourceFile(path, *(search.describe(path) or ("jsonl", None)), 0, damage)


def _check_any(found: list[SourceFile], message: str, beside: list[str]) -> list[SourceFile]:
    """`found`, which has to have more than links to folders; of files `beside` it is said how they are read."""
    if all(source.kind == LINK for source in found):
        hint = f"suffixes that are read: {KNOWN}"
        if other := next(
            (path for path in beside if describe(path) is None and not name_of(path).startswith((".", "_"))), None
        ):
            hint += f"; of {other}: {what_to_do(other)}"
        if found:
            hint = f"links to folders are not followed: name {found[0].path}/ itself"
        if hidden := next((path for path in beside if _is_hidden(name_of(path))), None):
            message += f"; names that begin with _ are left out: {hidden} is read if it is named itself"
        raise UsageError(message, hint=hint)
    return found


def _by_split(found: list[SourceFile], names: list[str]) -> list[SourceFile]:
    """`found`, of which the evaluation splits beside one to train on, as `names` call them, are evaluated on.

    Where no name says train, that is whatever has no name of a split.
    """
    splits = [(name, match) for name in names for match in _SPLIT.finditer(name)]
    trained = {name[: match.start(1)] for name, match in splits if match[1].lower().startswith("train")}
    others = ((name, match) for name, match in splits if not match[1].lower().startswith("train"))
    no_train = not trained and any(_SPLIT.search(name) is None for name in names)
    evaluated = {name for name, match in others if no_train or name[: match.start(1)] in trained}
    return [replace(one, is_evaluation=name in evaluated) for one, name in zip(found, names, strict=True)]


def _of_dataset(path: str, search: _Search) -> list[SourceFile]:
    """The files of a dataset on the Hub, whose splits are called as it says, or as its files are."""
    ends = [f"{suffix}{packed}" for suffix in _KINDS for packed in ("", *COMPRESSIONS)]
    found = [(str(file), split) for file, split in hub.fetch_dataset(path, ends) if search.is_data(str(file))]
    names = [split or file.partition("/snapshots/")[2].partition("/")[2] for file, split in found]
    sources = [_source(files_of(file), file, search) for file, _ in found]
    return _by_split(_check_any(sources, f"the dataset {path} has no data in it", search.beside), names)


def _of_pattern(files: Files, pattern: str, search: _Search) -> list[SourceFile]:
    found: dict[str, None] = {}
    left_out: dict[str, None] = {}
    # What stands before the first sign of a pattern is named; all that is matched is not.
    named = len(re.split(r"[*?\[]", pattern)[0].rpartition("/")[0])
    is_ours, is_link = cache(partial(_is_ours, files)), cache(files.is_folder_link)
    for path in files.matches(pattern):
        folders = list(_folders_of(path, named))
        hidden = _outermost_hidden(path, pattern, named)
        if hidden is not None:
            left_out[hidden] = None
        elif "**" in pattern and (links := [folder for folder in (path, *folders) if is_link(folder)]):
            found[links[-1]] = None  # the outermost
        elif not files.is_folder(path):
            if not any(map(is_ours, folders)):
                found |= {path: None} if _is_source(files, path, search) else {}
        elif "**" not in pattern:
            found |= dict.fromkeys(_below(files, path, search))
    search.beside.extend(left_out)
    sources = [_found(files, path, search) for path in found]
    return _check_any(sources, f"no data matches {pattern}", search.beside)


def _is_hidden(name: str) -> bool:
    """True for names that Spark and Hive skip, such as `_SUCCESS` and `_temporary`, but not for partitions."""
    return name.startswith("_") and "=" not in name


def _outermost_hidden(path: str, pattern: str, named: int) -> str | None:
    """Outermost hidden part of a `path` that a pattern matches, unless a part of the pattern begins with `_` too.

    The first `named` characters are the same in both, and are taken as they are.
    """
    asked = [part for part in pattern[named:].split("/") if _is_hidden(part)]
    parts = path[named:].split("/")
    for place, part in enumerate(parts):
        if _is_hidden(part) and not any(fnmatchcase(part, each) for each in asked):
            return path[:named] + "/".join(parts[: place + 1])
    return None


def _folders_of(path: str, named: int) -> Iterator[str]:
    """The folders that `path` is in, from the last to those that end in its first `named` characters."""
    folder = path.rpartition("/")[0]
    while len(folder) > named:
        yield folder
        folder = folder.rpartition("/")[0]


def _below(files: Files, folder: str, search: _Search) -> list[str]:
    """The data in and below `folder`, and links to folders, sorted.

    A folder of `save_to_disk` stands where its path does, and is a whole.
    """
    found = sorted(_walk(files, folder, search))
    return [file for path, is_dataset in found for file in (_files_of_dataset(files, path) if is_dataset else [path])]


def _walk(files: Files, folder: str, search: _Search) -> Iterator[tuple[str, bool]]:
    """(data file or link, False) and (folder of `save_to_disk`, True)."""
    with reading(folder):
        inside, folders = files.children(folder)
    names = {name_of(file) for file in inside}
    if _says_ours(folder, names):
        return
    if _SPLITS in names or {_STATE, _INFO} <= names:
        yield folder, True
        return
    search.beside.extend(path for path in (*inside, *folders) if _is_hidden(name_of(path)))
    inside, folders = ([path for path in paths if not _is_hidden(name_of(path))] for paths in (inside, folders))
    yield from ((file, False) for file in inside if _is_source(files, file, search))
    for child in folders:
        if files.is_folder_link(child):
            yield child, False
        else:
            yield from _walk(files, child, search)


def _files_of_dataset(files: Files, folder: str) -> list[str]:
    """The data files of a folder of `save_to_disk`, as it lists them.

    Raises DataError: it does not say what its files are, or one is missing.
    """
    if files.exists(join(folder, _SPLITS)):
        splits = _listed(join(folder, _SPLITS), "splits")
        return [file for split in splits for file in _files_of_dataset(files, join(folder, split))]
    listed = [join(folder, file) for file in _listed(join(folder, _STATE), "_data_files")]
    if missing := next((file for file in listed if not files.exists(file)), None):
        raise DataError(f"{missing} is missing", where=join(folder, _STATE), hint="save the dataset to disk again")
    return listed


def _listed(path: str, key: str) -> list[str]:
    """Names in a file of `save_to_disk`: strings, or objects with a `filename`."""
    with reading(path), open_file(path) as file:
        content = file.read()
    try:
        return [entry if isinstance(entry, str) else str(entry["filename"]) for entry in json.loads(content)[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"does not list the {key.strip('_')} of a dataset ({type(error).__name__})",
            where=path,
            hint="save the dataset to disk again, or name its files",
        ) from error


def _is_source(files: Files, path: str, search: _Search) -> bool:
    """True if a file of a folder or a pattern is data, or may have been: a broken link to a folder has no suffix.

    Other files are noted as beside data.
    """
    found = search.is_data(path) or ("." not in name_of(path) and files.damage(path) is not None)
    found = found and not (name_of(path) == EXPORT and _begin(path, _EXPORTED))
    if not found:
        search.beside.append(path)
    return found


def _is_ours(files: Files, folder: str) -> bool:
    return _says_ours(folder, [name for name in (CACHE_TAG, MANIFEST, EXPORT) if files.exists(join(folder, name))])


def _says_ours(folder: str, names: Collection[str]) -> bool:
    """True for a folder whose file names are those of a cache, an analysis, a shard, a plan, or a plan's order."""
    if EXPORT in names and (found := _begin(join(folder, EXPORT), _EXPORTED)):
        return found[1] == b"torch-pipelining"  # all others are data
    return CACHE_TAG in names or (MANIFEST in names and _begin(join(folder, MANIFEST), _OURS) is not None)


def _begin(path: str, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """Match `pattern` at the beginning of a file that chunkplan may have written."""
    try:
        with open_file(path) as file:
            return pattern.match(file.read(_LONGEST_PATH))
    except OSError:  # it is a source that is damaged
        return None
