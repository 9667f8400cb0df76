"""Doors that docs/integrations.md names: lines of stock trainers train as written, the table has every framework."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import chunkplan
from chunkplan.exporting.export import DOORS
from tests.support.analyses import write_analysis
from tests.support.places import ROOT, section

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


@pytest.mark.docs
def test_the_table_has_every_framework_and_the_page_its_line() -> None:
    table = section("integrations.md", "Which door is mine?").lower()
    for name, lines in DOORS.items():
        line = lines.splitlines()[0]
        assert name in table, name
        assert line in PAGE, line
        module = re.findall(r"from ([\w.]+) import (\w+)", line)[0]
        found = [Path(*each.split(".")).with_suffix(".py") for each in (module[0], ".".join(module))]
        assert any((folder / path).is_file() for folder in (ROOT, ROOT / "runtime") for path in found), line


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore")
def test_the_loops_of_the_page_on_reinforcement_learning_train(tmp_path, monkeypatch, tiny_config) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "sample_data" / "tokenizer")
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**tiny_config() | {"vocab_size": len(tokenizer)})
    ).save_pretrained(tmp_path / "path/to/model")
    tokenizer.save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = '"run", use_cpu=True, bf16=False, max_steps=1, report_to="none", max_completion_length=4, '
    names = {"reward": lambda completions, **_: [float(len(each)) for each in completions]}
    names["prompts"] = Dataset.from_dict({"prompt": ["Say one thing, and then another one."] * 8})
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rl.md").read_text(encoding="utf-8"), re.S)
    for block in blocks:
        exec(block.replace('"run", ', options), names)
    assert names["trainer"].state.global_step == 1
    assert sum(weight.grad is not None for weight in names["model"].parameters()) > 5


@pytest.mark.filterwarnings("ignore")
def test_stock_trainers_train_planned_steps_by_the_lines_of_the_page(tmp_path, monkeypatch, tiny_config) -> None:
    """On one process of a CPU: an epoch of a plan of four micro-batches, and three that are planned as they go."""
    ids = [np.arange(length) % 90 for length in range(3, 43)]
    write_analysis(tmp_path / "chunkplan-out/analysis", [(each, np.arange(each.size) > 0) for each in ids])
    config = chunkplan.PlanConfig(chunk_size=512, k=1, global_batch=32, micro_batches=4, last_batch="drop")
    chunkplan.build(tmp_path / "chunkplan-out/analysis", tmp_path / "chunkplan-out/plan", config)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config())).save_pretrained(tmp_path / "path/to/model")
    AutoTokenizer.from_pretrained(ROOT / "sample_data" / "tokenizer").save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    doors = section("integrations.md", "transformers, TRL, axolotl, ms-swift")
    blocks = re.findall(r"```python\n(.*?)```", doors, re.S)
    assert len(blocks) == 3
    options = '"run", use_cpu=True, bf16=False, logging_steps=1, report_to="none", '
    for block, steps in zip(blocks[:2], (1, 6), strict=True):
        names = {"rows": Dataset.from_dict({"input_ids": [each.tolist() for each in ids]})}
        exec(block.replace('"run", ', options), names)
        assert names["trainer"].state.global_step == steps and names["trainer"].state.log_history[0]["loss"] > 0
