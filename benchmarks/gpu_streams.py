"""How long streams of a GPU are at work while something runs, and at what rate page-locked memory is taken."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from chunkplan_runtime.devices import new_host_memory, synchronize

Row = dict[str, Any]


class Work(NamedTuple):
    """A kernel or a copy: on which stream, and when, in ns."""

    name: str
    stream: int
    start: int
    duration: int


def streams_at_work(device: torch.device, do: Callable[[], object]) -> Row:
    """Seconds that streams are at work while `do` is done; on a CPU its threads stand for streams."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        do()
        synchronize(device)
    results: Any = found.profiler
    events = (each for each in results.kineto_results.events() if not each.is_user_annotation())
    return at_work(
        Work(each.name(), each.device_resource_id(), each.start_ns(), each.duration_ns())
        for each in events
        if each.device_type().name == device.type.upper()
    )


def at_work(found: Iterable[Work]) -> Row:
    """Seconds of the stream that runs most kernels, and of copies on others; kernels there and pageable copies too."""
    works = list(found)
    kernels: defaultdict[int, int] = defaultdict(int)
    for each in works:
        kernels[each.stream] += 0 if each.name.startswith("Mem") else each.duration
    main = max(kernels, key=kernels.__getitem__)
    span = max(each.start + each.duration for each in works) - min(each.start for each in works)
    on_main = sum(each.duration for each in works if each.stream == main)
    others = [each for each in works if each.stream != main]
    times = {
        "in all": span,
        "kernels and copies of the main stream": on_main,
        "main stream idle": span - on_main,
        "copies to the host": sum(each.duration for each in others if "DtoH" in each.name),
        "copies to the GPU": sum(each.duration for each in others if "HtoD" in each.name),
        "kernels beside": sum(kernels.values()) - kernels[main],
        "pageable copies": sum(each.duration for each in works if "Pageable" in each.name),
    }
    return {f"{name}, s": round(nanoseconds / 1e9, 4) for name, nanoseconds in times.items()}


def measure_host_memory(device: torch.device, *, toy: bool, add: Callable[[Row], None]) -> None:
    """Add a row with the rate at which page-locked memory is taken, as pages of keys and values take theirs."""
    number, size = (2, 1 << 10) if toy else (32, 1 << 24)
    synchronize(device)  # until it is there
    started = time.perf_counter()
    held = [new_host_memory((size,), torch.uint8, device) for _ in range(number)]
    seconds = time.perf_counter() - started
    add({"tensors": len(held), "bytes of each": size, "GB/s": round(number * size / seconds / 1e9, 3)})
