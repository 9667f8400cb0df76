"""Each command prints, on a terminal of 80 columns, the screen that is kept of it in tests/golden/screens.

After a change that is meant, `CHUNKPLAN_WRITE_SCREENS=1 python -m pytest tests/cli/test_screens.py` writes them anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import run_here
from tests.support.places import GOLDEN, ROOT
from tests.support.walks import run

SCREENS = GOLDEN / "screens"
CHUNKS = "--chunk-size 1024 --k 1 --global-batch 8"
TREES = "--chunk-size 256 --k 1 --global-batch 8 --share-prefixes"

#: Name of a screen -> the command, in a folder with an analysis, a plan of two ranks and two stages, and another plan.
COMMANDS = {
    "analyze": "analyze texts.jsonl --tokenizer tokenizer --output new",
    "analyze-estimated": "analyze texts.jsonl --output new",
    "analyze-sample": "analyze lengths.npy --sample 0.5 --output new",
    "analyze-rejected": "analyze texts.jsonl bad.jsonl --tokenizer tokenizer --on-error skip --output new",
    "analyze-error": "analyze bad.jsonl --tokenizer tokenizer --output new",
    "analyze-pairs": "analyze pairs.jsonl --tokenizer tokenizer --output new",
    "build": f"build {CHUNKS} --dp 2 --pp 2 --dry-run",
    "build-pairs": f"build pairs {CHUNKS} --dry-run --lora-rank 8",
    "build-shared-prefixes": f"build pairs {TREES} --dry-run --lora-rank 8",
    "build-does-not-fit": "build lengths.npy --chunk-size 2048 --k 1 --dry-run",
    "inspect": "inspect",
    "inspect-analysis": "inspect chunkplan-out/analysis",
    "inspect-step": "inspect --step 1 --actions",
    "inspect-step-of-eight-stages": "inspect deep --step 0",
    "inspect-step-of-shared-prefixes": "inspect shared --step 0",
    "inspect-chunk": "inspect --step 1 --rank 0 --chunk 2 --text",
    "inspect-record": "inspect --record texts.jsonl:2 --tokenizer tokenizer",
    "inspect-record-of-messages": "inspect --record chat.jsonl:1 --tokenizer tokenizer",
    "inspect-record-of-a-pair": "inspect --record pairs.jsonl:1 --tokenizer tokenizer",
    "simulate": "simulate --step 1",
    "simulate-shared-prefixes": "simulate shared --rank 0",
    "simulate-lengths": "simulate --lengths 1024,1024,2048,4096 --pp 4 --cost unit --chunk-size 2048 --k 2",
    "simulate-virtual-stages": "simulate --lengths 1024,2048,4096 --pp 2 --cost unit --chunk-size 2048 --k 2 "
    "--schedule interleaved --virtual-stages 3",
    "simulate-compare": "simulate deep --compare 1f1b,interleaved,zero-bubble",
    "validate": "validate",
    "validate-broken": "validate broken",
    "diff": "diff chunkplan-out/plan other",
    "tune": "tune few.npy --dp 2 --chunk-sizes 8192 --ks 1,4 --global-batch 16",
    "gain": "gain few.npy --gpus 2 --chunk-sizes 8192 --ks 1 --global-batch 16",
    "export": "export --to jsonl --allow-split",
    "export-of-pairs": "export pairs --to jsonl --chunk-size 64",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a conversation and records that are bad, lengths of a long tail, and what is made of them."""
    made = tmp_path_factory.mktemp("screens")
    texts = [{"text": f"a text, number {number} of a few. " * (number % 5 + 1)} for number in range(30)]
    texts.append({"text": "one and two and three " * 700})
    pairs = [{"prompt": "x " * number, "chosen": "a b c", "rejected": "d"} for number in range(20, 420, 20)]
    chat = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2."}]
    for name, records in (("texts", texts), ("pairs", pairs), ("chat", [{"messages": chat, "id": 7}])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (made / "bad.jsonl").write_text('{"text": "fine"}\n{"text": " "}\n[1]\n{"text": 3}\n{\n')
    shutil.copytree(ROOT / "sample_data" / "tokenizer", made / "tokenizer")
    np.save(made / "few.npy", np.geomspace(50, 60_000, 60).astype(np.int32))
    np.save(made / "lengths.npy", np.geomspace(50, 100_000, 400).astype(np.int32))
    for words in (
        "analyze texts.jsonl --tokenizer tokenizer",
        "analyze pairs.jsonl --tokenizer tokenizer --output pairs",
        f"build {CHUNKS} --dp 2 --pp 2",
        f"build {CHUNKS} --dp 4 --output other",
        f"build {CHUNKS} --pp 8 --schedule 1f1b --output deep",
        f"build pairs {TREES} --output shared",
    ):
        ran = run_here(made, *words.split())
        assert ran.returncode == 0, ran.stderr
    shutil.copytree(made / "other", made / "broken")
    manifest = made / "broken" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"chunk_size": 1024', '"chunk_size": 1000'))
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_screen(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On both streams; what is no sentence for the log is no wider than the terminal."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    _, printed = run(f"chunkplan {COMMANDS[name]}", monkeypatch)
    shutil.rmtree("new", ignore_errors=True)
    shown = f"$ chunkplan {COMMANDS[name]}\n{printed.replace(str(folder), 'FOLDER')}"
    file = SCREENS / f"{name}.txt"
    if os.environ.get("CHUNKPLAN_WRITE_SCREENS"):
        file.write_text(shown, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == shown
    wide = [line for line in printed.splitlines() if len(line) > 80]
    assert all(re.match("(read|warning:|error:|hint:|next:) ", line) for line in wide)
