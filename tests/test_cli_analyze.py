"""`chunkplan analyze` from its options to what is on the screen."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from chunkplan.errors import DataError
from chunkplan.lengths import length_report
from chunkplan.planfile.load import load_analysis
from chunkplan_cli.length_report import print_length_report
from chunkplan_cli.main import app

TOKENIZER = Path(__file__).parent.parent / "sample_data" / "tokenizer"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a dataset in it, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("CHUNKPLAN_WORKSPACE", "CHUNKPLAN_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)
    records = [{"text": "word " * 3**power} for power in range(10)] + [{"text": ""}]
    Path("dataset.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def _run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["analyze", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_a_bare_dataset_is_estimated_and_says_so_loudly(here: Path) -> None:
    out, err = _run("dataset.jsonl")
    assert out.startswith("ESTIMATED from bytes, no tokenizer:")
    for title in ("Lengths (estimated)", "Histogram (estimated)", "The tail (estimated)"):
        assert title in out
    assert "1 rejected: empty" in out
    assert "warning: no tokenizer" in err
    assert "hint: give --tokenizer FILE" in err
    assert "next: chunkplan build --chunk-size 8192 --k 4\n" in err
    assert not load_analysis(here / "chunkplan-out" / "analysis").is_exact


def test_with_a_tokenizer_nothing_is_estimated(here: Path) -> None:
    out, err = _run("dataset.jsonl", "--tokenizer", str(TOKENIZER), "--workspace", "ws", "--max-length", "100")
    assert "estimated" not in (out + err).lower()
    assert "read dataset.jsonl: text, 11 records" in err
    assert "analysis in ws/analysis\n" in err
    assert "next: chunkplan build --chunk-size 8192 --k 4 --workspace ws\n" in err
    assert " cut by " in out
    assert load_analysis(here / "ws" / "analysis").num_tokens.max() == 100


def test_a_second_run_says_what_it_replaced(here: Path) -> None:
    _, first = _run("dataset.jsonl", "--output", "there")
    assert "replaced" not in first
    assert "next: chunkplan build there --chunk-size 8192 --k 4\n" in first
    _, second = _run("dataset.jsonl", "--output", "there")
    assert "analysis in there (replaced the analysis of dataset.jsonl, 10 sequences)" in second
    (here / "there" / "manifest.json").write_text("{")
    _, third = _run("dataset.jsonl", "--output", "there")
    assert "replaced something that is no analysis" in third


def test_json_is_one_document_with_the_report_and_what_was_read(here: Path) -> None:
    out, _ = _run("dataset.jsonl", "--json")
    document = json.loads(out)
    analysis = load_analysis(here / "chunkplan-out" / "analysis")
    assert document["report"] == json.loads(json.dumps(length_report(analysis).to_dict()))
    assert document["content_hash"] == analysis.content_hash
    assert document["rejected"] == {"empty": 1}
    assert document["sources"][0]["path"] == "dataset.jsonl"


def test_the_tokenizer_of_the_workspace_is_used(here: Path) -> None:
    (here / "ws").mkdir()
    (here / "ws" / "workspace.toml").write_text(f"tokenizer = {json.dumps(str(TOKENIZER))}\n")
    out, _ = _run("dataset.jsonl", "--workspace", "ws")
    assert "ESTIMATED" not in out


def test_errors_are_left_to_the_program(here: Path) -> None:
    Path("bad.jsonl").write_text("[]\n")
    result = CliRunner().invoke(app, ["analyze", "bad.jsonl"])
    assert isinstance(result.exception, DataError)
    assert str(result.exception) == "bad.jsonl:1: found a list, expected one JSON object a line"


def test_help_ends_with_an_example(here: Path) -> None:
    out, _ = _run("--help")
    assert "Example: chunkplan analyze train.jsonl --tokenizer" in out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("most", [1, 50, 2**31 - 1])
def test_the_report_fits_the_screen_and_is_whole(tmp_path: Path, width: int, most: int) -> None:
    lengths = np.unique(np.geomspace(1, most, 500).astype(np.int64)).repeat(3)
    np.save(tmp_path / "lengths.npy", lengths)
    report = length_report(load_analysis(tmp_path / "lengths.npy"))
    manifest = {"rejected": {"empty": 10**9}, "truncated": {"num_sequences": 10**9, "num_tokens": 10**12}}
    for encoding in ("utf-8", "ascii"):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
        print_length_report(Console(file=file, width=width), report, manifest)
        file.seek(0)
        lines = file.read().splitlines()
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert "…" not in text
        assert f"{report.num_tokens:,}" in text
        assert f"{report.longest:,}" in text
        assert text.count("#" if encoding == "ascii" else "█") >= len(report.histogram)
