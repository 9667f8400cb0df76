"""Predictions beside what was measured on a GPU, of chunks and of steps, and what terms of the cost model are worth.

    python benchmarks/predictions.py  # of the profile h200, beside benchmarks/predictions_h200.json
    python benchmarks/predictions.py --measured FILE --hardware NAME

A profile is fitted to rates and chunks, never to steps. "without" a term, the rest is fitted again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.cost.attention_rates import AttentionRates
from chunkplan.cost.calibrate import fit, predicted_ns
from chunkplan.cost.durations import durations
from chunkplan.cost.hardware import Hardware, load_hardware
from chunkplan.cost.measurements import ChunkTime, DeviceRates
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.operations import OPS

MEASURED = Path(__file__).parent / "predictions_h200.json"

#: Layers that the chunks ran through, and the kernel of their attention.
LAYERS, KERNEL = 4, "torch-cuda"

Array = npt.NDArray[np.float64]
Document = dict[str, Any]


class Errors(NamedTuple):
    """Predicted over measured time, less 1: of chunks [n, 2] (forward for keys, training), of both together, of steps.

    Of a step that was measured several times, the mean counts.
    """

    chunks: Array
    whole_chunks: Array
    steps: Array


def attention_rates(rows: Sequence[Document]) -> tuple[AttentionRates, ...]:
    """The rates of `KERNEL` by size of heads, the largest first; of the model that the chunks ran through where it can.

    That is the first one that a file has of a size.
    """
    rows = [row for row in rows if row["kernel"] == KERNEL and row["sequences"] == 1]

    def of_form(head_size: int, direction: str, queries: int, keys: int) -> float:
        form = {"head_size": head_size, "queries": queries, "keys": keys}
        return 1e12 * next(float(row[f"{direction}_tflops"]) for row in rows if form.items() <= row.items())

    def of_size(size: int) -> AttentionRates:
        many, few = of_form(size, "forward", 8192, 32768), of_form(size, "forward", 2048, 8192)
        return AttentionRates(
            kernel=KERNEL,
            head_size=size,
            forward_blocks=many,
            forward_squares=of_form(size, "forward", 8192, 8192),
            backward_blocks=of_form(size, "backward", 8192, 32768),
            backward_squares=of_form(size, "backward", 8192, 8192),
            ramp_queries=(1 - few / many) / (few / many / 2048 - 1 / 8192),
        )

    return tuple(map(of_size, sorted({row["head_size"] for row in rows}, reverse=True)))


def chunk_times(document: Document) -> list[ChunkTime]:
    """The chunks that were timed."""
    return [ChunkTime(**row | {"segments": tuple(row["segments"])}) for row in document["chunks"]]


def fitted(document: Document, simplify: Callable[[Hardware], Hardware] = lambda hardware: hardware) -> Hardware:
    """The profile that is nearest to all chunks, of profiles without what `simplify` takes out of them."""
    rates = DeviceRates(**document["device"], attention=attention_rates(document["attention"]))
    cost, _ = fit(
        chunk_times(document),
        rates,
        shape=_first_layers(document),
        precision="bf16",
        base=load_hardware("a100"),  # whose ramps and kernels are estimates for all GPUs
        name="fitted",
        simplify=simplify,
    )
    return cost.hardware


def errors(document: Document, hardware: Hardware) -> Errors:
    """How far predictions on `hardware` are off."""
    cost = CostModel(shape=_first_layers(document), hardware=hardware)
    chunks = chunk_times(document)
    measured = np.array([(chunk.forward_kv_ns, chunk.train_ns) for chunk in chunks])
    predicted = predicted_ns(cost, chunks)
    steps = np.array([step_seconds(document, step, hardware) / np.mean(step["seconds"]) for step in document["steps"]])
    return Errors(predicted / measured - 1, predicted.sum(1) / measured.sum(1) - 1, steps - 1)


def step_seconds(document: Document, step: Document, hardware: Hardware) -> float:
    """What a step is predicted to take on one GPU: the sum of its actions."""
    cost = CostModel(
        shape=shape_of_config(document["models"][step["model"]], where=step["model"]),
        hardware=hardware,
        checkpointing=step["checkpointing"],
        lora_rank=step["lora_rank"],
    )
    chunks = [
        ChunkTime(
            segments=tuple(chunk["segments"]),
            prefix_tokens=chunk["prefix_tokens"],
            forward_kv_ns=0,
            train_ns=0,
            spread=0,
        )
        for chunk in step["chunks"]
    ]
    kept = np.array([chunk["keeps_activations"] for chunk in step["chunks"]])
    tokens = np.array([chunk.num_tokens for chunk in chunks])
    pairs = np.array([chunk.attention_pairs(cost.shape.sights) for chunk in chunks])
    times = durations(tokens, pairs, cost.rates, (cost.shape.num_layers,))[:, 0]
    forward, forward_kv, recompute, backward = (times[OPS.index(op)] for op in OPS[:4])
    return float((np.where(kept, forward, forward_kv + recompute) + backward).sum() / 1e9)


def _first_layers(document: Document) -> Any:
    return shape_of_config(document["models"]["Qwen2.5-7B"], where="Qwen2.5-7B").first(LAYERS)


# ---- what terms are worth


def one_direction(hardware: Hardware) -> Hardware:
    """A backward of attention takes two forwards, as the rest of a layer does."""
    return _changed(
        hardware, lambda each: {"forward_blocks": each.both_blocks, "backward_blocks": 1.25 * each.both_blocks}
    )


def no_squares(hardware: Hardware) -> Hardware:
    """A causal square takes as long as a block with as many pairs."""
    names = ("forward", "backward")
    return _changed(
        hardware, lambda each: {f"{name}_squares": each.of_many(getattr(each, f"{name}_blocks")) for name in names}
    )


def no_ramp(hardware: Hardware) -> Hardware:
    """Few queries are as fast as many."""
    return _changed(hardware, lambda each: {"ramp_queries": 1e-6})


def one_size(hardware: Hardware) -> Hardware:
    """All heads are of 128."""
    return replace(hardware, attention=hardware.attention[:1])


def added_host(hardware: Hardware) -> Hardware:
    """What the host takes is added to what the GPU takes."""
    return replace(hardware, kernel_ns=hardware.kernel_ns + hardware.launch_ns, launch_ns=0.0)


def no_host(hardware: Hardware) -> Hardware:
    """The host takes no time."""
    return replace(hardware, launch_ns=0.0)


def plain(hardware: Hardware) -> Hardware:
    """One rate of attention, and what the host takes is added: as profiles were before."""
    return replace(added_host(hardware), attention=())


def _changed(hardware: Hardware, change: Callable[[AttentionRates], dict[str, float]]) -> Hardware:
    return replace(hardware, attention=tuple(replace(each, **change(each)) for each in hardware.attention))


#: By name: what is left out.
TERMS: dict[str, Callable[[Hardware], Hardware]] = {
    "a rate for each direction": one_direction,
    "a rate for causal squares": no_squares,
    "a ramp of queries": no_ramp,
    "a rate for each size of heads": one_size,
    "the host hidden, not added": added_host,
    "the host": no_host,
    "all of these": plain,
}


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args()
    document = json.loads(options.measured.read_text())
    hardware = load_hardware(options.hardware)
    found = errors(document, hardware)
    print("| step | measured, s | predicted | off by |\n| --- | --- | --- | --- |")
    for step, off in zip(document["steps"], found.steps, strict=True):
        seconds = float(np.mean(step["seconds"]))
        print(f"| {step['model']}, {step['name']} | {seconds:.2f} | {seconds * (1 + off):.2f} | {off:+.1%} |")
    print("\n| chunk, tokens | forward, ms | off by | training, ms | off by | both, off by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for chunk, (forward, train), both in zip(chunk_times(document), found.chunks, found.whole_chunks, strict=True):
        words = f"{chunk.num_tokens:,}" + (f" of {len(chunk.segments)}" if len(chunk.segments) > 1 else "")
        words += f" after {chunk.prefix_tokens:,}" if chunk.prefix_tokens else ""
        times = f"{chunk.forward_kv_ns / 1e6:.1f} | {forward:+.1%} | {chunk.train_ns / 1e6:.1f} | {train:+.1%}"
        print(f"| {words} | {times} | {both:+.1%} |")
    like_others = np.array(["note" not in step for step in document["steps"]])
    print("\n| without | forward, worst | training, worst | chunk, worst | chunk, rms | step, worst | step, rms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, simplify in {"nothing": lambda each: each, **TERMS}.items():
        off = errors(document, fitted(document, simplify))
        worst = [np.abs(each).max() for each in (off.chunks[:, 0], off.chunks[:, 1], off.whole_chunks)]
        of_steps = off.steps[like_others]
        steps = [np.abs(of_steps).max(), np.sqrt(np.mean(of_steps**2))]
        cells = [*worst, np.sqrt(np.mean(off.whole_chunks**2)), *steps]
        print(f"| {name} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
