"""Opens what a path names: an analysis, a bare file of lengths, or a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from chunkplan.arrays import Int32Array, IntArray
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.files.json_file import refuse_outside
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.hashing import ContentHasher, combine_hashes, hash_of_evaluation
from chunkplan.planfile.manifest import read_manifest
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.samples import sample_complaints
from chunkplan.planfile.schema import SEQUENCES, analysis_schemas, to_arrow
from chunkplan.planfile.tables import open_parquet, read_columns

IntegerArray = npt.NDArray[np.integer]

#: Rows. Fresh memory costs more time than hashing it.
_HASHED_AT_ONCE = 1 << 16

_HINT = "a lengths file is a .npy array or a .parquet file with one integer column"


def load_lengths(path: Path) -> Analysis:
    """Read lengths in tokens, one a sequence; every token but a sequence's first counts as a target.

    Raises:
        UsageError: there is no such file.
        DataError: it is not one column of whole numbers from 1 to 2^31 - 1.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}", hint=_HINT)
    if path.suffix not in (".npy", ".parquet"):
        hint = f"give its folder, {path.parent}" if path.name == MANIFEST else f"`chunkplan analyze {path}` first"
        raise UsageError(f"{path} is neither an analysis nor a file of lengths", hint=hint)
    values = _read_npy(path) if path.suffix == ".npy" else _read_parquet(path)
    if values.size == 0:
        raise DataError("no lengths in it", where=str(path), hint=_HINT)
    if not 1 <= values.min() <= values.max() <= np.iinfo(np.int32).max:
        wrong = np.flatnonzero((values < 1) | (values > np.iinfo(np.int32).max))
        raise DataError(
            f"the length of sequence {wrong[0]} is {values[wrong[0]]}, expected 1 to 2147483647",
            where=f"{path}, row {wrong[0]}",
            hint="leave out sequences without tokens; longer ones cannot be planned",
        )
    num_tokens = np.array(values, np.int32)
    return Analysis(
        path=path,
        content_hash=combine_hashes({"sequences": _hash_sequences(num_tokens)}),
        manifest={"kind": "lengths", "exact": True, "tokens": []},
        num_tokens=num_tokens,
        num_target_tokens=num_tokens - 1,
    )


def _hash_sequences(num_tokens: Int32Array) -> str:
    """The content hash of the sequences.parquet that an analysis of these lengths would have."""
    hasher = ContentHasher(SEQUENCES)
    for start in range(0, num_tokens.size, _HASHED_AT_ONCE):
        tokens = num_tokens[start : start + _HASHED_AT_ONCE]
        record = np.arange(start, start + tokens.size)
        columns: list[IntArray] = [record, np.zeros(tokens.size, np.int32), record, tokens, tokens - 1]
        hasher.update(pa.RecordBatch.from_arrays([to_arrow(column) for column in columns], schema=SEQUENCES))
    return hasher.hexdigest()


def _read_npy(path: Path) -> IntegerArray:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped, a shape that the file has not is refused
    except (OSError, ValueError, SyntaxError, TokenError, OverflowError, EOFError) as error:  # the header is Python
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError("not one row of whole numbers", where=str(path), hint=_HINT)
    return values


def _read_parquet(path: Path) -> IntegerArray:
    with open_parquet(path, _HINT) as file:
        table = file.read()
        table.validate(full=True)
    if table.num_columns != 1 or not pa.types.is_integer(table.schema.field(0).type):
        found = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        raise DataError(f"found columns {found}; expected one of whole numbers", where=str(path), hint=_HINT)
    if table.column(0).null_count:
        row = int(np.flatnonzero(table.column(0).is_null().to_numpy())[0])
        raise DataError(f"the length of sequence {row} is null", where=f"{path}, row {row}", hint=_HINT)
    lengths: IntegerArray = table.column(0).to_numpy()
    return lengths


def is_analysis(path: Path) -> bool:
    """True if a path looks like an analysis, or a bare file of lengths, rather than a plan."""
    return path.is_file() or (os.path.lexists(path / "sequences.parquet") and (path / MANIFEST).exists())


def load_plan_or_analysis(path: str | Path) -> Plan | Analysis:
    """Open whichever is at `path`; raises as `load_plan` and `load_analysis` do."""
    return load_analysis(path) if is_analysis(Path(path)) else load_plan(path)


