"""What `tune` chooses for models of about 7B parameters whose layers differ, on the same data and the same GPUs.

    python benchmarks/architectures.py     # a minute on 2 cores

Shapes are those of the published configs (`tests/support/published_models.py`); times are predicted, for eight H100s as
two ranks of four stages. The choice is the fastest that the trainer can run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from lengths import lengths

sys.path.insert(0, str(Path(__file__).parents[1]))

import chunkplan
from chunkplan.cost.activations import runs_of
from chunkplan.cost.durations import whole_pairs, work_ns
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.shape import ModelShape
from chunkplan.cost.token_bytes import KV_GRADIENT_BYTES, kv_elements_per_token, token_bytes
from chunkplan.quantities import k_words
from chunkplan.tuning.options import TuneOptions
from tests.support.published_models import MODELS, of_type

#: OLMo 3 7B is OLMo 2 7B but for its windows.
OLMO_3 = of_type("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096)
SHAPES = {
    "OLMo 2 7B": MODELS["OLMo-2-7B"].config,
    "OLMo 3 7B": OLMO_3,
    "OLMo-Hybrid 7B": MODELS["OLMo-Hybrid-7B"].config,
    "Nemotron-H 8B": MODELS["Nemotron-H-8B"].config,
    "Mamba-Codestral 7B": MODELS["Mamba-Codestral-7B"].config,
}
LENGTHS = (4096, 65536, 262144)
CHUNK_SIZE = 8192


def row(name: str, shape: ModelShape, data: Path) -> str:
    """A row of the table: times of a token by the length of its sequence, what is kept of a sequence, the choice."""
    hardware = load_hardware("h100")
    cost = CostModel(shape=shape, hardware=hardware)
    tokens = np.array(LENGTHS)
    times = work_ns(cost, tokens, whole_pairs(cost, tokens)) / tokens / 1e3
    of_token = token_bytes(cost, runs_of(cost, [shape.num_layers]), CHUNK_SIZE)
    kept = of_token.kv + kv_elements_per_token(cost, shape.split([shape.num_layers])[0]) * KV_GRADIENT_BYTES
    chosen = chunkplan.tune(data, TuneOptions(shape=shape, hardware=hardware, dp=2, pp=4)).recommended
    assert chosen is not None
    layers = ",".join(map(str, chosen.config.layers(shape.num_layers)))
    cells = [
        name,
        *(f"{time:.0f} us" for time in times),
        f"{kept / 1024:.0f} KiB",
        f"{chosen.config.chunk_size:,}, {k_words(chosen.config.k, chosen.config.k_by_length)}",
        "no" if chosen.config.cp == "off" else "yes",
        layers,
        f"{chosen.step_ns / 1e9:.2f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    heads = ["model", *(f"a token of {length // 1024}K" for length in LENGTHS), "kept of a token"]
    heads += ["ChunkSize, K", "sequences are shared", "layers", "step"]
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "lengths.npy"
        np.save(data, lengths("long-tail", 20_000, cap=None))
        for name, config in SHAPES.items():
            print(row(name, shape_of_config(config, name), data), flush=True)


if __name__ == "__main__":
    main()
