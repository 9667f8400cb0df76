"""Plans and analyses made to do harm: refused by name, in bounded memory, without reading outside of their folder."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import load_analysis, load_plan, validate
from chunkplan.cost.model_config import read_model_config
from chunkplan.errors import DataError, UsageError
from chunkplan.files import json_file
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.schema import SEQUENCES
from chunkplan.tuning.document import read_tuning
from chunkplan.validation.checks_analysis import check_analysis
from tests.support.corruption_cases import files_of, outcome, read
from tests.support.places import GOLDEN
from tests.validation.test_validation import damage, entries


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A folder with a plan and its analysis, under the names `plan` and `analysis`."""
    folder = tmp_path / "golden"
    for kind in ("plan", "analysis"):
        shutil.copytree(GOLDEN / f"{kind}-4", folder / kind)
    change(folder / "plan", "analysis", "path", value="../analysis")
    return folder


def change(folder: Path, *path: Any, value: Any) -> None:
    """Set one entry of the manifest in a folder; Ellipsis removes it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    damage(manifest, path, value)
    (folder / MANIFEST).write_text(json.dumps(manifest))


NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED]

HOSTILE = (
    *(..., None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**30, 0.5, -0.5, 1e300, float("1e400")),
    *("", "x", "\0", "/dev/zero", "../../../etc/passwd", "a" * 5000),
    *([], [[]], [None], {}, {"a": 1}, {"": []}, NESTED),
)


@pytest.mark.parametrize("values_each", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_any_value_in_any_entry_is_refused_or_found_or_changes_nothing(
    golden: Path, kind: str, values_each: int
) -> None:
    """What is stated in words about where data came from is covered by no hash, and shown as it is."""
    original, whole = read(golden, kind), (golden / kind / MANIFEST).read_text()
    values = cycle(HOSTILE)
    for path in entries(json.loads(whole)):
        for value in islice(values, values_each):
            change(golden / kind, *path, value=value)
            try:
                outcome(golden, kind, original)
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}") from error
            (golden / kind / MANIFEST).write_text(whole)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("plan", ("config", "chunk_size")),
        ("plan", ("config", "k_by_length")),
        ("plan", ("analysis", "path")),
        ("plan", ("totals", "num_steps")),
        ("plan", ("predictions", "predicted_us")),
        ("analysis", ("exact",)),
        ("analysis", ("sources", 0, "records")),
        ("analysis", ("tokens", 0, "rows")),
        ("analysis", ("tokens", 0, "file")),
        ("analysis", ("options", "max_length")),
        ("analysis", ("sources", 0, "bytes")),
        ("analysis", ("sources", 0, "compression")),
        ("analysis", ("sources", 0, "columns")),
        ("analysis", ("sources", 0, "evidence")),
        ("analysis", ("sources", 0, "content_hash")),
        ("analysis", ("content_hashes", "tokens")),
        ("analysis", ("template_hash",)),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_entry(
    golden: Path, kind: str, path: tuple[Any, ...]
) -> None:
    change(golden / kind, *path, value={"a": [1]})
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
    with pytest.raises(DataError) as refused:
        validate(golden / kind)
    assert f"`{name}` is {{'a': [1]}}, expected " in str(refused.value)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("value", [[], None, 5, "x"])
def test_options_that_are_none_are_refused(golden: Path, value: object) -> None:
    change(golden / "analysis", "options", value=value)
    with pytest.raises(DataError, match=r"`options` is .*, expected an object"):
        validate(golden / "analysis")


@pytest.mark.parametrize("entry", ["path", "content_hash", "vocab_size", "eos_token"])
def test_a_tokenizer_that_is_none_is_refused(golden: Path, entry: str) -> None:
    known = {"path": "t", "content_hash": "0", "vocab_size": 9, "eos_token": "\n"}
    change(golden / "analysis", "tokenizer", value=known)
    assert validate(golden / "analysis").ok
    change(golden / "analysis", "tokenizer", value=known | {entry: [1]})
    with pytest.raises(DataError, match="`tokenizer` is"):
        validate(golden / "analysis")


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_the_name_of_a_source_is_one_line(golden: Path, kind: str) -> None:
    """Or a report of it would have lines that look like ours."""
    path = ("selection", "sources", 0, "path") if kind == "plan" else ("sources", 0, "path")
    change(golden / kind, *path, value="a.jsonl\nok      tokens")
    with pytest.raises(DataError, match="expected a string of one line"):
        validate(golden / kind)


def test_a_key_that_is_repeated_among_many_is_found_at_once(tmp_path: Path) -> None:
    """To count each of them anew would take minutes."""
    path = tmp_path / "many.json"
    path.write_text("{" + ", ".join(f'"{number}": 0' for number in (*range(200_000), 199_999)) + "}")
    with pytest.raises(DataError, match="the key '199999' is there twice"):
        json_file.read_json(path, hint="none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "plan", "seed": NaN}', "NaN"),
        ('{"kind": "plan", "seed": -Infinity}', "Infinity"),
        ('{"kind": "plan", "seed": 1e999}', "1e999 is too large"),
        ('{"kind": "plan", "seed": -1e999}', "-1e999 is too large"),
        ('{"kind": "plan", "seed": 1, "seed": 2}', "'seed' is there twice"),
        ('{"kind": "plan", "seed": "\\ud800"}', "surrogates not allowed"),
        ('{"kind": "plan", "seed": ' + "[" * 100 + "]" * 100 + "}", "nested deeper"),
        ("[" * 100_000, "not JSON: nested deeper than 64"),
        ('{"seed": ' + "9" * 5000 + "}", r"not JSON: 9{20}\.\.\. is too large"),
        ('{"kind": "pl\xe4n"}', "can't decode byte 0xe4"),
    ],
    ids=[
        "nan",
        "infinity",
        "large",
        "small",
        "twice",
        "half a character",
        "deep",
        "very deep",
        "huge number",
        "latin-1",
    ],
)
def test_a_manifest_that_is_not_our_kind_of_json_is_refused(golden: Path, text: str, message: str) -> None:
    (golden / "plan" / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        load_plan(golden / "plan")


def test_a_manifest_beyond_any_size_is_not_read(golden: Path) -> None:
    """It has no content: to read its 10 GB would take as much memory."""
    os.truncate(golden / "plan" / MANIFEST, 10 << 30)
    with pytest.raises(DataError, match=f"larger than {json_file.MAX_BYTES:,} bytes"):
        load_plan(golden / "plan")


@pytest.mark.parametrize(
    "file",
    [
        "../plan/chunks.parquet",
        "/etc/passwd",
        "tokens/../../plan/chunks.parquet",
        "tokens/part-00000.arrow\n",
        "tokens/part-00000.arrow/../../manifest.json",
        "tokens",
        "",
    ],
)
def test_a_part_file_that_is_not_in_its_folder_is_refused(golden: Path, file: str) -> None:
    change(golden / "analysis", "tokens", 0, "file", value=file)
    with pytest.raises(DataError, match=r"`tokens\[0\]\.file`"):
        load_analysis(golden / "analysis")


@pytest.mark.parametrize("rows", [[10**18], [60, 2**62, 2**62], [1] * 59, [61]])
def test_rows_that_the_lengths_do_not_have_are_refused(golden: Path, rows: list[int]) -> None:
    change(golden / "analysis", "tokens", 0, "rows", value=rows)
    with pytest.raises(DataError, match=r"tokens of [0-9,]+ sequences, expected 60"):
        load_analysis(golden / "analysis")


@pytest.mark.parametrize("first", [1, 59, 2**63 - 1])
def test_a_part_that_begins_elsewhere_is_refused(golden: Path, first: int) -> None:
    change(golden / "analysis", "tokens", 0, "first_sequence_id", value=first)
    with pytest.raises(DataError, match=f"begin with sequence {first}, expected 0"):
        load_analysis(golden / "analysis")


def all_files() -> list[str]:
    return [
        f"{kind}/{path.relative_to(GOLDEN / f'{kind}-4')}"
        for kind in ("plan", "analysis")
        for path in files_of(GOLDEN / f"{kind}-4")
    ]


@pytest.mark.parametrize("name", all_files())
def test_a_link_out_of_the_folder_is_not_followed(golden: Path, tmp_path: Path, name: str) -> None:
    """Not even to a file that would do: what a folder holds is all that is read of it."""
    kind = name.partition("/")[0]
    (golden / name).rename(tmp_path / "elsewhere")
    (golden / name).symlink_to(tmp_path / "elsewhere")
    assert refusal(golden, kind).startswith(f"{golden / name}: a link to {tmp_path / 'elsewhere'}, outside of")


@pytest.mark.parametrize("target", ["../../../etc", "/dev"])
def test_a_folder_of_tokens_that_is_a_link_is_not_followed(golden: Path, target: str) -> None:
    shutil.rmtree(golden / "analysis" / "tokens")
    (golden / "analysis" / "tokens").symlink_to(target)
    assert "outside of its folder" in refusal(golden, "analysis")


@pytest.mark.parametrize("name", all_files())
def test_a_pipe_is_not_waited_for(golden: Path, name: str) -> None:
    (golden / name).unlink()
    os.mkfifo(golden / name)
    assert refusal(golden, name.partition("/")[0]) == f"{golden / name}: not a regular file"


@pytest.mark.parametrize("name", [name for name in all_files() if not name.endswith(MANIFEST)])
def test_a_link_to_itself_is_no_file(golden: Path, name: str) -> None:
    (golden / name).unlink()
    (golden / name).symlink_to(Path(name).name)
    assert refusal(golden, name.partition("/")[0]) == f"{golden / name}: not a regular file"


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_manifest_that_is_a_link_to_itself_is_none(golden: Path, kind: str) -> None:
    (golden / kind / MANIFEST).unlink()
    (golden / kind / MANIFEST).symlink_to(MANIFEST)
    with pytest.raises(UsageError, match=f"has no {MANIFEST}"):
        validate(golden / kind)


def test_a_plan_whose_analysis_is_a_link_to_itself_is_refused(golden: Path) -> None:
    (golden / "loop").symlink_to("loop")
    change(golden / "plan", "analysis", "path", value="../loop")
    with pytest.raises(UsageError, match="is not at"):
        validate(golden / "plan")


def refusal(folder: Path, kind: str) -> str:
    """What is said of a plan or an analysis that cannot be read."""
    try:
        validation = validate(folder / kind)
    except DataError as error:
        return str(error)
    (violation,) = validation.violations  # of the tokens, which are read last
    with pytest.raises(DataError):
        read(folder, kind)
    return violation.message


def test_links_within_a_folder_and_to_it_are_followed(golden: Path, tmp_path: Path) -> None:
    for name in all_files():
        path = golden / name
        path.rename(path.with_name(f"_{path.name}"))
        path.symlink_to(f"_{path.name}")
    (tmp_path / "link").symlink_to(golden)
    assert validate(tmp_path / "link" / "plan").ok
    assert validate(tmp_path / "link" / "analysis").ok


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "\0", "a" * 5000, "../" * 500 + "dev/zero", "../plan"])
def test_an_analysis_that_is_none_is_refused_wherever_a_plan_says_it_is(golden: Path, path: str) -> None:
    os.mkfifo(golden / "plan" / "pipe")
    change(golden / "plan", "analysis", "path", value=path)
    with pytest.raises((DataError, UsageError)):
        validate(golden / "plan")


@pytest.mark.parametrize("name", ["tokens/part-00000.arrow", "chunks.parquet"])
def test_what_the_machine_does_not_let_us_read_is_not_called_damaged(golden: Path, name: str) -> None:
    """Here because no more files may be opened; one that belongs to somebody else fares the same."""
    analysis = load_analysis(golden / "analysis")
    readers = {
        "tokens/part-00000.arrow": lambda: list(check_analysis(analysis)),
        "chunks.parquet": load_plan(golden / "plan").chunks,
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError) as raised:
            readers[name]()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.errno == errno.EMFILE


def test_a_table_with_more_rows_than_memory_is_refused(golden: Path) -> None:
    """4 million equal rows take no room, and neither does it to have them 16,384 times: 6.9e10 in a file of few MB."""
    path, rows = golden / "analysis" / "sequences.parquet", 1 << 22
    columns = [np.ones(rows, field.type.to_pandas_dtype()) for field in SEQUENCES]
    pq.write_table(pa.table(columns, schema=SEQUENCES), path, row_group_size=rows)
    metadata = pq.read_metadata(path)
    for _ in range(14):
        metadata.append_row_groups(metadata)
    pages = path.read_bytes()[: -8 - metadata.serialized_size]
    metadata.write_metadata_file(path)
    path.write_bytes(pages + path.read_bytes()[4:])
    assert path.stat().st_size < 32 << 20
    with pytest.raises(DataError, match="68,719,476,736 rows of 5 columns do not fit into memory"):
        load_analysis(golden / "analysis")


def test_lengths_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 9))
    content = (tmp_path / "lengths.npy").read_bytes()
    (tmp_path / "lengths.npy").write_bytes(content.replace(b"(8,), }" + b" " * 12, b"(1000000000000,), }"))
    with pytest.raises(DataError, match="cannot be read"):
        load_analysis(tmp_path / "lengths.npy")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{", b'{"kind": NaN}', b"[" * 100_000, b'{"a": 1, "a": 2}', b"9" * 5000],
    ids=["empty", "bytes", "list", "torn", "nan", "deep", "twice", "huge number"],
)
def test_other_documents_are_refused_as_manifests_are(tmp_path: Path, content: bytes) -> None:
    """A tuning, and a model's config.json."""
    (tmp_path / "config.json").write_bytes(content)
    for reader in (read_tuning, read_model_config):
        with pytest.raises(DataError):
            reader(tmp_path / "config.json")
