"""Times what processes send each other, and the trainer on all of them: NCCL, with a process for each GPU.

Started by benchmarks/gpu_report.py under torchrun; rank 0 prints a row of JSON for each collective and size.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_plans import FOLDER, PLANS, write_model, write_tokens
from gpu_program import lines_of

from chunkplan.planfile.load import load_plan
from chunkplan_runtime.devices import synchronize

Row = dict[str, Any]

_STEPS = 3

#: Seconds that a program may take.
_SECONDS = 240


def measure_links(device: torch.device, *, toy: bool, add: Callable[[Row], None]) -> None:
    """Add rows of collectives among all GPUs (on a CPU two processes), and of the trainer on one process and on all."""
    number = torch.cuda.device_count() if device.type == "cuda" else 2
    for row in _started(number, [__file__, device.type, "toy" if toy else "full"]):
        add(json.loads(row))
    name = "toy-dp8" if toy else "dp8"
    plan = PLANS[name]
    load_plan(FOLDER / name)  # which is there, before tokens are written for it
    with tempfile.TemporaryDirectory() as folder:
        analysis, model = write_tokens(plan, Path(folder) / "analysis"), write_model(plan.model, Path(folder))
        most = min(plan.dp, 1 << (number.bit_length() - 1))  # processes have equally many of the plan's ranks
        for processes in sorted({1, most}):
            output = Path(folder) / f"run-{processes}"
            words: list[object] = ["-m", "chunkplan_runtime.train", "--plan", FOLDER / name, "--analysis", analysis]
            words += ["--model-config", model, "--output", output, "--max-steps", _STEPS, "--device", device.type]
            deque(_started(processes, [str(word) for word in words]), maxlen=0)
            for line in (output / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                add(
                    {
                        "trainer": f"processes: {processes}",
                        "step": row["step"],
                        "tokens": row["tokens"],
                        "seconds": round(row["seconds"], 3),
                        "loss": round(row["loss"], 5),
                        "peak_gib": round(row["peak_memory_bytes"] / 2**30, 2),
                    }
                )


def _started(processes: int, words: list[str]) -> Iterator[str]:
    """Run a program under torchrun, and yield the rows of JSON that it prints as they come.

    Where it fails, the end of what else it printed is shown.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    here = ["--standalone", "--local-addr", "127.0.0.1"]  # a name of this machine need not resolve
    launcher = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", str(processes)]
    last: deque[str] = deque(maxlen=40)
    try:
        for line in lines_of([*launcher, *words], seconds=_SECONDS):
            if line.startswith("{"):
                yield line
            else:
                last.append(line)
    except RuntimeError as error:
        print("".join(last), end="", flush=True)
        raise RuntimeError(": ".join([str(error), *[line for line in last if "rror: " in line][:1]])) from error


def _measure(device_type: str, sizes: tuple[int, ...]) -> None:
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    number, rank = dist.get_world_size(), dist.get_rank()
    for size in sizes:
        whole = torch.zeros(size // 2 // number * number, dtype=torch.bfloat16, device=device)
        part, other = whole[: whole.numel() // number].clone(), torch.empty_like(whole)
        ways: dict[str, Callable[[], object]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
        }
        if number > 1:
            ways["send to the next"] = lambda whole=whole, other=other: _send_on(whole, other, rank, number)
        for name, way in ways.items():
            times = []
            for _ in range(6):
                dist.barrier()
                synchronize(device)
                started = time.perf_counter()
                way()
                synchronize(device)
                times.append(time.perf_counter() - started)
            seconds = statistics.median(times[1:])
            if rank == 0:
                row = {"collective": name, "backend": dist.get_backend(), "processes": number, "bytes": whole.nbytes}
                row |= {"us": round(seconds * 1e6, 1), "GB/s": round(whole.nbytes / seconds / 1e9, 2)}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def _send_on(whole: torch.Tensor, other: torch.Tensor, rank: int, number: int) -> None:
    pair = [
        dist.P2POp(dist.isend, whole, (rank + 1) % number),
        dist.P2POp(dist.irecv, other, (rank - 1) % number),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


if __name__ == "__main__":
    _measure(sys.argv[1], (1 << 12, 1 << 16) if sys.argv[2] == "toy" else (1 << 12, 1 << 20, 1 << 26, 1 << 30))
