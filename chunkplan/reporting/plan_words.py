"""Descriptions of a plan from its manifest, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
    layout_words,
    percent,
    ratio,
    seconds,
    selection_words,
    sharding_words,
    trained_words,
)
from chunkplan.reporting.way_row import schedule_words
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
    return ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in part_sizes(memory) if size >= 2**30 / 20)


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
    where = f"stage {memory.stage} of rank {memory.dp_rank} in step {memory.step}"
    first = f"Fullest GPU: {gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}, on {where}"
    if not memory.fits:
        first += ", does not fit; `chunkplan tune ANALYSIS --gpus N` finds what does"
    longest = longest_words(memory.longest, longest_sequence if memory.fits else 0)
    longest = f"Longest sequence that fits: {longest}; the longest here: {longest_sequence:,}" if longest else ""
    shared = sharding_words(memory.sharding, memory.dp) if memory.dp > 1 else ""
    return [first, *filter(None, (f"GiB: {memory_parts(memory.memory)}", shared, longest))]


def longest_words(longest: Sequence[LongestSequence], held: int = 0) -> str:
    """Return the longest sequence that fits by number of ranks that share it; "" where other chunks decide.

    `held`: tokens of the longest that a plan has which fits. What is estimated is beside the fullest chunks of others.
    """
    if longest and longest[-1].num_tokens is not None:
        longest = [*longest[:-1], replace(longest[-1], num_tokens=max(longest[-1].num_tokens, held))]
    if longest and longest[0].num_tokens is None:
        return "any"
    return ", ".join(
        f"{'any' if each.num_tokens is None else f'{each.num_tokens:,}' if each.num_tokens else 'none'}"
        f"{' tokens' if each.num_ranks == 1 and each.num_tokens else ''} on {counted(each.num_ranks, 'rank')}"
        for each in longest
    )


def time_words(total_us: float, reduction_us: float | None, num_steps: int, num_tokens: int) -> str:
    """Return the time of all steps and of one, the tokens a second, and the share of the reduction."""
    words = (
        f"{seconds(total_us / num_steps)} a step, {seconds(total_us)} in all" if num_steps > 1 else seconds(total_us)
    )
    words += f", {num_tokens / max(total_us / 1e6, 1e-30):,.0f} tokens/s"
    share = (reduction_us or 0.0) / max(total_us, 1e-30)
    return f"{words}; {percent(share)} of it to sum gradients" if share >= 0.001 else words


def machine_words(cost_model: CostModelEntry) -> str:
    """Return the model, GPUs and memory savings that times are predicted for."""
    shape, hardware = cost_model["shape"], cost_model["hardware"]
    words = [f"tensor parallel ({cost_model['tp']})"] if cost_model["tp"] > 1 else []
    if rank := cost_model.get("lora_rank", 0):
        words.append(trained_words(rank, cost_model.get("load_in_4bit", False)))
    words += [cost_model["optimizer"]] if "optimizer" in cost_model else []
    words += fused_words(cost_model.get("fused_kernels", "none"), cost_model.get("compile", False))
    words += checkpointing_words(cost_model["checkpointing"])
    words += ["KV offloaded to CPU"] if cost_model["kv_offload"] else []
    return ", ".join([f"{shape['name']} on {hardware['name']}", *words])


def overview_rows(
    summary: PlanSummary, manifest: Mapping[str, Any], memory: PlanMemory | None
) -> list[tuple[str, str]]:
    """List what a plan comes to, by name; `memory` is None where the plan does not describe the model and the GPU."""
    config, selection = PlanConfig.from_entries(manifest["config"]), manifest["selection"]
    cost_model = manifest["predictions"]["cost_model"]
    tp, num_layers = cost_model["tp"], cost_model["shape"]["num_layers"]
    size = f"{counted(summary.num_sequences, 'sequence')} of up to {counted(summary.longest_sequence, 'token')}"
    rows = [("predicted", time_words(summary.total_us, summary.reduction_us, summary.num_steps, summary.num_tokens))]
    if config.loss != "sft":
        share = percent(summary.extra_forward_us / max(summary.total_us, 1e-30))
        rows.append(("loss", f"{config.loss}: {share} of the time for log-probabilities, by forwards before each step"))
    if memory is not None:
        used = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)} on the fullest GPU"
        used += f", {ZERO[memory.sharding]}" if memory.dp > 1 else ""
        rows.append(("GPU memory", used + ("" if memory.fits else ": does not fit")))
        rows += [("host memory", f"{gibibytes(memory.host_bytes)} a GPU")] if memory.host_bytes else []
        longest = longest_words(memory.longest, summary.longest_sequence) if memory.fits else ""
        rows += [("longest that fits", longest)] if longest else []
    layout = ", ".join([layout_words(config.dp, tp, config.pp), *_stages(config, num_layers)])
    rows += [
        ("GPUs", f"{config.dp * tp * config.pp}: {layout}" if config.dp * tp * config.pp > 1 else f"1: {layout[9:]}"),
        ("ChunkSize, K", f"{summary.chunk_size:,} tokens, {k_words(summary.k, config.k_by_length)}"),
        ("steps", _steps(summary, config)),
        ("data", f"{size}: {summary.num_tokens:,} tokens, {summary.num_target_tokens:,} of them targets"),
        *selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"]),
        ("chunks", _chunks(summary, has_trees=config.share_prefixes)),
    ]
    if config.share_prefixes:
        run, whole = manifest["totals"]["num_run_tokens"], summary.num_tokens
        rows.append(("prefixes", f"shared: {run:,} tokens are run, {percent((whole - run) / whole)} fewer"))
    if summary.num_shared_sequences:
        shared = f"{summary.num_shared_sequences:,}, each run by several ranks: {percent(summary.shared_work_share)}"
        rows.append(("shared sequences", f"{shared} of the work"))
    words = f"{percent(summary.recompute_share)} of the work"
    if kept := [f"{number:,} {kept_words(where)}" for where, number in summary.num_kept.items() if number]:
        kept[0] = kept[0].replace(" ", " keep attention ", 1)
        words += f": {counted(summary.num_recomputed, 'chunk')} run forward twice, of which {' and '.join(kept)}"
    rows.append(("recomputed", words))
    if summary.dp > 1:
        rows.append(("balance", f"the slowest rank has {ratio(summary.heaviest_over_mean)} times the mean rank's work"))
    if summary.num_exceeding_steps:
        rows.append(("too long a sequence", _exceeding(summary, config)))
    return rows


def _stages(config: PlanConfig, num_layers: int) -> list[str]:
    """The schedule, the layers of its stages, and the limit on what a stage may hold."""
    layers = config.layers(num_layers)
    words = [schedule_words(config.schedule)]
    if config.virtual_stages > 1:
        words.append(f"{config.virtual_stages} virtual stages a stage")
    if config.pp > 1:
        each = "each" if config.virtual_stages > 1 else "a stage"
        is_even = len(set(layers)) == 1
        words.append(f"{counted(layers[0], 'layer')} {each}" if is_even else f"layers {','.join(map(str, layers))}")
    if config.memory_tokens is not None:
        words.append(f"activations of {config.memory_tokens:,} tokens a stage at most")
    return words


def _steps(summary: PlanSummary, config: PlanConfig) -> str:
    up_to = "up to " if config.loss != "sft" and summary.num_steps > 1 else ""  # groups come whole
    words = f"{summary.num_steps:,} of {up_to}{counted(min(summary.global_batch, summary.num_sequences), 'sequence')}"
    if not up_to and summary.num_steps > 1 and summary.num_steps * summary.global_batch != summary.num_sequences:
        words += "; the last of an epoch has fewer"
    if summary.num_dropped_sequences:
        words += f"; {counted(summary.num_dropped_sequences, 'sequence')} of short last batches dropped"
    return words


def _chunks(summary: PlanSummary, *, has_trees: bool) -> str:
    words = [f"{summary.num_standalone - summary.num_zero_loss:,} of whole sequences{' or trees' * has_trees}"]
    if summary.num_dependent:
        of = f"{counted(summary.num_groups, 'group')} (trees, long sequences)"
        of = of if has_trees else counted(summary.num_groups, "long sequence")
        words.append(f"{summary.num_dependent:,} parts of {of}")
    words += [f"{summary.num_zero_loss:,} empty"] if summary.num_zero_loss else []
    return f"{summary.num_chunks:,}, {percent(summary.token_fill)} full: {', '.join(words)}"


def _exceeding(summary: PlanSummary, config: PlanConfig) -> str:
    steps = f"{summary.num_exceeding_steps:,} of {counted(summary.num_steps, 'step')}"
    even = "even shared as it is " if summary.num_shared_sequences else ""
    can_share = config.dp > 1 and config.schedule in ORDERS_OF_GROUPS and config.balance != "search"
    can_share &= not config.share_prefixes
    return (
        f"in {steps} one costs {even}more than a rank's share, which no assignment can balance: "
        f"{percent(summary.exceeding_share)} of the imbalance"
    ) + (". --cp auto shares it among ranks" if config.cp == "off" and can_share else "")
