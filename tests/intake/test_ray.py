"""A Ray cluster does what processes do, with the same result, errors and cleanness; on a real cluster of two CPUs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chunkplan import analyze, load_analysis
from chunkplan.errors import DataError, UsageError
from chunkplan.extras import pip_install
from tests.support.places import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

TOKENIZER = ROOT / "sample_data" / "tokenizer"

#: The command, with pieces so small that there are several.
COMMAND = """
from chunkplan.intake import pieces
from chunkplan_cli.main import main
pieces.PIECE_BYTES = 20_000
main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """The program is connected already, as one is that uses Ray for other things."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # of pytest, names are too long for sockets
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of texts that is cut into about ten pieces."""
    random = np.random.default_rng(0)
    path = tmp_path / "many.jsonl"
    texts = (f"text {number} " + "word " * int(random.integers(0, 40)) for number in range(1500))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 20_000)
    return path


@pytest.mark.soak
def test_a_cluster_gives_the_same_analysis(many: Path, tmp_path: Path, cluster: None) -> None:
    alone = analyze(many, tmp_path / "alone", tokenizer=TOKENIZER, workers=1)
    calls: list[tuple[int, int | None, int]] = []
    there = analyze(
        many,
        tmp_path / "there",
        tokenizer=TOKENIZER,
        ray="local",
        cache=tmp_path / "other",
        progress=lambda *done: calls.append(done),
    )
    assert there.manifest == alone.manifest
    assert len(calls) > 5
    assert calls == sorted(calls)
    assert calls[-1] == (many.stat().st_size, many.stat().st_size, int(there.num_tokens.sum()))
    assert ray.is_initialized()  # what the program is connected to is left alone


@pytest.mark.soak
def test_a_cluster_gives_the_same_groups_and_numbers_of_rollouts(many: Path, tmp_path: Path, cluster: None) -> None:
    tokens = {"prompt_ids": [1, 2], "response_ids": [3, 4], "old_log_probs": [-1.0, -0.5]}
    rollouts = ({**tokens, "reward": number, "group": number % 40} for number in range(800))
    many.write_text("".join(json.dumps(each) + "\n" for each in rollouts))
    alone = analyze(many, tmp_path / "alone", tokenizer=TOKENIZER, workers=1)
    there = analyze(many, tmp_path / "there", tokenizer=TOKENIZER, ray="local", cache=tmp_path / "other")
    assert there.manifest == alone.manifest and there.group is not None
    assert there.group.tolist() == [number % 40 for number in range(800)]


@pytest.mark.soak
def test_the_first_bad_record_of_the_input_is_named(many: Path, tmp_path: Path, cluster: None) -> None:
    lines = many.read_text().splitlines()
    lines[700], lines[1200] = '{"text": 5}', "nothing"
    many.write_text("\n".join(lines))
    with pytest.raises(DataError, match="`text`") as caught:
        analyze(many, tmp_path / "out", tokenizer=TOKENIZER, ray="local")
    assert caught.value.where == f"{many}:701"
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_an_interrupt_leaves_no_task_and_the_next_run_goes_on(many: Path, tmp_path: Path, cluster: None) -> None:
    def interrupt(*done: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(many, tmp_path / "out", tokenizer=TOKENIZER, ray="local", progress=interrupt)
    assert not (tmp_path / "out").exists()
    kept = [path.stat().st_ino for path in (tmp_path / "cache" / "pieces").glob("[!.]*")]
    assert kept
    analysis = analyze(many, tmp_path / "out", tokenizer=TOKENIZER, ray="local")
    assert analysis.num_sequences == 1500
    assert set(kept) <= {path.stat().st_ino for path in (tmp_path / "cache" / "pieces").iterdir()}
    assert not list((tmp_path / "cache").rglob("*.tmp-*"))


@pytest.mark.soak
def test_the_command_starts_a_cluster_quietly_and_takes_it_away(many: Path, tmp_path: Path) -> None:
    """Also from a checkout that is found by PYTHONPATH alone."""
    alone = analyze(many, tmp_path / "alone", tokenizer=TOKENIZER, workers=1)
    (tmp_path / "home").mkdir()
    short = Path(tempfile.mkdtemp())
    command = ["analyze", str(many), "--tokenizer", str(TOKENIZER), "--workspace", str(tmp_path / "space"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *command, "--ray", "local", "--workers", "2"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "runtime", "cli")),
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path / "home"),
            "TMPDIR": str(short),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "ray" in line.lower()] == []
    assert json.loads(done.stdout)
    assert load_analysis(tmp_path / "space" / "analysis").content_hash == alone.content_hash
    assert not list(short.glob("chunkplan-*"))
    short.rmdir()


def test_without_ray_the_extra_is_named(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        analyze(many, tmp_path / "out", ray="local")
    assert pip_install("ray") in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "auto", "nonsense"])
def test_an_address_without_a_cluster_is_a_usage_error_at_once(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="there is no Ray cluster at") as caught:
        analyze(many, tmp_path / "out", ray=address)
    assert "--ray local" in caught.value.hint
