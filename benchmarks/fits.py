"""What fits: the fewest GPUs of a model at 128K tokens, a sequence of a million tokens, and a step of a real mixture.

    python benchmarks/fits.py                         # about 15 minutes on 2 cores
    python benchmarks/fits.py --only fewest           # one part of it
    python benchmarks/fits.py --real lengths.parquet  # a step of lengths of your own too

All of it is predicted, for H100s of which 79 GiB are used, eight a node. Only choices that the trainer runs count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from machine import machine

import chunkplan
from chunkplan.cost.fused import FUSED_KERNELS, FusedKernels
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import UsageError
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import Tuning

Row = dict[str, Any]

GIB = 1 << 30
PARTS = ("fewest", "million", "step")

#: Of their published configs what time and memory go by.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Qwen2.5-32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}

#: Ways to train that memory differs for, as options of `tune`.
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, adamw-8bit": {"optimizer": "adamw-8bit"},
    "LoRA, rank 16": {"lora_rank": 16},
    "LoRA, rank 16, 4 bits": {"lora_rank": 16, "load_in_4bit": True},
}


def options_for(model: str, **given: Any) -> TuneOptions:
    """What to tune a model for; `given` are fields of `TuneOptions`."""
    shape = shape_of_config({**MODELS[model], "rms_norm_eps": 1e-6, "tie_word_embeddings": False}, model)
    return TuneOptions(shape=shape, hardware=load_hardware("h100"), gpu_memory=79 * GIB, **given)


def described(found: Tuning) -> Row:
    """What the trainer would run."""
    best = found.recommended
    assert best is not None
    return {
        "dp x pp": f"{best.layout.dp} x {best.layout.pp}",
        "shared by": best.config.cp,
        "ChunkSize": best.config.chunk_size,
        "K": best.config.k,
        "checkpointing": best.cost.checkpointing,
        "KV": "host" if best.cost.kv_offload else "GPU",
        "shared": best.cost.sharding,
        "GiB": round(best.memory.total / GIB, 1),
        "step s": round(best.step_ns / 1e9, 2),
    }


def tuned(lengths: Path, options: TuneOptions) -> Tuning | None:
    """A tuning whose recommendation can be run, or None where nothing that can be fits."""
    try:
        found = chunkplan.tune(lengths, options)
    except UsageError as error:
        if "nothing fits" not in str(error):
            raise
        return None
    return None if found.recommended is None else found


def measure_fewest(folder: Path, ways: list[str]) -> Iterator[Row]:
    """In each of `ways`, of 1, 2, 4 and so on GPUs the fewest on which a step with a sequence of 128K tokens fits."""
    path = folder / "fewest.npy"
    np.save(path, np.array([1 << 17, *[1000] * 31]))
    for model in ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-70B"):
        for way in ways:
            given = WAYS[way]
            for power in range(7):
                if given.get("load_in_4bit") and power:
                    break  # the trainer runs weights of 4 bits in one process
                try:
                    options = options_for(
                        model, gpus=1 << power, tp=1, chunk_sizes=(2048, 8192), ks=(1,), global_batch=32, **given
                    )
                except UsageError:
                    continue
                if found := tuned(path, options):
                    yield {"model": model, "trained": way, "GPUs": 1 << power} | described(found)
                    break
            else:
                yield {"model": model, "trained": way, "GPUs": None}


def measure_million(folder: Path) -> Iterator[Row]:
    """A sequence of 2^20 tokens of an 8B: alone on one GPU, shared by eight, and by eight on a pipeline too."""
    path = folder / "million.npy"
    np.save(path, np.array([1 << 20]))
    for gpus, given in ((8, {}), (8, {"lora_rank": 16}), (1, {"lora_rank": 16})):
        options = options_for(
            "Llama-3.1-8B", gpus=gpus, tp=1, chunk_sizes=(2048, 4096, 8192), ks=(1, 4), global_batch=8, **given
        )
        found = tuned(path, options)
        row = {"model": "Llama-3.1-8B", "trained": "LoRA, rank 16" if given else "full", "GPUs": gpus}
        yield row | (described(found) if found else {"fits": False})


def measure_step(path: Path, fused: FusedKernels) -> Iterator[Row]:
    """`tune --gpus 8` and `--gpus 32`; the work of a step over its GPUs is what no plan is faster than."""
    for gpus in (8, 32):
        if found := tuned(path, options_for("Qwen2.5-7B", gpus=gpus, tp=1, fused_kernels=fused)):
            best = found.recommended
            assert best is not None
            row = {"lengths": path.stem, "fused": fused, "GPUs": gpus} | described(found)
            row |= {"bubble": round(best.bubble, 3), "gain": None if found.gain is None else round(found.gain, 2)}
            if baseline := found.best_baseline:
                layout = f"{baseline.layout.dp} x {baseline.layout.tp} x {baseline.layout.pp}"
                row |= {"baseline": f"{baseline.name} on {layout}", "its step s": round(baseline.step_ns / 1e9, 2)}
            yield row


def main() -> None:
    """Measure, and print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--way", choices=WAYS, action="append", help="of `fewest`, all by default")
    parser.add_argument("--real", type=Path, action="append", default=[], help="a file with one column of lengths")
    parser.add_argument("--fused-kernels", choices=FUSED_KERNELS, action="append", help="of `step`, none by default")
    given = parser.parse_args()
    parts = given.only or PARTS
    print(json.dumps({"machine": machine("numpy", "numba", "ortools")}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows: list[Iterator[Row]] = []
        if "fewest" in parts:
            rows.append(measure_fewest(folder, given.way or list(WAYS)))
        if "million" in parts:
            rows.append(measure_million(folder))
        if "step" in parts:
            for path in given.real:
                copy = folder / f"{path.stem}.npy"
                np.save(copy, pq.read_table(path).column(0).to_numpy())
                rows += [measure_step(copy, fused) for fused in given.fused_kernels or ("none",)]
        for some in rows:
            for row in some:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
