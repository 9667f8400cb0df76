"""What docs/integrations.md says of exported rows: commands and screens are as they run, its TRL script trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import chunkplan
from chunkplan.exporting.export import FORMATS, Export
from chunkplan.exporting.rows import SplitSequences, WholeSequences
from tests.support.analyses import write_analysis
from tests.support.places import ROOT, section
from tests.support.walks import commands_of

PAGE = section("integrations.md", "Rows for other trainers")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

LENGTHS = (25, 6, 14, 40, 5, 9, 17, 1, 8, 30, 2, 3)


@pytest.fixture
def workspace(tmp_path, monkeypatch, tiny_config, random_sequences) -> Path:
    """A model and a plan that splits no sequence, under the names that the page calls them by."""
    analysis = write_analysis(tmp_path / "chunkplan-out/analysis", random_sequences(LENGTHS))
    config = chunkplan.PlanConfig(chunk_size=40, k=1, global_batch=6)
    chunkplan.build(analysis, tmp_path / "chunkplan-out" / "plan", config)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config())).save_pretrained(tmp_path / "path/to/model")
    AutoTokenizer.from_pretrained(ROOT / "sample_data" / "tokenizer").save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def test_the_commands_of_the_page_run_as_written(workspace, command) -> None:
    [block] = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    for line in block.splitlines():
        assert command(*shlex.split(line, comments=True)[1:]).code == 0
    assert (workspace / "chunkplan-out" / "export-hf" / "state.json").exists()
    assert (workspace / "chunkplan-out" / "export-jsonl" / "export.json").exists()


def test_the_screens_of_the_page_are_those_of_the_sample_data(command) -> None:
    """To the letter, at 100 columns."""
    sample = ROOT / "sample_data"
    chunkplan.analyze([sample / "code.jsonl"], "analysis", tokenizer=sample / "tokenizer")
    screens = list(commands_of(PAGE))
    assert len(screens) == 2
    for typed, screen in screens:
        ran = command(*shlex.split(typed)[1:], width=100)
        assert [line.rstrip() for line in (ran.err if ran.code else ran.out).splitlines()] == screen.splitlines()


def test_trl_trains_on_an_export_with_the_loss_of_the_sequences_one_by_one(workspace, monkeypatch) -> None:
    """The script as written, for two steps of two rows on a CPU: sequences of a row do not see each other."""
    chunkplan.export("chunkplan-out/plan", "chunkplan-out/export-hf", "hf")
    expected = losses_of_rows(workspace / "path/to/model", 4)
    [script] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    script = script.replace("flash_attention_2", "sdpa").replace("train_batch_size=1", "train_batch_size=2")
    options = 'max_steps=2, logging_steps=1, learning_rate=0.0, use_cpu=True, bf16=False, report_to="none", '
    names: dict[str, object] = {}
    exec(script.replace("SFTConfig(", f"SFTConfig({options}"), names)
    logged = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    for step, loss in enumerate(logged):
        rows = expected[2 * step : 2 * step + 2]
        assert loss == pytest.approx(sum(total for total, _ in rows) / sum(count for _, count in rows), rel=1e-5)
    assert len(logged) == 2
    batch = next(iter(names["trainer"].get_train_dataloader()))
    assert batch["position_ids"].shape == batch["input_ids"].shape and "step" not in batch


def losses_of_rows(model_folder: Path, num_rows: int) -> list[tuple[float, int]]:
    """Of the first chunks of the plan, sum over targets and how many: every sequence run by itself, in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokens = chunkplan.load_analysis("chunkplan-out/analysis").tokens()
    chunks = [chunk for step in chunkplan.load_plan("chunkplan-out/plan").iter_steps() for chunk in step.chunks[0]]
    rows = []
    for chunk in chunks[:num_rows]:
        total, count = 0.0, 0
        for segment in chunk.segments:
            ids, target = (torch.tensor(values) for values in tokens(segment.sequence_id))
            if target.any():
                with torch.no_grad():
                    logits = model(ids[None].long()).logits[0, :-1][target[1:]]
                total += torch.nn.functional.cross_entropy(logits, ids[target].long(), reduction="sum").item()
                count += int(target.sum())
        rows.append((total, count))
    assert len(rows) == num_rows and any(len(chunk.segments) > 1 for chunk in chunks[:num_rows])
    return rows


@pytest.mark.docs
def test_the_page_names_every_format_and_every_entry_of_export_json() -> None:
    for name in FORMATS:
        assert re.search(rf"^### {name}\b", PAGE, re.M), name
    for kind in (Export, WholeSequences, SplitSequences):
        for name in kind.__dataclass_fields__:
            assert f"`{name}`" in PAGE.split("### export.json")[1], name
