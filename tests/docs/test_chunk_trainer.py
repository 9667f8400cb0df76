"""What docs/integrations.md says of ChunkTrainer and its example run as written, and the page names what is there."""

from __future__ import annotations

import inspect
import re
import runpy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build
from chunkplan_runtime import ChunkTrainer
from chunkplan_runtime.training.chunk_trainer import PASSED_ON, REFUSED_ARGUMENTS, REFUSED_SETTINGS
from tests.support.analyses import write_analysis
from tests.support.places import ROOT, section

PAGE = section("integrations.md", "ChunkTrainer")
EXAMPLE = ROOT / "examples" / "chunk_trainer.py"

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


@pytest.fixture
def workspace(tmp_path, monkeypatch, tiny_config, random_sequences):
    """An empty folder but for a model and a plan, under the names that the page calls them by."""
    analysis = write_analysis(tmp_path / "chunkplan-out/analysis", random_sequences([25, 6, 14, 40, 5, 9, 17]))
    config = PlanConfig(chunk_size=8, k=2, global_batch=3, holdout=1)
    build(analysis, tmp_path / "chunkplan-out" / "plan", config)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config())).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def test_the_code_of_the_page_runs_as_written(workspace, monkeypatch, capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        # transformers computes in bfloat16 without a GPU when it is told that there is none.
        exec(block.replace("save_steps=100", "save_steps=1").replace("bf16=True", "bf16=True, use_cpu=True"), names)
    assert float(re.findall(r"^(\d+\.\d+)$", capsys.readouterr().out, re.M)[0]) > 0
    assert names["trainer"].state.global_step == 2
    assert (workspace / "run" / "final" / "model.safetensors").exists()
    assert (workspace / "adapters" / "final" / "adapter_model.safetensors").exists()


def test_the_example_runs_and_goes_on(workspace, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), "path/to/model", "chunkplan-out/plan", "run"])
    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert "'eval_loss'" in capsys.readouterr().out
    assert (workspace / "run" / "final" / "model.safetensors").exists()
    assert (workspace / "run" / "checkpoint-2").exists()


@pytest.mark.docs
def test_the_page_names_every_argument_and_all_that_is_refused():
    parameters = inspect.signature(ChunkTrainer.__init__).parameters
    for name in (*parameters.keys() - {"self", "others"}, *PASSED_ON, *REFUSED_ARGUMENTS, *REFUSED_SETTINGS):
        assert f"`{name}`" in PAGE, name
