"""One of N shares of an analysis, made on a machine of its own, and their merging into what one machine would make.

A shard is a folder with the pieces that fell to it, as they are in the store. Which pieces these are follows from the
list of sources and their sizes alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

import msgspec

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST, fill_folder, refuse_other_content, replace_folder
from chunkplan.intake.assemble import assemble
from chunkplan.intake.files import name_of
from chunkplan.intake.pieces import PieceResult
from chunkplan.intake.reading import IntakeRequest, read_all
from chunkplan.intake.records import JsonObject
from chunkplan.intake.source import Source
from chunkplan.intake.sources import SourceFile
from chunkplan.intake.tokenizer import TokenizerEntry
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import link_or_copy
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.manifest import write_manifest
from chunkplan.planfile.schema import SCHEMA_VERSION
from chunkplan.version import __version__

_AGAIN = "copy the shard here again, or analyze it again"
#: Bytes at the beginning and the end of sources that are compared.
_END_BYTES = 1 << 20

_HINT = "give the folders that `chunkplan analyze --shard I/N` wrote, all N of one run"


def write_shard(request: IntakeRequest, output: str | Path, shard: tuple[int, int]) -> None:
    """Analyze the I-th of N shares (from 1) into the folder `output`, which is replaced as a whole at the end.

    Example:
        chunkplan.write_shard(chunkplan.IntakeRequest(paths="train.jsonl", cache=Path("cache")), "shard-1", (1, 2))

    Raises:
        UsageError: there is no such share, or as `analyze` does.
        DataError: as `analyze` does.
    """
    index, count = shard
    if not 1 <= index <= count:
        raise UsageError(f"shard {index} of {count}", hint="shards are 1/N to N/N")
    output = Path(output)
    refuse_other_content(output, "shard")
    with read_all(request, output, shard=shard) as done:
        pieces = {piece.key: piece for source in done.sources for piece in source.pieces}  # equal ones are one
        with fill_folder(output) as folder:
            for key, piece in pieces.items():
                (folder / "pieces" / key).mkdir(parents=True)
                for name in piece.files:
                    link_or_copy(done.store.path(key) / name, folder / "pieces" / key / name)
            sources = [replace(source, ends=_ends(source.file)) for source in done.sources]
            settings = done.settings
            options = settings.options.to_dict()
            made = _Shard(
                shard=shard, identity=settings.identity, options=options, tokenizer=done.tokenizer, sources=sources
            )
            write_manifest(folder, asdict(made))
        done.store.prune(pieces)


def merge(shards: Sequence[str | Path], output: str | Path) -> Analysis:
    """Merge all shards into the analysis that one machine would have made, with the same content hash.

    Example: `chunkplan.merge(["shard-1", "shard-2"], "merged")`

    The files may have been in other folders on each machine; those of the first shard are named in the analysis.

    Raises:
        UsageError: a folder is no shard, one is missing or there twice, or they are of different runs.
        DataError: a shard is damaged, or as `analyze` does.
    """
    output = Path(output)
    refuse_other_content(output, "analysis")
    read = sorted(((_read(Path(path)), Path(path)) for path in shards), key=lambda one: one[0].shard)
    _check_same_run(read)
    sources = [_merged(parts) for parts in zip(*(shard.sources for shard, _ in read), strict=True)]
    homes = {piece.key: folder for shard, folder in read for source in shard.sources for piece in source.pieces}

    def locate(key: str) -> Path:
        return homes[key] / "pieces" / key

    for source in sources:
        if not source.is_complete:
            raise DataError("pieces of it are missing", where=source.name, hint="analyze the shards again")
        for piece in source.pieces:
            _check_files(locate(piece.key), piece)
    with replace_folder(output, "analysis") as folder:
        assemble(folder, sources, locate, IntakeOptions(**read[0][0].options), read[0][0].tokenizer)
        analysis = load_analysis(folder)
    return replace(analysis, path=output)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """The manifest of share I of N, from 1: `shard` is [I, N]."""

    kind: str = "shard"
    schema_version: int = SCHEMA_VERSION
    tool_version: str = __version__
    shard: tuple[int, int]
    identity: str | None
    options: JsonObject
    tokenizer: TokenizerEntry | None
    sources: list[Source]


def _read(folder: Path) -> _Shard:
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(f"{folder} is no shard of an analysis: it has no {MANIFEST}", hint=_HINT)
    try:
        manifest: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        kind, version = manifest["kind"], manifest["schema_version"]
        if kind != "shard" or version != SCHEMA_VERSION:
            raise UsageError(
                f"{folder} is {'a shard' if kind == 'shard' else f'of kind {kind}'}, schema version {version}; "
                f"expected a shard of version {SCHEMA_VERSION}",
                hint=_HINT,
            )
        shard = msgspec.convert(manifest, _Shard, str_keys=True)
        IntakeOptions(**shard.options)  # refuses what is none
        return shard
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"damaged: {type(error).__name__}: {error}", where=str(path), hint=_AGAIN) from error


def _check_files(folder: Path, piece: PieceResult) -> None:
    for name, (num_bytes, _) in piece.files.items():
        path = folder / name
        if not path.is_file():
            raise DataError("is missing", where=str(path), hint=_AGAIN)
        if path.stat().st_size != num_bytes:
            raise DataError(f"has {path.stat().st_size:,} bytes, expected {num_bytes:,}", where=str(path), hint=_AGAIN)


def _check_same_run(shards: Sequence[tuple[_Shard, Path]]) -> None:
    if not shards:
        raise UsageError("no shards", hint=_HINT)
    counts = sorted({shard.shard[1] for shard, _ in shards})
    if len(counts) > 1:
        raise UsageError(f"shards of runs with {' and '.join(map(str, counts))} of them", hint=_HINT)
    found = [shard.shard[0] for shard, _ in shards]
    missing = [index for index in range(1, counts[0] + 1) if index not in found]
    twice = [index for index in sorted({*found}) if found.count(index) > 1]
    for what, numbers in (("is missing", missing), ("is there twice", twice)):
        if numbers:
            more = f", and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            raise UsageError(f"shard {numbers[0]} of {counts[0]} {what}{more}", hint=_HINT)
    first, first_folder = shards[0]
    for shard, folder in shards:
        if (shard.options, shard.identity) != (first.options, first.identity):
            words = "options" if shard.options != first.options else "tokenizers or chat templates"
            raise UsageError(f"{first_folder} and {folder} were made with different {words}", hint=_HINT)
    for shard, folder in shards:
        for number, (one, other) in enumerate(zip_longest(first.sources, shard.sources), 1):
            if one is None or other is None or not _is_same_source(one, other):
                raise UsageError(
                    f"{first_folder} and {folder} were made of different data: source {number} "
                    f"is {_describe(one)} in one and {_describe(other)} in the other",
                    hint="give every shard the same files in the same order; only the folders they are in may differ",
                )


def _is_same_source(first: Source, other: Source) -> bool:
    """True if two shards may have read the same file in the same way, whatever path each has for it."""
    layouts = [(one.layout.schema, one.layout.columns) for one in (first, other) if one.layout]
    counts = {one.num_pieces for one in (first, other) if one.num_pieces is not None}
    files = [replace(one.file, path=name_of(one.file.path)) for one in (first, other)]
    ends = {one.ends for one in (first, other) if one.ends}
    return files[0] == files[1] and layouts[:1] == layouts[-1:] and len(counts) < 2 and len(ends) < 2


def _ends(file: SourceFile) -> str | None:
    """A hash of how a file of this machine begins and ends: so much of all sources every shard can look at."""
    path = Path(file.path)
    if file.num_bytes is None or not path.is_file():
        return None
    with path.open("rb") as opened:
        content = opened.read(_END_BYTES)
        opened.seek(max(0, file.num_bytes - _END_BYTES))
        return hashlib.sha256(content + opened.read(_END_BYTES)).hexdigest()


def _describe(source: Source | None) -> str:
    if source is None:
        return "nothing"
    schema = f", schema {source.layout.schema}" if source.layout else ""
    ends = f", beginning and end {source.ends[:8]}" if source.ends else ""
    size = "" if source.file.num_bytes is None else f" ({source.file.num_bytes:,} bytes{schema}{ends})"
    return f"{source.name}{size}"


def _merged(parts: Sequence[Source]) -> Source:
    """A source from what the shards know of it."""
    return replace(
        parts[0],
        layout=next((part.layout for part in parts if part.layout), None),
        num_pieces=next((part.num_pieces for part in parts if part.num_pieces is not None), None),
        broken=next((part.broken for part in parts if part.broken), None),
        results={index: result for part in parts for index, result in part.results.items()},
    )
