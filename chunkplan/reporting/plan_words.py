"""What a manifest says of a plan, in words that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chunkplan.config.plan import ORDERS_OF_GROUPS, PlanConfig
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.fused import fused_words
from chunkplan.cost.memory import StageMemory
from chunkplan.planfile.manifest import Selection, reduction_us_of
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
    trained_words,
)
from chunkplan.tuning.document_entries import CostModelEntry

if TYPE_CHECKING:
    from chunkplan.planning.memory import LongestSequence
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_report import RankRow
    from chunkplan.summary import PlanSummary

_PARTS = {
    "kept_attention": "kept attention",
    "kv": "KV",
    "kv_gradients": "KV gradients",
    "exchanged": "exchanges",
    "stage_inputs": "stage inputs",
}


@dataclass(frozen=True)
class PlanHeader:
    """What the manifest of a plan says of it: its configuration, its machine, its data, and the reduction of a step."""

    config: PlanConfig
    cost_model: CostModelEntry
    selection: Selection
    exact: bool
    sample: float | None
    content_hash: str
    reduction_us: float | None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> PlanHeader:
        """Take the header from the `manifest` of a plan, which `read_manifest` has checked."""
        return cls(
            config=PlanConfig.from_entries(manifest["config"]),
            cost_model=manifest["predictions"]["cost_model"],
            selection=manifest["selection"],
            exact=manifest["analysis"]["exact"],
            sample=manifest["analysis"].get("sample"),
            content_hash=manifest["content_hash"],
            reduction_us=reduction_us_of(manifest),
        )


def caveats(*, exact: bool, sample: float | None) -> list[str]:
    """List what stands above everything else: that the lengths behind a plan were estimated, or are a sample."""
    said = []
    if sample is not None:
        said.append(f"A SAMPLE of {100 * sample:g}% of the records: a plan to look at, not to train.")
    if not exact:
        said.append("ESTIMATED lengths, from bytes: a plan to look at, not to train.")
    return said


def memory_parts(memory: StageMemory) -> list[tuple[str, int]]:
    """List what takes memory by name, in bytes, most first."""
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    return [(_PARTS.get(name, name), num_bytes) for name, num_bytes in parts if num_bytes]


def may_share_words(config: PlanConfig) -> str:
    """Say what helps where a sequence is too long for its step, if the plan has ranks and an order for it."""
    can = config.dp > 1 and config.schedule in ORDERS_OF_GROUPS and config.balance != "search"
    if config.cp != "off" or not can:
        return ""
    return ". --cp auto shares it among ranks"


def least_words(lower_bound_us: float, unshared_lower_bound_us: float | None, reduction_us: float | None) -> str:
    """Say what any plan takes at least, with the reduction, and one in which ranks share no sequence, if they do."""
    after = reduction_us or 0.0
    words = f"at least {seconds(lower_bound_us + after)}"
    if unshared_lower_bound_us is None:
        return words
    return f"{words}, and {seconds(unshared_lower_bound_us + after)} if none were shared"


def rank_time_words(row: RankRow) -> list[str]:
    """Say which shares of its time a rank is busy, in exchange with others, waiting, and in the reduction."""
    times = (row.busy_us, row.exchange_us, row.waiting_us, row.reduction_us)
    whole = max(sum(each or 0.0 for each in times), 1e-30)
    return ["?" if each is None else percent(each / whole) for each in times]


def longest_words(longest: Sequence[LongestSequence]) -> str:
    """Say how long a sequence may be, by how many ranks share it; nothing where what else is in a step decides."""
    if not longest:
        return ""
    alone, *shared = longest
    if alone.num_tokens is None:
        return "whatever else is in a step, sequences of any length fit"
    one = f"sequences of up to {alone.num_tokens:,} tokens fit" if alone.num_tokens else "no sequence fits on one rank"
    words = [f"by {each.num_ranks:,} ranks {tokens_words(each.num_tokens)}" for each in shared]
    return f"whatever else is in a step, {one}{'; shared ' if words else ''}{', '.join(words)}"


def tokens_words(num_tokens: int | None) -> str:
    """Say how many tokens; None: any number."""
    return "any" if num_tokens is None else f"{num_tokens:,}" if num_tokens else "none"


def time_words(predicted_us: float, lower_bound_us: float, reduction_us: float | None) -> str:
    """Say what stages take with the reduction after them, at least that, and which share of it the bound is."""
    after = reduction_us or 0.0
    words = seconds(predicted_us + after)
    words += f" ({seconds(after)} of it adding up gradients)" if after else ""
    least = lower_bound_us + after
    return f"{words}, at least {seconds(least)} ({percent(least / max(predicted_us + after, 1e-30))})"


def machine_words(cost_model: CostModelEntry) -> str:
    """Say which model and GPUs times are predicted for, and how memory is saved."""
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
    """Say which schedule it is, how many layers its stages have, and what a stage may hold."""
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


def overview_rows(summary: PlanSummary, header: PlanHeader, memory: PlanMemory | None) -> list[tuple[str, str]]:
    """List what a plan comes to, by name; `memory` is None where the plan does not describe the model and the GPU."""
    config, cost_model, selection = header.config, header.cost_model, header.selection
    rows = [
        ("ChunkSize, K", f"{summary.chunk_size:,} tokens, {k_words(summary.k, config.k_by_length)}"),
        (
            "dp x pp",
            f"{summary.dp} x {summary.pp}, {schedule_words(config, cost_model['shape']['num_layers'])}",
        ),
        ("steps", _steps(summary)),
        ("tokens", f"{summary.num_tokens:,}, of which {summary.num_target_tokens:,} targets"),
        *selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"]),
        ("chunks", _chunks(summary)),
        ("fewest chunks", _bound(summary)),
        (
            "micro-batches",
            f"{summary.num_sequences:,} of up to {counted(summary.longest_sequence, 'token')} -> "
            f"{summary.num_chunks:,} of up to {summary.chunk_size:,}",
        ),
    ]
    if summary.num_groups:
        rows.append(
            (
                "activations held",
                f"of {counted(summary.peak_retained_tokens, 'token')} at once on a stage; the longest sequence has "
                f"{summary.longest_sequence:,}",
            )
        )
    if memory is not None:
        used = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)} at the fullest moment"
        if memory.memory.kept_attention:
            used += f", {gibibytes(memory.memory.kept_attention)} of it attention of what is run again"
        used += f", {ZERO[memory.sharding]}" if memory.dp > 1 and memory.sharding != "optimizer" else ""
        rows.append(("GPU memory", used + ("" if memory.fits else ": does not fit")))
        if memory.host_bytes:
            rows.append(("host memory", f"{gibibytes(memory.host_bytes)} for each GPU at most"))
    if summary.dp > 1:
        rows.append(("balance", _balance(summary)))
    if summary.num_exceeding_steps:
        rows.append(("too long a sequence", _exceeding(summary, config)))
    if summary.num_shared_sequences:
        rows.append(("shared sequences", _shared(summary)))
    rows += [
        ("recomputed", _recomputed(summary)),
        ("predicted", time_words(summary.predicted_us, summary.lower_bound_us, summary.reduction_us)),
    ]
    return rows


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
    parts = [
        f"{summary.num_standalone - summary.num_zero_loss:,} standalone",
        f"{summary.num_dependent:,} dependent (of {summary.num_groups:,} {of})",
    ]
    if summary.num_zero_loss:
        parts.append(f"{summary.num_zero_loss:,} zero-loss")
    return f"{summary.num_chunks:,}, {percent(summary.token_fill)} full: " + ", ".join(parts)


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


def _balance(summary: PlanSummary) -> str:
    words = f"over all steps the heaviest rank takes {ratio(summary.heaviest_over_mean)} times the mean rank"
    if summary.heaviest_over_work is not None:
        words += f", and {ratio(summary.heaviest_over_work)} times work / dp (forward and backward alone)"
    return words


def _exceeding(summary: PlanSummary, config: PlanConfig) -> str:
    steps = f"{summary.num_exceeding_steps:,} of {counted(summary.num_steps, 'step')}"
    even = "even shared as it is " if summary.num_shared_sequences else ""
    return (
        f"{percent(summary.exceeding_share)} of the imbalance: in {steps} one costs {even}more than a rank's share, "
        f"which no assignment can balance. They take {seconds(summary.exceeding_predicted_us)}, at least "
        f"{seconds(summary.exceeding_lower_bound_us)}{may_share_words(config)}"
    )


def _shared(summary: PlanSummary) -> str:
    words = f"{summary.num_shared_sequences:,}, {percent(summary.shared_work_share)} of the work"
    if summary.unshared_lower_bound_us is None:
        return words
    least = least_words(summary.lower_bound_us, summary.unshared_lower_bound_us, summary.reduction_us)
    return f"{words}; any plan takes {least}"


def _recomputed(summary: PlanSummary) -> str:
    """Say what part of the work is run again and, where chunks keep attention for that, how many do, and where."""
    words = f"{percent(summary.recompute_share)} of the work"
    places = [f"{kept_words(where)} by {number:,}" for where, number in summary.num_kept.items() if number]
    if not places:
        return words
    return f"{words}: {counted(summary.num_recomputed, 'chunk')}, attention kept {' and '.join(places)}"
