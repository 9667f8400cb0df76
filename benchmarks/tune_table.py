"""The table that `tune` is held against: the time of the best choice of `--thorough` for each of its cases.

    python benchmarks/tune_table.py                 # adds the cases that are missing, the quickest first; hours in all
    python benchmarks/tune_table.py --fast          # prints what `tune` finds of the cases that are in the table

Lengths are random sequences of two mixtures and all of sample_data: `tune_lengths.npz`. The table is
`tune_table.json`: a row has its case, the seconds of a step, the choice, the processor seconds and the commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chunkplan.arrays import Int32Array
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.shape import QWEN2_5_7B, ModelShape
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import Tuning, tune

HERE = Path(__file__).parent
LENGTHS, TABLE = HERE / "tune_lengths.npz", HERE / "tune_table.json"

#: Every second ChunkSize of the default ones, and all Ks; and fewer of both for more than a node of GPUs, where a
#: thorough search of all takes an hour.
CHUNK_SIZES, KS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072), (1, 2, 4, 8, 16, 32)
FEW_CHUNK_SIZES, FEW_KS = (2048, 8192, 16384, 65536), (1, 4)


class Case(NamedTuple):
    """Lengths by their name, GPUs, a model by its name, and the rank of its adapters, 0 for none."""

    data: str
    gpus: int
    model: str
    lora_rank: int


def _llama(hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, *, tied: bool = False) -> ModelShape:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return shape_of_config(config, "")


MODELS = {
    "1B": _llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "7B": QWEN2_5_7B,
    "32B": _llama(5120, 64, 40, 8, 27648, 152064),
    "70B": _llama(8192, 80, 64, 8, 28672, 128256),
}

CASES = [
    Case(data, gpus, model, rank)
    for model, gpus, rank in (
        ("7B", 8, 0),
        ("1B", 8, 0),
        ("7B", 8, 16),
        ("7B", 32, 0),
        ("70B", 32, 16),
        ("70B", 64, 0),
        ("7B", 256, 0),
        ("32B", 8, 16),
    )
    for data in ("sample", "lmsys_like", "long_sft")
]


def options_of(case: Case) -> TuneOptions:
    """What a case tunes for."""
    hardware = load_hardware("h100")
    return TuneOptions(
        shape=MODELS[case.model],
        hardware=hardware,
        gpu_memory=hardware.memory_bytes,
        gpus=case.gpus,
        lora_rank=case.lora_rank,
        chunk_sizes=CHUNK_SIZES if case.gpus <= hardware.gpus_per_node else FEW_CHUNK_SIZES,
        ks=KS if case.gpus <= hardware.gpus_per_node else FEW_KS,
    )


def lengths_of(case: Case) -> Int32Array:
    """The lengths of a case, int32 [n]."""
    with np.load(LENGTHS) as lengths:
        found: Int32Array = lengths[case.data]
    return found


def run(case: Case, folder: Path, **changes: Any) -> tuple[Tuning, float]:
    """Tune a case with `changes` of its options: what was found, and the processor seconds that it took."""
    path = folder / f"{case.data}.npy"
    np.save(path, lengths_of(case))
    began = time.process_time()
    return tune(path, replace(options_of(case), **changes)), time.process_time() - began


def row_of(case: Case, found: Tuning, seconds: float, commit: str) -> dict[str, Any]:
    """A row of the table."""
    best = found.best
    setting = [*best.layout, best.config.chunk_size, best.config.k, best.config.schedule, best.config.cp]
    saving = [best.cost.checkpointing, best.cost.kv_offload, best.cost.sharding, best.config.split]
    return {
        **case._asdict(),
        "step_seconds": round(best.step_ns / 1e9, 6),
        "choice": [*setting, *saving],
        "processor_seconds": round(seconds, 1),
        "commit": commit,
    }


def main() -> None:
    """Add rows to the table, or print what is found of those in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--commit", help="of the code; default: HEAD")
    parser.add_argument("--folder", type=Path, default=Path(), help="where lengths are put")
    given = parser.parse_args()
    commit = given.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else []
    known = {Case(*(row[name] for name in Case._fields)): row for row in rows}
    for case in CASES:
        if given.fast == (case in known):
            found, seconds = run(case, given.folder, thorough=not given.fast)
            row = row_of(case, found, seconds, commit)
            if given.fast:
                row["over thorough"] = round(row["step_seconds"] / known[case]["step_seconds"] - 1, 4)
            else:
                rows.append(row)
                TABLE.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
