"""On several GPUs, over NCCL, a run is the run of one GPU; two processes do not share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chunkplan import PlanConfig, build
from tests.support.training_checks import learning, make_training, options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch with CUDA"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences) -> Path:
    folder = make_training(tmp_path_factory.mktemp("gpus") / "made", tiny_config, random_sequences)
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2", head_dim=64, hidden_size=256)))
    spread = {"one": {}, "dp": {"dp": 2}, "pp": {"pp": 2}, "search": {"pp": 2, "schedule": "search"}}
    for name, how in (*spread.items(), ("equal", {"dp": 2, "k": 1, "equal_chunks": True})):
        settings = {"chunk_size": 8, "k": 2, "global_batch": 4, "epochs": 6, "cp": "off", **how}
        (folder / "gpus").mkdir(exist_ok=True)
        build(folder / "analysis", folder / "gpus" / name, PlanConfig(**settings))
    return folder


@two_gpus
@pytest.mark.parametrize(
    ("plan", "more"), [("dp", ()), ("pp", ()), ("search", ("--kv-offload",)), ("equal", ("--sharding", "weights"))]
)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_two_gpus_train_as_one_does(made, tmp_path, plan, more, precision, tolerance):
    """From weights that a step on a CPU has left, for those that are drawn depend on the device."""
    start = tmp_path / "start"
    run(1, options(made, start, "--device", "cpu", "--precision", "fp32", "--max-steps", 1, plan="gpus/one"))
    how = ("--model", start / "final", "--precision", precision, "--save-every", 2)
    for name, size, extra in (("one", 1, ()), (plan, 2, more)):
        words = ["--plan", made / "gpus" / name, "--output", tmp_path / name, "--lr", 3e-3, *how, *extra]
        run(size, [str(word) for word in words])
    found, wanted = learning(tmp_path / plan), learning(tmp_path / "one")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=tolerance)
    assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in wanted], rel=tolerance)


def test_two_processes_on_one_gpu_are_refused_once(made, tmp_path):
    """Both are shown the first GPU alone."""
    arguments = options(made, tmp_path / "run", plan="gpus/dp")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launcher, "-m", "chunkplan_runtime.train", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode != 0 and ran.stderr.count("processes 0 and 1 of 2 would share a GPU") == 1, ran.stderr
    assert not (tmp_path / "run").exists()


def run(size: int, arguments: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    subprocess.run([*launcher, "-m", "chunkplan_runtime.train", *arguments], check=True, timeout=300)
