"""Descriptions of a plan from its manifest, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chunkplan.config.plan import ORDERS_OF_GROUPS, PlanConfig
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.fused import fused_words
from chunkplan.cost.memory import StageMemory
from chunkplan.quantities import (
    ZERO,
    counted,
    gibibytes,
    k_words,
    kept_words,
    percent,
    ratio,
    seconds,
    selection_words,
    sharding_words,
    trained_words,
)
from chunkplan.tuning.document_entries import CostModelEntry

if TYPE_CHECKING:
    from chunkplan.planning.memory import LongestSequence
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.summary import PlanSummary

_PARTS = {
    "kept_attention": "kept attention",
    "kv": "KV",
    "kv_gradients": "KV gradients",
    "exchanged": "exchanges",
    "stage_inputs": "stage inputs",
}


def caveats(data: Mapping[str, Any]) -> list[str]:
    """Caveats above every report of `data`, the manifest's entry of an analysis: lengths are estimated, or a sample."""
    words = []
    if data.get("sample") is not None:
        words.append(f"A SAMPLE of {100 * data['sample']:g}% of the records: a plan to look at, not to train.")
    if not data["exact"]:
        words.append("ESTIMATED lengths, from bytes: a plan to look at, not to train.")
    return words


def memory_parts(memory: StageMemory) -> str:
    """List what takes memory by name, in GiB, most first."""
    return ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in part_sizes(memory))


def part_sizes(memory: StageMemory) -> list[tuple[str, int]]:
    """Return names and bytes of what takes memory, most first."""
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    return [(_PARTS.get(name, name), size) for name, size in parts if size]


def memory_words(memory: PlanMemory | None, longest_sequence: int) -> list[str]:
    """Return the memory of the fullest GPU, and the longest sequence that fits; `longest_sequence` is the longest here.

    `memory` is None where the plan does not describe the model and the GPU.
    """
    if memory is None:
        return ["Memory: the plan does not describe the model and the GPU it was made for."]
    first = f"Memory on stage {memory.stage} of rank {memory.dp_rank} in step {memory.step}: "
    first += f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}"
    of_plan = f"the longest here, of {counted(longest_sequence, 'token')}, fits"
    if not memory.fits:
        first, of_plan = f"{first}, does not fit; `chunkplan tune ANALYSIS --gpus N` finds what does", ""
    longest = "; ".join(filter(None, (of_plan, longest_words(memory.longest))))
    shared = sharding_words(memory.sharding, memory.dp) if memory.dp > 1 else ""
    return [first, *filter(None, (memory_parts(memory.memory), shared, f"{longest[:1].upper()}{longest[1:]}"))]


def least_words(lower_bound_us: float, unshared_lower_bound_us: float | None, reduction_us: float | None) -> str:
    """Return the lower bound of any plan, with the reduction, and that of plans without shared sequences."""
    after = reduction_us or 0.0
    words = f"at least {seconds(lower_bound_us + after)}"
    if unshared_lower_bound_us is None:
        return words
    return f"{words}, and {seconds(unshared_lower_bound_us + after)} if none were shared"


def longest_words(longest: Sequence[LongestSequence]) -> str:
    """Return the longest sequence that fits by number of ranks that share it; "" where other chunks decide."""
    if not longest:
        return ""
    alone, *shared = longest
    if alone.num_tokens is None:
        return "whatever else is in a step, sequences of any length fit"
    one = f"sequences of up to {alone.num_tokens:,} tokens fit" if alone.num_tokens else "no sequence fits on one rank"
    words = []
    for each in shared:
        most = "any" if each.num_tokens is None else f"{each.num_tokens:,}" if each.num_tokens else "none"
        words.append(f"by {each.num_ranks:,} ranks {most}")
    return f"whatever else is in a step, {one}{'; shared ' if words else ''}{', '.join(words)}"


def time_words(predicted_us: float, lower_bound_us: float, reduction_us: float | None) -> str:
    """Return the time of a step with its reduction, its lower bound, and the bound's share of it."""
    after = reduction_us or 0.0
    words = seconds(predicted_us + after)
    words += f" ({seconds(after)} of it adding up gradients)" if after else ""
    least = lower_bound_us + after
    return f"{words}, at least {seconds(least)} ({percent(least / max(predicted_us + after, 1e-30))})"


def machine_words(cost_model: CostModelEntry) -> str:
    """Return the model, GPUs and memory savings that times are predicted for."""
    shape, hardware = cost_model["shape"], cost_model["hardware"]
    words = [f"{cost_model['tp']} GPUs a stage"] if cost_model["tp"] > 1 else []
    if rank := cost_model.get("lora_rank", 0):
        words.append(trained_words(rank, cost_model.get("load_in_4bit", False)))
    words += [cost_model["optimizer"]] if "optimizer" in cost_model else []
    words += fused_words(cost_model.get("fused_kernels", "none"), cost_model.get("compile", False))
    words += checkpointing_words(cost_model["checkpointing"], "activation checkpointing")
    words += ["KV offloaded"] if cost_model["kv_offload"] else []
    return ", ".join([f"{shape['name']} on {hardware['name']}", *words])


def schedule_words(config: PlanConfig, num_layers: int) -> str:
    """Return the schedule, the layers of its stages, and the limit on what a stage may hold."""
    layers = config.layers(num_layers)
    words = [config.schedule]
    if config.virtual_stages > 1:
        words.append(f"{config.virtual_stages} virtual stages a stage")
    if config.pp > 1:
        each = "each" if config.virtual_stages > 1 else "a stage"
        is_even = len(set(layers)) == 1
        words.append(f"{layers[0]} layers {each}" if is_even else f"stages of {','.join(map(str, layers))} layers")
    if config.memory_tokens is not None:
        words.append(f"activations of {config.memory_tokens:,} tokens a stage at most")
    return ", ".join(words)


