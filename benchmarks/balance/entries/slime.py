"""slime: `build_dp_schedule` with its FLOPs of each micro-batch, `balance_data`."""

from types import SimpleNamespace

from slime.utils.dp_schedule import build_dp_schedule

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "slime"


def plan(step: Step) -> Plan:
    """Plan one rollout batch, each sample a rollout."""
    shape = step.cost.shape
    layer = shape.kinds[0]
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=step.cap, micro_batch_size=None,
        balance_data=True, balance_by_flops=False,
        hidden_size=shape.hidden_size, ffn_hidden_size=layer.mlp_width, num_layers=shape.num_layers,
        num_attention_heads=layer.num_query_heads, num_query_groups=layer.num_kv_heads,
        kv_channels=layer.query_width // layer.num_query_heads, q_lora_rank=None,
        vocab_size=shape.vocab_size, num_experts=None,
    )  # fmt: skip
    parallel = {"dp_size": step.ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    count = len(step.lengths)
    samples, places, _, _ = build_dp_schedule(
        args, parallel, step.lengths, global_batch_size=count, rollout_indices=list(range(count))
    )
    return [
        [[samples[rank][place] for place in places[rank][index]] for rank in range(step.ranks)]
        for index in range(len(places[0]))
    ]
