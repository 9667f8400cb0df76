"""Measures what this project does on a GPU, in parts that stand alone, and writes docs/gpu-report.md.

    make gpu-report                              # or, where there is no make:
    PYTHONPATH=.:runtime:cli python benchmarks/gpu_report.py
    make gpu-report PARTS=kernels,probe          # some parts
    make gpu-report SIZE=toy OUTPUT=folder       # the same at sizes without meaning, on a CPU too

Needs torch, transformers, pyarrow (for plans), pytest (for `tests`) and peft (for adapters), and nothing of the
planner: plans come along as files (benchmarks/gpu_plans.py). Every row is printed and written as soon as it is
measured, to benchmarks/measured/GPU-DATE.json; a part that is measured again takes the place of what it found before.
A part that fails says so in one line, and the others go on.

Parts, with seconds on an H200: kernels (30), attention by kernel, form and size; tests (60), those marked `gpu`; probe
(20), four chunks of the first layers of a 7B; calibrate (90), the cost model's rates; steps (120; by the profile of an
H100 about 136 there), of 1.5B and 7B models beside what is predicted, with keys and values on the GPU and in host
memory; nccl (60), a process for each GPU; and, only where they are named, offload (60), a step of 262,144 tokens of a
quarter of a 0.5B with keys and values on the GPU and in host memory, and what streams do there; long (260), steps of
131,072 and 262,144 tokens; million (540), of 524,288 and 1,048,576.

Where a call may take no more than 600 s, give PARTS=kernels,probe,calibrate,steps to one and PARTS=tests,nccl to
another.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import gpu_page
import torch
from gpu_program import lines_of
from machine import machine

from chunkplan.errors import ChunkplanError
from chunkplan.files.writing import whole_file

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]

#: All tests that are marked `gpu`, in the order in which they run: on one GPU, then on several.
GPU_TESTS = ("tests/runtime/test_gpu.py", "tests/runtime/distributed/test_gpu.py")

#: Seconds that steps of a million tokens may take, together.
_MILLION = 500


class Report:
    """What is measured on one device: kept in a file of JSON, and shown, as it comes."""

    def __init__(self, device: torch.device, name: str, output: Path | None, *, toy: bool) -> None:
        self.device, self.toy = device, toy
        today = date.today().isoformat()
        self.folder = ROOT / "benchmarks" / "measured" if output is None else output
        self.folder.mkdir(parents=True, exist_ok=True)
        self.page = (ROOT / "docs" if output is None else output) / "gpu-report.md"
        self.path = self.folder / f"{gpu_page.slug(name)}-{today}.json"
        self.document: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.document["machine"] = {"gpu": name, "date": today, "sizes": "toy" if toy else "full"} | _versions(device)
        print(json.dumps(self.document["machine"]), flush=True)

    def add(self, part: str) -> Callable[[Row], None]:
        """What takes the rows of a part, the first of them in place of those of before."""
        rows: list[Row] = []

        def add(row: Row) -> None:
            print(f"{part}: {json.dumps(row)}", flush=True)
            rows.append(row)
            self.document[part] = rows
            self.write()

        return add

    def write(self) -> None:
        """Write the file and the page."""
        with whole_file(self.path) as file:
            file.write(json.dumps(self.document, indent=1) + "\n")
        with whole_file(self.page) as file:
            file.write(gpu_page.page(self.folder))

    @property
    def profiles(self) -> dict[str, str | Path]:
        """Profiles to predict with: the shipped one, and what `calibrate` found here."""
        from chunkplan_runtime.devices import device_name, shipped_profile

        shipped = shipped_profile(device_name(self.device)) or "h100"
        found: dict[str, str | Path] = {f"profile {shipped}": shipped}
        return found | ({"calibrated": self.calibrated} if self.calibrated.exists() else {})

    @property
    def calibrated(self) -> Path:
        """The profile that `calibrate` writes, beside the file."""
        return self.path.with_suffix(".toml")


def _versions(device: torch.device) -> Row:
    found: Row = machine("torch", "transformers", "peft", "flash-attn", "triton")
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "cudnn": cudnn, "memory": memory}
    return found


def _kernels(report: Report) -> None:
    from gpu_kernels import measure_kernels

    measure_kernels(report.device, toy=report.toy, add=report.add("attention_tflops"))


def _tests(report: Report) -> None:
    add, started = report.add("tests"), time.perf_counter()
    words = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-v", "-rs", "-m", "gpu"]
    paths = os.pathsep.join([*(str(ROOT / each) for each in ("", "runtime", "cli")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "240", "PYTHONPATH": paths}
    for line in lines_of([*words, *GPU_TESTS], cwd=ROOT, env=environment):
        if ended := re.match(r"\S+::(\S+) (PASSED|FAILED|SKIPPED|ERROR)(.*?) *\[ *\d+%\]", line):
            test, outcome, why = ended.groups()
            seconds = round(time.perf_counter() - started, 1)
            add({"test": test, "outcome": outcome.lower() + why, "after s": seconds})
        else:
            print(line, end="", flush=True)


def _probe(report: Report) -> None:
    from gpu_probe import measure_probe, measure_rates

    report.document["rates"] = measure_rates(report.device, toy=report.toy)
    measure_probe(report.device, toy=report.toy, add=report.add("probe"))


def _calibrate(report: Report) -> None:
    from gpu_probe import measure_calibration

    from chunkplan.cost.calibrate import write_profile

    calibration, chunks = measure_calibration(report.device, toy=report.toy, add=report.add("calibrated_chunks"))
    write_profile(calibration, report.calibrated, torch_version=torch.__version__)
    report.document.pop("calibrated_chunks")
    rates, fitted = asdict(calibration.rates), asdict(calibration.hardware)
    report.document["calibrate"] = {"model": calibration.what, "rates": rates, "fitted": fitted, "chunks": chunks}
    report.write()
    print(f"calibrate: {json.dumps(fitted)}", flush=True)


def _run_plans(
    part: str, report: Report, *plans: tuple[str, tuple[bool, ...], bool], seconds: float = math.inf, **how: Any
) -> None:
    from gpu_steps import Run, run_plan

    run = Run(report.device, report.toy, report.profiles, report.add(part))
    started, done = time.perf_counter(), []
    for name, kv_offload, compile_ in plans:
        left = seconds - (time.perf_counter() - started)
        if left <= 0:
            print(f"{part}, {name}: left out, the {seconds:.0f} s of {part} are over", flush=True)
            continue
        done.append(attempt(f"{part}, {name}", partial(run_plan, run, name, kv_offload, compile_, seconds=left, **how)))
    if not all(done):
        raise RuntimeError(f"{done.count(False)} of {len(done)} plans")


def _steps(report: Report) -> None:
    both = (False, True)
    compiled = [(name, (False,), True) for name in ("1.5b-8k", "1.5b-whole", "1.5b-32k")]
    _run_plans("steps", report, *compiled, ("1.5b-8k", both, False), ("7b-lora-32k", both, False))


def _nccl(report: Report) -> None:
    from gpu_links import measure_links

    measure_links(report.device, toy=report.toy, add=report.add("nccl"))


def _offload(report: Report) -> None:
    from gpu_streams import measure_host_memory

    measure_host_memory(report.device, toy=report.toy, add=report.add("host_memory"))
    _run_plans("offload", report, ("0.5b-6-layers-256k", (False, True), False), warm=1 << 18, streams=True)


def _long(report: Report) -> None:
    both = (False, True)
    _run_plans(
        "long", report, ("7b-lora-128k", (False,), True), ("7b-lora-128k", both, False), ("0.5b-256k", both, False)
    )


def _million(report: Report) -> None:
    _run_plans("million", report, ("0.5b-512k", (True,), False), ("0.5b-1m", (True,), False), seconds=_MILLION)


PARTS: dict[str, Callable[[Report], None]] = {
    "kernels": _kernels,
    "tests": _tests,
    "probe": _probe,
    "calibrate": _calibrate,
    "steps": _steps,
    "nccl": _nccl,
    "offload": _offload,
    "long": _long,
    "million": _million,
}
DEFAULT = tuple(PARTS)[:-3]


def attempt(what: str, run: Callable[[], None]) -> bool:
    """Run it; where it fails, say so in one line. Returns whether it did not."""
    try:
        run()
    except Exception as error:  # whatever it is, the next part can go on
        words = str(error) if isinstance(error, ChunkplanError) else f"{type(error).__name__}: {error}"
        print(f"{what}: FAILED: {' '.join(words.split())[:300]}", flush=True)
        is_done = False
    else:
        is_done = True
    gc.collect()  # models of the part, before the next one makes its own
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return is_done


def main() -> None:
    """Measure what the command line asks for; ends with 1 where a part failed, with 130 at Ctrl-C, 143 at SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _main()
    except KeyboardInterrupt:
        print("stopped: what was measured until then is kept", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(DEFAULT), help=f"of {','.join(PARTS)}")
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--output", type=Path, help="a folder for the file and the page")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    parts = [name for name in options.parts.split(",") if name]
    if not parts:
        parser.error(f"no part is named; choose of {','.join(PARTS)}")
    if wrong := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(wrong))}; choose of {','.join(PARTS)}")
    if options.size == "toy" and options.output is None:
        parser.error("what is measured at toy sizes is no report: give it a folder with --output (make: OUTPUT=folder)")
    from transformers.utils import logging

    from chunkplan_runtime.devices import device_name, find_device

    logging.set_verbosity_error()
    device = find_device(options.device)
    if device.type == "cpu" and options.size == "full":
        parser.error("there is no GPU; --size toy --output FOLDER runs anywhere")
    report = Report(device, device_name(device), options.output, toy=options.size == "toy")
    failed = []
    for name in parts:
        started = time.perf_counter()
        if not attempt(name, partial(PARTS[name], report)):
            failed.append(name)
        print(f"{name}: done after {time.perf_counter() - started:.0f} s", flush=True)
    report.write()
    print(f"written: {report.path} and {report.page}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