def overview_rows(
    summary: PlanSummary, manifest: Mapping[str, Any], memory: PlanMemory | None
) -> list[tuple[str, str]]:
    """List what a plan comes to, by name; `memory` is None where the plan does not describe the model and the GPU."""
    config, selection = PlanConfig.from_entries(manifest["config"]), manifest["selection"]
    num_layers = manifest["predictions"]["cost_model"]["shape"]["num_layers"]
    batches = f"{summary.num_sequences:,} of up to {counted(summary.longest_sequence, 'token')}"
    rows = [
        ("ChunkSize, K", f"{summary.chunk_size:,} tokens, {k_words(summary.k, config.k_by_length)}"),
        ("dp x pp", f"{summary.dp} x {summary.pp}, {schedule_words(config, num_layers)}"),
        ("steps", _steps(summary)),
        ("tokens", f"{summary.num_tokens:,}, of which {summary.num_target_tokens:,} targets"),
        *selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"]),
        ("chunks", _chunks(summary)),
        ("fewest chunks", _bound(summary)),
        ("micro-batches", f"{batches} -> {summary.num_chunks:,} of up to {summary.chunk_size:,}"),
    ]
    if summary.num_groups:
        held = f"of {counted(summary.peak_retained_tokens, 'token')} at once on a stage"
        rows.append(("activations held", f"{held}; the longest sequence has {summary.longest_sequence:,}"))
    if memory is not None:
        used = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)} at the fullest moment"
        if memory.memory.kept_attention:
            used += f", {gibibytes(memory.memory.kept_attention)} of it attention of what is run again"
        used += f", {ZERO[memory.sharding]}" if memory.dp > 1 and memory.sharding != "optimizer" else ""
        rows.append(("GPU memory", used + ("" if memory.fits else ": does not fit")))
        if memory.host_bytes:
            rows.append(("host memory", f"{gibibytes(memory.host_bytes)} for each GPU at most"))
    if summary.dp > 1:
        words = f"over all steps the heaviest rank takes {ratio(summary.heaviest_over_mean)} times the mean rank"
        if summary.heaviest_over_work is not None:
            words += f", and {ratio(summary.heaviest_over_work)} times work / dp (forward and backward alone)"
        rows.append(("balance", words))
    if summary.num_exceeding_steps:
        rows.append(("too long a sequence", _exceeding(summary, config)))
    if summary.num_shared_sequences:
        words = f"{summary.num_shared_sequences:,}, {percent(summary.shared_work_share)} of the work"
        if summary.unshared_lower_bound_us is not None:
            bounds = summary.lower_bound_us, summary.unshared_lower_bound_us, summary.reduction_us
            words += f"; any plan takes {least_words(*bounds)}"
        rows.append(("shared sequences", words))
    words = f"{percent(summary.recompute_share)} of the work"
    if kept := [f"{kept_words(where)} by {number:,}" for where, number in summary.num_kept.items() if number]:
        words += f": {counted(summary.num_recomputed, 'chunk')}, attention kept {' and '.join(kept)}"
    times = time_words(summary.predicted_us, summary.lower_bound_us, summary.reduction_us)
    return [*rows, ("recomputed", words), ("predicted", times)]


def _steps(summary: PlanSummary) -> str:
    if summary.num_steps == 1:
        words = f"1, of {counted(summary.num_sequences, 'sequence')}"
    else:
        words = f"{summary.num_steps:,}, {counted(summary.global_batch, 'sequence')} each"
        if summary.num_steps * summary.global_batch != summary.num_sequences:
            words += "; an epoch's last has fewer"
    if summary.num_dropped_sequences:
        words += f"; {counted(summary.num_dropped_sequences, 'sequence')} of short last batches dropped"
    return words


def _chunks(summary: PlanSummary) -> str:
    of = "split sequences"
    if summary.num_shared_sequences:
        of = "split or shared sequences; each rank's part of one is a chunk"
    words = f"{summary.num_standalone - summary.num_zero_loss:,} standalone, "
    words += f"{summary.num_dependent:,} dependent (of {summary.num_groups:,} {of})"
    words += f", {summary.num_zero_loss:,} zero-loss" if summary.num_zero_loss else ""
    return f"{summary.num_chunks:,}, {percent(summary.token_fill)} full: {words}"


def _bound(summary: PlanSummary) -> str:
    steps = f"{summary.num_optimal_steps:,} of {counted(summary.num_steps, 'step')} optimal"
    proved = f"{steps}: proved to have the fewest chunks"
    over = summary.chunks_over_bound - 1
    if over == 0:
        return proved
    if summary.dp == 1:
        return f"{proved}; all together {percent(over)} over the bound"
    packing = summary.packing_over_bound - 1
    given = "proved" if packing == 0 else f"but for {percent(packing)}"
    bound = f"{percent(over)} over the bound of any assignment, for balance ({steps})"
    return f"{given}, given what each rank has to run; {bound}"


def _exceeding(summary: PlanSummary, config: PlanConfig) -> str:
    steps = f"{summary.num_exceeding_steps:,} of {counted(summary.num_steps, 'step')}"
    even = "even shared as it is " if summary.num_shared_sequences else ""
    can_share = config.dp > 1 and config.schedule in ORDERS_OF_GROUPS and config.balance != "search"
    return (
        f"{percent(summary.exceeding_share)} of the imbalance: in {steps} one costs {even}more than a rank's share, "
        f"which no assignment can balance. They take {seconds(summary.exceeding_predicted_us)}, at least "
        f"{seconds(summary.exceeding_lower_bound_us)}"
    ) + (". --cp auto shares it among ranks" if config.cp == "off" and can_share else "")
