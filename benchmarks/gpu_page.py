"""Writes docs/gpu-report.md: every file in benchmarks/measured/ as a section, the newest first.

Parts that a newer file of the same GPU has are those of that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

INTRODUCTION = """\
# What has run on a GPU

Times and memory of steps, attention and chunks, from the files in `benchmarks/measured/`, which have more rows.
`make gpu-report` measures the GPU at hand in minutes and writes this page; it needs torch, transformers and pyarrow,
for adapters peft, nothing of the planner (`benchmarks/gpu_report.py`). Tokens are random, lengths real.

Steps are forwards and backwards with bf16 weights, fp32 master weights and fp32 gradients, without the optimizer.
Predictions are by the profile as shipped then. *Times its work*: over the time of its products and attention at the
rates measured beside it; a forward and a backward of each token, another forward where checkpointing is full."""

ATTENTION = """\
TFLOP/s in bf16, forward / backward, counting what is seen: half of a causal square, all of a block of earlier keys.
`torch-cuda` is PyTorch's FlashAttention-2."""

CHUNKS = """\
Chunks of whole sequences: a forward for keys and values alone, and a forward with a backward, beside the fitted
profile."""

#: Parts with steps, and their titles.
_STEP_PARTS = {
    "steps": "Steps",
    "offload": "Keys and values on the GPU and on the host",
    "long": "A long step",
    "million": "A million tokens",
}

_KERNELS = {"fa2": "torch-cuda", "cudnn gqa": "torch-cudnn"}


def slug(name: str) -> str:
    """What a device's name is in the name of a file: "NVIDIA H200" is h200."""
    return "-".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word != "nvidia")


def page(folder: Path) -> str:
    """The page of all files in `folder`."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    documents.sort(key=lambda document: document["machine"]["date"], reverse=True)
    parts = [INTRODUCTION]
    shown: set[tuple[str, str]] = set()
    for document in documents:
        gpu = slug(document["machine"]["gpu"]).partition("-")[0]
        parts += _section({part: rows for part, rows in document.items() if (gpu, part) not in shown})
        shown |= {(gpu, part) for part in document if part != "machine"}
    return "\n\n".join(parts) + "\n"


def _section(document: Row) -> Iterator[str]:
    machine = document["machine"]
    yield f"## {machine['gpu']}, {machine['date']}"
    about = {name: value for name, value in machine.items() if name not in ("gpu", "date", "sequences") and value}
    yield _fill(", ".join(f"{name} {value}" for name, value in about.items()) + ".")
    if machine.get("sizes") == "toy":
        yield "**At toy sizes: these figures mean nothing.**"
    if rows := document.get("attention_tflops"):
        yield "### Attention"
        yield ATTENTION
        most = max(row.get("q", 0) for row in rows)
        yield _table([_attention(row) for row in rows if row.get("q", most) == most])
    if rows := document.get("probe"):
        yield "### The probe: four layers and the head of a 7B"
        yield _table([_with_work(row, document, row["both ms"] / 1e3) for row in rows])
    for part, title in _STEP_PARTS.items():
        if rows := [row for row in document.get(part, []) if "plan" in row]:
            yield f"### {title}"
            names = ("plan", "ckpt", "kv_offload", "step", "compile")
            last = {tuple(row.get(name) for name in names): row for row in rows}
            done = [_step(row) for row in last.values()]  # what ran first warmed up
            yield _table([_with_work(row, document, row["s"]) for row in done])
        if rows := [row for row in document.get(part, []) if "streams of" in row]:
            yield _table(rows)
    if found := document.get("calibrate"):
        yield "### Chunks, and the profile fitted to them"
        yield _fill(f"{found['model']}. {CHUNKS}")
        yield _table([_chunk(row) for row in found["chunks"] if not row["prefix_tokens"] and len(row["segments"]) == 1])
        yield _table([_rates(found["fitted"])])
    if rows := document.get("trainer"):
        yield "### The trainer"
        yield _table([_trainer(row) for row in rows])
    if rows := document.get("nccl"):
        yield "### Several processes"
        for kind in ("collective", "trainer"):
            if some := [row for row in rows if kind in row]:
                yield _table(some)
    if rows := document.get("tests"):
        yield "### Tests"
        yield _table(rows)


def _attention(row: Row) -> Row:
    if "packed" in row:
        size = {"heads / KV heads x size": row["H"], "tokens": f"{row['packed']} packed", "keys": "", "form": "causal"}
    else:
        form = "causal" if row["causal"] else "earlier keys"
        size = {"heads / KV heads x size": row["H"], "tokens": row["q"], "keys": row["k"], "form": form}
    for name in row:
        if name.endswith(" fwd") and "expanded" not in name:
            kernel = name.removesuffix(" fwd")
            size[_KERNELS.get(kernel, kernel)] = f"{row[name]} / {row[f'{kernel} bwd']}"
    return size


def _step(row: Row) -> Row:
    found = {
        "plan": row["plan"],
        "checkpointing": row["ckpt"],
        "compiled": row.get("compile", False),
        "keys on": "host" if row["kv_offload"] else "GPU",
        "tokens": row["tokens"],
        "chunks": row["chunks"],
        "s": row["seconds"],
    }
    for name, seconds in row.items():
        if name.startswith("predicted s, "):
            found[name] = f"{seconds} ({seconds / row['seconds'] - 1:+.0%})"
    found |= {"GiB": row["peak_gib"]} if row.get("peak_gib") else {}
    return found | {name: row[name] for name in ("predicted GiB", "done", "work", "head_size") if name in row}


def _with_work(row: Row, document: Row, seconds: float) -> Row:
    """A row with how many times longer it took than what it has to do, in place of the FLOPs of that."""
    found = {name: value for name, value in row.items() if name not in ("work", "head_size")}
    rates = document.get("rates", {})
    if "work" in row and "attention" in rates and "done" not in row:
        attention = next(each for each in rates["attention"] if each["head_size"] == row["head_size"])
        rate_of = {"products": rates["flops"], **attention}
        found["times its work"] = round(seconds / sum(flops / rate_of[name] for name, flops in row["work"].items()), 2)
    return found


def _chunk(row: Row) -> Row:
    found: Row = {"tokens": row["segments"][0]}
    for name in ("forward_kv", "train"):
        measured, fitted = row[f"{name}_ns"] / 1e6, row[f"fitted_{name}_ns"] / 1e6
        what = "forward for keys" if name == "forward_kv" else "forward and backward"
        found[f"{what}, ms"] = round(measured, 1)
        found[f"fitted {what}"] = f"{fitted:.1f} ({fitted / measured - 1:+.0%})"
    return found


def _rates(fitted: Row) -> Row:
    elsewhere = ("peak_flops", "gpu_link_bytes", "node_link_bytes")  # which one GPU does not tell
    return {name: f"{value:.4g}" for name, value in fitted.items() if type(value) is float and name not in elsewhere}


def _trainer(row: Row) -> Row:
    return {
        "step": row["step"],
        "tokens": row["tokens"],
        "s": round(row["seconds"], 2),
        "tokens/s": round(row["tokens_per_second"]),
        "loss": round(row["loss"], 4),
        "peak GiB": round(row["peak_memory_bytes"] / 2**30, 1),
    }


def _table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines: list[Iterable[str]] = [names, ["---"] * len(names)]
    lines += [[_cell(row.get(name, "")) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|")


def _fill(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > 118:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)