def load_analysis(path: str | Path) -> Analysis:
    """Open an analysis folder, or a bare file of lengths (see `lengths_file.load_lengths`).

    Example: `chunkplan.load_analysis("analysis").num_tokens`

    Raises:
        UsageError: there is nothing at `path`.
        DataError: what is there is not an analysis, is damaged, or was written by a newer schema.
    """
    path = Path(path)
    if path.is_file() or (not path.exists() and path.suffix in (".npy", ".parquet")):
        return load_lengths(path)
    manifest = read_manifest(path, "analysis")
    refuse_outside(path / "sequences.parquet", path)
    sources: list[int] = []  # the least and the most of every row group

    def look(table: pa.Table) -> None:
        sources.extend(pc.min_max(table.column("source")).as_py().values() if table.num_rows else [])

    for what in sample_complaints(manifest):
        raise DataError(what, where=str(path / MANIFEST), hint="analyze again")
    schema, _ = analysis_schemas(manifest.get("sample_columns", ()))
    columns, found = read_columns(path / "sequences.parquet", schema, ["num_tokens", "num_target_tokens"], look)
    for file, words in _complaints(manifest, found, len(columns["num_tokens"]), sources):
        raise DataError(words, where=str(path / file), hint="analyze again")
    return Analysis(path=path, content_hash=manifest["content_hash"], manifest=manifest, **columns)


def _complaints(
    manifest: Mapping[str, Any], content_hash: str, num_sequences: int, sources: list[int]
) -> Iterator[tuple[str, str]]:
    """Inconsistencies between the files of an analysis: the file, and the message.

    `content_hash`, `num_sequences` and `sources` are those of sequences.parquet.
    """
    if manifest["content_hashes"]["sequences"] != content_hash:
        message = "the lengths are not those the manifest was written for (content hash differs)"
        yield "sequences.parquet", message
    if bool(manifest["tokens"]) != ("tokens" in manifest["content_hashes"]):
        yield MANIFEST, "`tokens` names no token files, but there is a hash of tokens, or the other way round"
    if manifest["content_hashes"].get("evaluation") != hash_of_evaluation(manifest["sources"]).get("evaluation"):
        yield MANIFEST, "the sources to evaluate on are not those it was written for (content hash differs)"
    first = 0
    for each in manifest["tokens"]:
        if each["first_sequence_id"] != first:
            stated = each["first_sequence_id"]
            yield MANIFEST, f"{each['file']} is said to begin with sequence {stated}, expected {first}"
        first += sum(each["rows"])
    if manifest["tokens"] and first != num_sequences:
        yield MANIFEST, f"tokens of {first:,} sequences, expected {num_sequences:,}"
    last = len(manifest["sources"]) - 1  # of none it is not said where sequences are from
    if last >= 0 and not 0 <= min(sources) <= max(sources) <= last:
        yield "sequences.parquet", f"sequences of sources {min(sources)} to {max(sources)}, expected 0 to {last}"


def load_plan_analysis(plan: Plan, analysis: str | Path | None = None, *, option: str = "--analysis") -> Analysis:
    """The analysis a plan was built from: at `analysis`, or at the path in the plan.

    `option`: the option for its path, for hints.

    Raises:
        UsageError: it is not there.
        DataError: it is no analysis, or is damaged.
    """
    if analysis is None and not _is_there(plan.analysis_path):
        raise UsageError(
            f"the analysis of the plan {plan.path} is not at {plan.analysis_path}",
            hint=f"say where it is with {option}, or build the plan again",
        )
    return load_analysis(plan.analysis_path if analysis is None else analysis)


def load_same_analysis(plan: Plan, analysis: str | Path | None = None, *, option: str = "--analysis") -> Analysis:
    """The analysis a plan was built from, as `load_plan_analysis`, and with the same content.

    Raises:
        UsageError: it is not there.
        DataError: what is there is not the plan's analysis, or is damaged.
    """
    found = load_plan_analysis(plan, analysis, option=option)
    expected = plan.manifest["analysis"]["content_hash"]
    if found.content_hash != expected:
        raise DataError(
            f"not the analysis of the plan: content hash {found.content_hash[:12]}, the plan has {expected[:12]}",
            where=str(found.path),
            hint=f"build the plan again from this analysis, or give its own with `{option}`",
        )
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def load_plan(path: str | Path) -> Plan:
    """Open a plan folder. Only the manifest is read; steps, chunks and actions are read when asked for.

    Example: `chunkplan.load_plan("plan").steps()`

    Raises:
        UsageError: there is no plan at `path`.
        DataError: what is there is not a plan, or was written by a newer schema.
    """
    path = Path(path)
    manifest = read_manifest(path, "plan")
    plan = Plan(path=path, manifest=manifest)
    for name in plan.schemas:
        refuse_outside(path / f"{name}.parquet", path)
    return plan


def evaluation_folder(plan: Path) -> Path:
    """The folder of the evaluation plan of a build to `plan`."""
    return plan.with_name(f"{plan.name}-eval")


def load_held_out(plan: Plan) -> Plan | None:
    """The plan of what was held out of `plan`, if it was and lies where the build left it.

    Raises:
        DataError: what lies there is not that.
    """
    folder = evaluation_folder(plan.path.resolve())
    if not plan.manifest["selection"]["num_held_out"] or plan.config.part != "train" or not folder.is_dir():
        return None
    found = load_plan(folder)
    if found.config.part != "eval" or found.config.holdout != plan.config.holdout:
        raise DataError(
            f"not what {plan.path} holds out", where=str(folder), hint="build the plan again, or name the one to take"
        )
    return found
