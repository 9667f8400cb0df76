"""Measures how much host memory processes need to load their parts of a saved model, to save it, and for checkpoints.

    python benchmarks/host_memory.py               # a model of 151 MiB, a minute; Linux only
    python benchmarks/host_memory.py --layers 96   # four times as large
    python benchmarks/host_memory.py --json        # rows for a program

Four gloo processes on this machine, on CPUs, as data-parallel replicas, as pipeline stages, and both. What a process
has, its share, are the weights that it holds, with the float32 master weights of those in bfloat16. Its peak is the
most memory that was resident, less what was before: when torch, transformers and all code were there, and a tiny model
had been loaded and saved in the same way. What a checkpoint takes, written and read, is over what was resident then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import socket
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import machine
from planning import Row, print_table, write_lengths
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from chunkplan import PlanConfig, build
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.distributed.job import Job, make_groups
from chunkplan_runtime.layout import choose_layout
from chunkplan_runtime.models.model import meta_model, read_config
from chunkplan_runtime.training import checkpoint
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.final import save_final
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.setup import build_model
from chunkplan_runtime.training.train_step import TrainStep

#: dp, pp.
LAYOUTS = ((4, 1), (2, 2), (1, 4))
#: What a file of a saved model, or of a checkpoint, takes: little of this small one, as by default of a large one.
_FILE_BYTES = 1 << 22
_CPU, _TIMEOUT = torch.device("cpu"), timedelta(minutes=5)


def write_model(folder: Path, num_layers: int, hidden_size: int) -> int:
    """Write a Qwen2 model of random bfloat16 weights; returns its bytes."""
    config = AutoConfig.for_model(
        "qwen2",
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        vocab_size=8 * hidden_size,
        tie_word_embeddings=True,
    )
    shapes = {name: weight.shape for name, weight in meta_model(config, torch.bfloat16).named_parameters()}
    folder.mkdir()
    config.save_pretrained(folder)
    weights = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return sum(weight.nbytes for weight in weights.values())


def make_plans(folder: Path) -> None:
    """Build a plan for each layout."""
    source = write_lengths(folder / "lengths.parquet", np.full(16, 100))
    for dp, pp in LAYOUTS:
        build(source, folder / f"plan-{dp}-{pp}", PlanConfig(chunk_size=256, k=1, dp=dp, pp=pp, cp="off"))


def _load_and_save(config: TrainConfig, job: Job) -> dict[str, int]:
    """Bytes of the weights that a process holds, its peaks, and what a checkpoint takes beside what is held."""
    model_config = read_config(config.model or config.model_config or "", router_loss=True)
    built = build_model(config, model_config, load_plan(config.plan), job)
    step = TrainStep(built.own, config, 1, job)
    held = {id(each): each for each in (*step.model.model.parameters(), *step.tensors()["weights"].values())}
    local = [each.to_local() if isinstance(each, DTensor) else each for each in held.values()]
    found = {"share": sum(each.nbytes for each in local), "loaded": _memory("VmHWM")}
    save_final(step, built.whole, [], config.output, job, file_bytes=_FILE_BYTES)
    found["saved"] = _memory("VmHWM")
    run = RunFolder(config.output.with_suffix(".run"))
    what = {"state": {}, "keep_last": 1, "best": None, "device": _CPU, "job": job}
    checkpoint.write_checkpoint(run, 0, **step.tensors(), **what)
    job.barrier()
    step.restore(run.checkpoint(0))  # makes the states of the optimizer
    for phase in ("written", "read"):
        before = _forget_peak()
        if phase == "written":
            checkpoint.write_checkpoint(run, 1, **step.tensors(), **what)
            job.barrier()
        else:
            step.restore(run.checkpoint(1))
        found[phase] = _memory("VmHWM") - before
    return found


def _forget_peak() -> int:
    """Begin a new peak; returns the resident memory now, when what was freed is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """Resident memory of this process in bytes: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _work(rank: int, folder: Path, dp: int, pp: int, precision: str, port: int) -> None:
    torch.set_num_threads(1)
    checkpoint._FILE_BYTES = _FILE_BYTES
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=dp * pp, rank=rank, timeout=_TIMEOUT)
    plan = load_plan(folder / f"plan-{dp}-{pp}")
    layout = choose_layout(plan, dp * pp, rank)
    job = Job(layout, make_groups(layout, _CPU, _TIMEOUT, []))
    where = {"plan": plan.path, "device": "cpu", "precision": precision}
    tiny = TrainConfig(model=str(folder / "tiny"), output=folder / f"tiny-{dp}-{pp}-{precision}", **where)
    _load_and_save(tiny, job)
    before = _forget_peak()
    config = replace(tiny, model=str(folder / "model"), output=folder / f"final-{dp}-{pp}-{precision}")
    found = _load_and_save(config, job)
    found |= {"before": before, "loaded": found["loaded"] - before, "saved": found["saved"] - before}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: Path, precision: str) -> list[Row]:
    """Make a row for each layout: of all processes the largest peaks."""
    rows = []
    for dp, pp in LAYOUTS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Forked, so that torch is imported once. Nothing in this process has begun a thread.
        given = (folder, dp, pp, precision, port)
        torch.multiprocessing.start_processes(_work, args=given, nprocs=dp * pp, start_method="fork")
        found: list[dict[str, int]] = [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(dp * pp)
        ]
        for path in folder.glob("final-*"):
            shutil.rmtree(path)
        over = {name: max(each[name] / each["share"] for each in found) for name in ("loaded", "saved")}
        most = {name: max(each[name] for each in found) / 2**20 for name in found[0]}
        rows.append(
            {"dp": dp, "pp": pp, "precision": precision}
            | {"MiB before": round(most["before"]), "share": round(most["share"])}
            | {"peak, loaded": round(most["loaded"]), "peak, saved": round(most["saved"])}
            | {"checkpoint written": round(most["written"]), "read": round(most["read"])}
            | {"loaded / share": round(over["loaded"], 3), "saved / share": round(over["saved"], 3)}
        )
    return rows


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    disable_progress_bar()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            other.submit(make_plans, folder).result()
        write_model(folder / "tiny", 4, 64)
        size = write_model(folder / "model", options.layers, options.hidden_size)
        for precision in options.precision:
            rows += measure(folder, precision)
    if options.json:
        print(json.dumps(rows))
        return
    print_table(f"Host memory of 4 processes, a model of {size / 2**20:.0f} MiB in bfloat16", rows)
    facts: dict[str, Any] = machine("chunkplan", "torch", "transformers", "safetensors")
    print(f"\n{facts}")


if __name__ == "__main__":
    main()
