"""On several GPUs, over NCCL, a run is the run of one GPU; two processes do not share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.places import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch with CUDA"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

PRECISIONS = {"fp32": 1e-4, "bf16": 3e-2}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """Plans, and a model that a step on a CPU has left, for weights that are drawn depend on the device."""
    pytest.importorskip("numba", reason="the planner makes these plans, and needs numba")
    from chunkplan import PlanConfig, build
    from tests.support.training_checks import make_training, options

    folder = make_training(tmp_path_factory.mktemp("gpus") / "made", tiny_config, random_sequences)
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2", head_dim=64, hidden_size=256)))
    spread = {"one": {}, "dp": {"dp": 2}, "pp": {"pp": 2}, "search": {"pp": 2, "schedule": "search"}}
    for name, how in (*spread.items(), ("equal", {"dp": 2, "k": 1, "equal_chunks": True})):
        settings = {"chunk_size": 8, "k": 2, "global_batch": 4, "epochs": 6, "cp": "off", **how}
        (folder / "gpus").mkdir(exist_ok=True)
        build(folder / "analysis", folder / "gpus" / name, PlanConfig(**settings))
    start = folder / "start"
    run(1, options(folder, start, "--device", "cpu", "--precision", "fp32", "--max-steps", 1, plan="gpus/one"))
    for precision in PRECISIONS:
        run(1, words(folder, "one", precision))
    return folder


@two_gpus
@pytest.mark.parametrize(
    ("plan", "more"), [("dp", ()), ("pp", ()), ("search", ("--kv-offload",)), ("equal", ("--sharding", "weights"))]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_gpus_train_as_one_does(made, plan, more, precision):
    from tests.support.training_checks import learning

    run(2, [*words(made, plan, precision), *more])
    found, wanted = learning(made / f"{plan}-{precision}"), learning(made / f"one-{precision}")
    for entry in ("loss", "grad_norm"):
        assert [row[entry] for row in found] == pytest.approx([row[entry] for row in wanted], rel=PRECISIONS[precision])


def test_two_processes_on_one_gpu_are_refused_once(tmp_path, monkeypatch):
    """Both are shown the first GPU alone."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_plans

    analysis = gpu_plans.write_tokens(gpu_plans.PLANS["toy-dp8"], tmp_path / "analysis")
    model = gpu_plans.write_model("toy", tmp_path)
    files = ["--plan", gpu_plans.FOLDER / "toy-dp8", "--analysis", analysis, "--model-config", model]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launcher, "-m", "chunkplan_runtime.train", *map(str, files), "--output", str(tmp_path / "run")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode != 0 and ran.stderr.count("processes 0 and 1 of 2 would share a GPU") == 1, ran.stderr
    assert not (tmp_path / "run").exists()


def words(made, plan, precision):
    """The options of a run from the model that is there, into a folder of its own."""
    how = ("--model", made / "start" / "final", "--precision", precision, "--save-every", 2, "--lr", 3e-3)
    return [str(word) for word in ("--plan", made / "gpus" / plan, "--output", made / f"{plan}-{precision}", *how)]


def run(size, arguments):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(size),
    ]
    subprocess.run([*launcher, "-m", "chunkplan_runtime.train", *arguments], check=True, timeout=300)
