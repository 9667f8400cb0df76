"""Makes the plans in benchmarks/gpu_plans/, which a machine with a GPU and no planner runs; and opens them there.

    python benchmarks/gpu_plans.py    # makes them anew; needs the planner, not torch

A plan is a few small files, and the tokens of its analysis are made again wherever it is opened: the plan knows their
hash. The lengths in lengths.json are real, 128 of public fine-tuning data: two steps of 64 sequences, one of which has
131,364 tokens. The plan `dp8` is of its short ones.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import read_model_config

FOLDER = Path(__file__).with_suffix("")

_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 1 << 21, "rope_theta": 1e6, "num_key_value_heads": 2}

#: Configs of Qwen2.5 by size, for positions up to two million, and of a quarter of one; of a model that any CPU runs.
MODELS: dict[str, dict[str, Any]] = {
    name: _QWEN2
    | dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), sizes, strict=True))
    | {"vocab_size": vocab_size, "tie_word_embeddings": name != "7b"}
    for name, sizes, vocab_size in (
        ("0.5b", (896, 24, 14, 4864), 151936),
        ("0.5b-6-layers", (896, 6, 14, 4864), 151936),
        ("1.5b", (1536, 28, 12, 8960), 151936),
        ("7b", (3584, 28, 28, 18944), 152064),
        ("toy", (64, 2, 4, 96), 128),
    )
}
MODELS["7b"]["num_key_value_heads"] = 4


@dataclass(frozen=True)
class GpuPlan:
    """A plan, and how its model is run. `lengths` None: those of lengths.json."""

    model: str
    chunk_size: int
    lengths: tuple[int, ...] | None = None
    checkpointing: str = "none"
    lora_rank: int = 0
    dp: int = 1
    global_batch: int = 64

    def cost(self, hardware: str | Path = "h200", **changes: Any) -> CostModel:
        """The cost model of a run on `hardware`: the name of a profile, or its file."""
        with tempfile.TemporaryDirectory() as folder:
            shape = read_model_config(write_model(self.model, Path(folder)))
        return CostModel(
            shape=shape,
            **{
                "hardware": load_hardware(hardware),
                "checkpointing": self.checkpointing,
                "lora_rank": self.lora_rank,
                **changes,
            },
        )


#: K is 1 in all of them.
PLANS: dict[str, GpuPlan] = {
    "1.5b-8k": GpuPlan("1.5b", 8192),
    "1.5b-32k": GpuPlan("1.5b", 32768, checkpointing="full"),
    "1.5b-whole": GpuPlan("1.5b", 131584, checkpointing="full"),
    "7b-lora-32k": GpuPlan("7b", 8192, (32768,), "full", lora_rank=16),
    "7b-lora-128k": GpuPlan("7b", 8192, (131072,), "full", lora_rank=16),
    "0.5b-6-layers-256k": GpuPlan("0.5b-6-layers", 8192, (262144,)),
    "0.5b-256k": GpuPlan("0.5b", 8192, (262144,)),
    "0.5b-512k": GpuPlan("0.5b", 8192, (524288,)),
    "0.5b-1m": GpuPlan("0.5b", 8192, (1048576,)),
    "dp8": GpuPlan("0.5b", 1024, tuple(range(40, 2600, 20)), dp=8, global_batch=32),
    "toy": GpuPlan("toy", 64, (200, 5, 30, 17, 9, 64, 80, 3), global_batch=4),
    "toy-dp8": GpuPlan("toy", 16, tuple(range(3, 35)), dp=8, global_batch=16),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the config.json of a model into `folder`."""
    path = folder / "config.json"
    path.write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return path


def write_tokens(plan: GpuPlan, folder: Path) -> Path:
    """Write the analysis that a plan was made for: random tokens, the same everywhere, all but the first targets."""
    from chunkplan.planfile.analysis_writer import AnalysisWriter  # which needs pyarrow

    folder.mkdir()
    random = np.random.RandomState(0)  # whose numbers no version of numpy changes
    writer = AnalysisWriter(folder)
    for record, length in enumerate(plan.lengths or json.loads((FOLDER / "lengths.json").read_text())):
        tokens = random.randint(MODELS[plan.model]["vocab_size"], size=length).astype(np.int32)
        writer.add(0, record, tokens, np.arange(length) > 0)
    writer.finish(exact=True, sources=[])
    return folder


def make(folder: Path, names: tuple[str, ...] = tuple(PLANS)) -> None:
    """Build plans into `folder`, each in a folder of its name."""
    from chunkplan import PlanConfig, build  # the planner

    for name in names:
        plan = PLANS[name]
        config = PlanConfig(chunk_size=plan.chunk_size, k=1, dp=plan.dp, global_batch=plan.global_batch, cp="off")
        with tempfile.TemporaryDirectory() as beside:
            built = Path(beside) / name
            build(write_tokens(plan, Path(beside) / "analysis"), built, config, cost=plan.cost())
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(built, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
