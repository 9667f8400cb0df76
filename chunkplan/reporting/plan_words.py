"""What a manifest says of a plan, in words that the terminal and the page share."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import split_layers
from chunkplan.cost.memory import StageMemory

_PARTS = {"kv": "KV", "kv_gradients": "KV gradients", "stage_inputs": "stage inputs"}


def caveats(manifest: dict[str, Any]) -> list[str]:
    """What has to be said above everything else: that lengths behind a plan were estimated, or are a sample."""
    said = []
    if sample := manifest["analysis"].get("sample"):
        said.append(f"A SAMPLE of {100 * sample:g}% of the records: a plan to look at, not to train.")
    if not manifest["analysis"]["exact"]:
        said.append("ESTIMATED lengths, from bytes: a plan to look at, not to train.")
    return said


def memory_parts(memory: StageMemory) -> list[tuple[str, int]]:
    """What of it there is, by name, most bytes first."""
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    return [(_PARTS.get(name, name), num_bytes) for name, num_bytes in parts if num_bytes]


def machine_words(cost_model: dict[str, Any]) -> str:
    """The model and the GPUs that times are predicted for, and how memory is saved."""
    shape, hardware = cost_model["shape"], cost_model["hardware"]
    words = [f"{cost_model['tp']} GPUs a stage"] if cost_model["tp"] > 1 else []
    words += ["layers checkpointed"] if cost_model["checkpointing"] == "full" else []
    words += ["KV offloaded"] if cost_model["kv_offload"] else []
    return ", ".join([f"{shape['name']} on {hardware['name']}", *words])


def schedule_words(config: PlanConfig, num_layers: int) -> str:
    """The schedule, the layers of its stages, and what a stage may hold."""
    layers = split_layers(num_layers, config.pp * config.virtual_stages)
    words = [config.schedule]
    if config.virtual_stages > 1:
        words.append(f"{config.virtual_stages} model parts a stage")
    if config.pp > 1:
        even = f"{layers[0]}" if len(set(layers)) == 1 else f"{layers[0]} to {layers[-1]}"
        words.append(f"{even} layers a {'part' if config.virtual_stages > 1 else 'stage'}")
    if config.memory_tokens is not None:
        words.append(f"activations of {config.memory_tokens:,} tokens a stage at most")
    return ", ".join(words)
