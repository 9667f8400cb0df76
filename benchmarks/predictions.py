"""Predictions beside what was measured on a GPU, of chunks and of steps, and what terms of the cost model are worth.

    python benchmarks/predictions.py  # of the profile h200, beside benchmarks/predictions_h200.json
    python benchmarks/predictions.py --measured FILE --hardware NAME  # a file of `make gpu-report`, of an H200
    python benchmarks/predictions.py --measured FILE --fit            # writes what is fitted to it into the profile

A profile is fitted to rates and chunks, never to steps. "without" a term, the rest is fitted again.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gpu_plans import FOLDER, PLANS

from chunkplan.cost.calibrate import FITTED, ChunkTime, DeviceRates, fit, predicted_ns
from chunkplan.cost.durations import attention_pairs_of, durations
from chunkplan.cost.hardware import AttentionRates, Hardware, load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.operations import KEPT_ATTENTION, OPS
from chunkplan.planfile.load import load_plan

MEASURED = Path(__file__).parent / "predictions_h200.json"
PROFILES = Path(__file__).parents[1] / "chunkplan" / "cost" / "profiles"

#: Layers of a 7B that the chunks ran through.
LAYERS = 4

_CHUNK = tuple(field.name for field in fields(ChunkTime))

Array = npt.NDArray[np.float64]
Document = dict[str, Any]


class Errors(NamedTuple):
    """Predicted over measured time, less 1: of chunks [n, 2] (forward for keys, training), of both, of steps."""

    chunks: Array
    whole_chunks: Array
    steps: Array


def chunk_times(document: Document) -> list[ChunkTime]:
    """The chunks that were timed."""
    rows = ({name: row[name] for name in _CHUNK} for row in document["calibrate"]["chunks"])
    return [ChunkTime(**row | {"segments": tuple(row["segments"])}) for row in rows]


def fitted(document: Document, simplify: Callable[[Hardware], Hardware] = lambda hardware: hardware) -> Hardware:
    """The profile that is nearest to all chunks that ran as layers are, of those without what `simplify` takes out."""
    rates = document["calibrate"]["rates"]
    attention = tuple(AttentionRates(**each) for each in rates["attention"])
    is_plain = [not row.get("compile") for row in document["calibrate"]["chunks"]]
    cost, _ = fit(
        [chunk for chunk, plain in zip(chunk_times(document), is_plain, strict=True) if plain],
        DeviceRates(**rates | {"attention": attention}),
        shape=_first_layers(),
        precision="bf16",
        base=load_hardware("a100"),  # whose ramps and kernels are estimates for all GPUs
        name="fitted",
        simplify=simplify,
    )
    return cost.hardware


def errors(document: Document, hardware: Hardware) -> Errors:
    """How far predictions on `hardware` are off."""
    chunks = chunk_times(document)
    measured = np.array([(chunk.forward_kv_ns, chunk.train_ns) for chunk in chunks])
    costs = (
        CostModel(shape=_first_layers(), hardware=hardware, compile=row.get("compile", False))
        for row in document["calibrate"]["chunks"]
    )
    predicted = np.concatenate([predicted_ns(cost, [chunk]) for cost, chunk in zip(costs, chunks, strict=True)])
    steps = np.array([step_seconds(step, hardware) / step["seconds"] for step in document["steps"]])
    return Errors(predicted / measured - 1, predicted.sum(1) / measured.sum(1) - 1, steps - 1)


def step_seconds(row: Document, hardware: Hardware) -> float:
    """What a step of a plan of benchmarks/gpu_plans/ is predicted to take on one GPU: the sum of its actions."""
    changes = {"kv_offload": row["kv_offload"], "compile": row.get("compile", False)}
    cost = replace(PLANS[row["plan"]].cost(), hardware=hardware, **changes)
    [step] = (each for each in load_plan(FOLDER / row["plan"]).iter_steps() if each.step == row["step"])
    [chunks], [actions] = step.chunks.values(), step.actions.values()
    segments = ([(each.end - each.start, each.start) for each in chunk.segments] for chunk in chunks)
    pairs = [float(attention_pairs_of(*np.array(each).T, cost.shape.attention_patterns).sum()) for each in segments]
    tokens = np.array([chunk.num_tokens for chunk in chunks])
    kept = np.array([KEPT_ATTENTION.index(chunk.kept_attention) for chunk in chunks], np.int8)
    times = durations(tokens, np.array(pairs), cost.rates, (cost.shape.num_layers,), None, kept)[:, 0]
    place = {chunk.chunk_id: number for number, chunk in enumerate(chunks)}
    return sum(int(times[OPS.index(each.op), place[each.chunk_id]]) for each in actions) / 1e9


def _first_layers() -> Any:
    return PLANS["7b-lora-32k"].cost().shape.first(LAYERS)


def with_rates(text: str, hardware: Hardware) -> str:
    """The text of a profile with the fitted numbers of `hardware`; what comments say is for people to look at."""
    known = {(each.kernel, each.head_size): each for each in hardware.attention}

    def with_numbers(text: str, of: Hardware | AttentionRates) -> str:
        lines = text.splitlines()
        for place, line in enumerate(lines):
            entry, hash_sign, comment = line.partition("#")
            if (name := entry.partition(" ")[0]) in FITTED and name != "fp32_flops":  # which is measured alone
                value = getattr(of, name)
                shown = f"{value / 1e12:.3g}e12" if value > 1e11 else f"{round(float(f'{value:.3g}')):_}"
                lines[place] = f"{name} = {shown}".ljust(len(entry)) + hash_sign + comment
        return "\n".join(lines) + "\n"

    head, *tables = text.split("[[attention]]\n")
    entries = [tomllib.loads(table) for table in tables]
    found = [known[each["kernel"], each["head_size"]] for each in entries]
    return "[[attention]]\n".join(map(with_numbers, (head, *tables), (hardware, *found)))


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
    return replace(hardware, attention=tuple(each for each in hardware.attention if each.head_size == 128))


def one_kernel(hardware: Hardware) -> Hardware:
    """Chunks of several sequences are attended to by the same kernel as others."""
    first = hardware.attention[0].kernel
    return replace(hardware, attention=tuple(each for each in hardware.attention if each.kernel == first))


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
    "a kernel for several sequences": one_kernel,
    "the host hidden, not added": added_host,
    "the host": no_host,
    "all of these": plain,
}


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    document = json.loads(options.measured.read_text())
    if missing := {"calibrate", "steps"} - document.keys():
        parser.error(
            f"{options.measured} has no part {', '.join(sorted(missing))}: make gpu-report PARTS=calibrate,steps"
        )
    if others := {step.get("plan", "?") for step in document["steps"]} - PLANS.keys():
        parser.error(f"{options.measured} has steps of plans that are not in {FOLDER}: {', '.join(sorted(others))}")
    if options.fit:
        profile = PROFILES / f"{options.hardware}.toml"
        profile.write_text(with_rates(profile.read_text(), fitted(document)))
    hardware = load_hardware(options.hardware)
    found = errors(document, hardware)
    print("| step | measured, s | predicted | off by |\n| --- | --- | --- | --- |")
    for step, off in zip(document["steps"], found.steps, strict=True):
        words = f"{step['plan']}, {step['tokens']:,} tokens" + ", keys on the host" * step["kv_offload"]
        words += ", compiled" * step.get("compile", False)
        print(f"| {words} | {step['seconds']:.2f} | {step['seconds'] * (1 + off):.2f} | {off:+.1%} |")
    print("\n| chunk, tokens | forward, ms | off by | training, ms | off by | both, off by |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = zip(chunk_times(document), document["calibrate"]["chunks"], found.chunks, found.whole_chunks, strict=True)
    for chunk, row, (forward, train), both in rows:
        words = f"{chunk.num_tokens:,}" + (f" of {len(chunk.segments)}" if len(chunk.segments) > 1 else "")
        words += f" after {chunk.prefix_tokens:,}" if chunk.prefix_tokens else ""
        words += ", compiled" * row.get("compile", False)
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
