"""Files made to do harm: links, pipes and sizes that lie are refused by name, in bounded memory."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import load_analysis, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.schema import SEQUENCES
from chunkplan.validation.checks_analysis import check_analysis
from tests.support.corruption_cases import files_of, read
from tests.support.manifests import change_manifest
from tests.support.places import GOLDEN


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
    change_manifest(golden / "plan", "analysis", "path", value="../loop")
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
    change_manifest(golden / "plan", "analysis", "path", value=path)
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
