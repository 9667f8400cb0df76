"""Manifests that are none, are of another version, are damaged or made to do harm: refused or found by name."""

from __future__ import annotations

import json
import os
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from chunkplan import load_analysis, load_plan, validate
from chunkplan.cost.model_config import read_model_config
from chunkplan.errors import DataError
from chunkplan.files import json_file
from chunkplan.files.folder import MANIFEST
from chunkplan.tuning.document import read_tuning
from tests.support.corruption_cases import outcome, read
from tests.support.manifests import change_manifest, damage, entries

NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED]

HOSTILE = (
    *(..., None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**30, 0.5, -0.5, 1e300, float("1e400")),
    *("", "x", "\0", "/dev/zero", "../../../etc/passwd", "a" * 5000),
    *([], [[]], [None], {}, {"a": 1}, {"": []}, NESTED),
)


def test_a_plan_of_a_newer_schema_is_refused_by_name(plan: Path) -> None:
    change_manifest(plan, "schema_version", value=99)
    with pytest.raises(DataError, match="written by schema version 99") as refused:
        load_plan(plan)
    assert refused.value.hint is not None
    assert "upgrade" in refused.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{", '{"kind": "plan"}', '{"kind": "analysis", "schema_version": 1}'])
def test_a_manifest_that_is_none_is_refused(plan: Path, content: str) -> None:
    (plan / "manifest.json").write_text(content)
    with pytest.raises(DataError):
        load_plan(plan)


@pytest.mark.parametrize("values_each", [1, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_damaged_manifest_is_refused_or_found_and_never_crashes(
    plan: Path,
    analysis: Path,
    kind: str,
    values_each: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever entry is missing or of another type: `inspect` and `validate` say so, with their exit codes.

    Each entry is damaged in one of four ways, in turn, or in all of them.
    """
    from chunkplan_cli.app import run_command

    file = {"plan": plan, "analysis": analysis}[kind] / "manifest.json"
    whole = file.read_text()
    accepted = []
    ways = cycle([..., "x", 2**70, []])
    for path in entries(json.loads(whole)):
        if path[:2] == ("predictions", "cost_model") and len(path) > 3 and path[3] not in ("name", "num_layers"):
            continue  # read by `simulate` alone: tests/cost/test_model.py damages these
        for value in islice(ways, values_each):
            document = json.loads(whole)
            damage(document, path, value)
            if document == json.loads(whole):
                continue
            file.write_text(json.dumps(document))
            for command in ("inspect", "validate"):
                monkeypatch.setattr(sys, "argv", ["chunkplan", command, str(file.parent)])
                with pytest.raises(SystemExit) as end:
                    run_command()
                    raise SystemExit(0)
                assert end.value.code in (0, None, 2, 3, 4), (command, path, value, capsys.readouterr().err)
                if command == "validate" and not end.value.code:
                    accepted.append(path[0])
            capsys.readouterr()
    described = {
        "tool_version",
        "seed",
        "epochs",
        "sources",
        "predictions",
        "totals",
        "truncated",
        "analysis",
        "selection",
    }
    assert set(accepted) <= described | {"exact", "max_token_id", "tokens", "rejected"}


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
            change_manifest(golden / kind, *path, value=value)
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
    change_manifest(golden / kind, *path, value={"a": [1]})
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
    with pytest.raises(DataError) as refused:
        validate(golden / kind)
    assert f"`{name}` is {{'a': [1]}}, expected " in str(refused.value)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("value", [[], None, 5, "x"])
def test_options_that_are_none_are_refused(golden: Path, value: object) -> None:
    change_manifest(golden / "analysis", "options", value=value)
    with pytest.raises(DataError, match=r"`options` is .*, expected an object"):
        validate(golden / "analysis")


@pytest.mark.parametrize("entry", ["path", "content_hash", "vocab_size", "eos_token"])
def test_a_tokenizer_that_is_none_is_refused(golden: Path, entry: str) -> None:
    known = {"path": "t", "content_hash": "0", "vocab_size": 9, "eos_token": "\n"}
    change_manifest(golden / "analysis", "tokenizer", value=known)
    assert validate(golden / "analysis").ok
    change_manifest(golden / "analysis", "tokenizer", value=known | {entry: [1]})
    with pytest.raises(DataError, match="`tokenizer` is"):
        validate(golden / "analysis")


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_the_name_of_a_source_is_one_line(golden: Path, kind: str) -> None:
    """Or a report of it would have lines that look like ours."""
    path = ("selection", "sources", 0, "path") if kind == "plan" else ("sources", 0, "path")
    change_manifest(golden / kind, *path, value="a.jsonl\nok      tokens")
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
    change_manifest(golden / "analysis", "tokens", 0, "file", value=file)
    with pytest.raises(DataError, match=r"`tokens\[0\]\.file`"):
        load_analysis(golden / "analysis")


@pytest.mark.parametrize("rows", [[10**18], [60, 2**62, 2**62], [1] * 59, [61]])
def test_rows_that_the_lengths_do_not_have_are_refused(golden: Path, rows: list[int]) -> None:
    change_manifest(golden / "analysis", "tokens", 0, "rows", value=rows)
    with pytest.raises(DataError, match=r"tokens of [0-9,]+ sequences, expected 60"):
        load_analysis(golden / "analysis")


@pytest.mark.parametrize("first", [1, 59, 2**63 - 1])
def test_a_part_that_begins_elsewhere_is_refused(golden: Path, first: int) -> None:
    change_manifest(golden / "analysis", "tokens", 0, "first_sequence_id", value=first)
    with pytest.raises(DataError, match=f"begin with sequence {first}, expected 0"):
        load_analysis(golden / "analysis")


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
