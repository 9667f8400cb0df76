"""Rates of a model on hardware, and the profiles and manifests that they are read from."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.cost.durations import attention_pairs_of, balance_layers, durations, recompute_ns, work_ns
from chunkplan.cost.hardware import KERNELS, SHIPPED, AttentionRates, Hardware, load_hardware
from chunkplan.cost.model import SHARDINGS, CostModel
from chunkplan.cost.optimizers import tokens_at_once
from chunkplan.cost.rates import GradientSumTime
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import DataError, UsageError
from chunkplan.layers import split_layers
from chunkplan.operations import OPS
from tests.support.places import GOLDEN
from tests.support.plain import PLAIN, plain_cost

PROFILES = SHIPPED
ON_PCIE = ("a6000", "l4", "l40s", "rtx4090", "rtx5090")
LAYER_FLOPS = 2 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
[_DENSE] = QWEN2_5_7B.kinds
MIXTURE = replace(QWEN2_5_7B, name="mixture", kinds=(replace(_DENSE, all_mlp_width=8 * 18944, experts_per_token=1),))


def profile_text(name: str = "h100") -> str:
    return (files("chunkplan.cost") / "profiles" / f"{name}.toml").read_text()


# ---- hardware


@pytest.mark.parametrize("name", PROFILES)
def test_shipped_profiles_sustain_less_than_their_data_sheets(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.fp32_flops < hardware.flops < hardware.peak_flops
    assert hardware.attention_flops < hardware.flops
    assert hardware.host_bytes < hardware.copy_bytes and hardware.gpu_link_bytes < hardware.copy_bytes
    assert (hardware.gpu_link_bytes < hardware.host_bytes) == (name in ON_PCIE)
    assert hardware.node_link_bytes < hardware.gpu_link_bytes
    assert hardware.reserved_bytes < hardware.memory_bytes / 10


def test_a_profile_of_ones_own_is_a_file_like_the_shipped_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(profile_text().replace('"h100"', '"mine"').replace("627e12", "600e12"))
    assert load_hardware(path) == replace(load_hardware("h100"), name="mine", flops=600e12)


def test_an_unknown_profile_is_a_usage_error_that_names_the_known_ones() -> None:
    assert load_hardware("H100") == load_hardware("h100")
    for name in ("b301", "profiles/none.toml", "", "bad\0name"):
        with pytest.raises(UsageError) as caught:
            load_hardware(name)
        assert all(known in caught.value.hint for known in PROFILES)


OPTIONAL = ("launch_ns", "attention")


@pytest.mark.parametrize("entry", [field.name for field in fields(Hardware) if field.name not in OPTIONAL])
def test_a_profile_without_an_entry_or_with_a_strange_one_names_it(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    lines = profile_text().splitlines()
    others = "\n".join(line for line in lines if not line.startswith(f"{entry} "))
    broken = ["", f"{entry} = -1", f"{entry} = nan", f"{entry} = inf", f"{entry} = true", f"{entry} = []"]
    for line in [*broken, f"{entry} = {10**400}", f"{entry} = 2024-01-01"]:
        path.write_text(f"{line}\n{others}\n")
        with pytest.raises(DataError, match=f"`{entry}` is") as caught:
            load_hardware(path)
        assert caught.value.where == str(path)


def test_a_profile_of_an_earlier_release_is_read_as_it_was_meant() -> None:
    """With one rate of attention, a backward of which is two forwards, and nothing that the host does beside."""
    assert (PLAIN.launch_ns, PLAIN.attention) == (0.0, ())
    assert not {*OPTIONAL} & PLAIN.to_dict().keys()
    rates = plain_cost().rates
    assert (rates.launch, rates.mask, rates.ramp_queries) == (0.0, 0.0, 0.0)
    assert rates.backward == (2 * rates.pair, 0.0)


@pytest.mark.parametrize("entry", [field.name for field in fields(AttentionRates)])
def test_a_strange_rate_of_attention_is_named_with_its_place(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    before, first, second = profile_text().split("[[attention]]\n")
    others = "".join(line for line in second.splitlines(True) if not line.startswith(f"{entry} "))
    for line in ("", f"{entry} = -1\n", f"{entry} = nan\n", f"{entry} = []\n", f"{entry} = true\n"):
        path.write_text(f"{before}[[attention]]\n{first}[[attention]]\n{line}{others}")
        with pytest.raises(DataError, match=rf"`attention\[1\]\.{entry}` is"):
            load_hardware(path)
    path.write_text(profile_text() + "flops = 1\n")
    with pytest.raises(DataError, match="`flops` is unknown, expected kernel, head_size, forward_blocks"):
        load_hardware(path)
    for line in ("attention = 3\n", "launch_ns = 0\n", "launch_ns = inf\n", 'attention = "torch-cuda"\n'):
        path.write_text(line + (GOLDEN / "h100.toml").read_text())
        with pytest.raises(DataError, match=rf"`{line.split()[0]}` is"):
            load_hardware(path)


def test_a_table_of_attention_without_meaning_is_refused_with_its_place(tmp_path: Path) -> None:
    """A kernel that there is not, and a second table of one kernel and size of heads."""
    path = tmp_path / "mine.toml"
    before, first, second = profile_text().split("[[attention]]\n")
    for kernel in ("no-such-kernel", "", "auto", "Torch-Cuda"):
        strange = second.replace('"torch-cuda"', f'"{kernel}"')
        path.write_text("[[attention]]\n".join((before, first, strange)))
        with pytest.raises(DataError, match=rf"`attention\[1\]\.kernel` is .*, expected {' or '.join(KERNELS)}"):
            load_hardware(path)
    for tables in ((first, first), (first, second, first)):
        path.write_text("\n[[attention]]\n".join((before, *tables)))
        place = len(tables) - 1
        with pytest.raises(DataError, match=rf"`attention\[{place}\]` is a second table of torch-cuda with head_size "):
            load_hardware(path)
    for kernel in KERNELS:
        path.write_text("[[attention]]\n".join((before, first, second.replace('"torch-cuda"', f'"{kernel}"'))))
        assert load_hardware(path).attention[1].kernel == kernel


def test_an_entry_that_a_profile_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("flop = 1\n" + profile_text())
    with pytest.raises(DataError, match="`flop` is unknown, expected name, peak_flops, flops"):
        load_hardware(path)


@pytest.mark.parametrize("content", [b"flops", b"\xff\xfe", b"a = 1\na = 2", b"x = " + b"[" * 100_000])
def test_a_profile_that_is_no_toml_is_a_data_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a TOML file"):
        load_hardware(path)


# ---- rates


def test_the_default_is_qwen2_5_7b_on_h100s() -> None:
    assert (CostModel().shape, CostModel().hardware) == (QWEN2_5_7B, load_hardware("h100"))


@pytest.mark.parametrize("name", PROFILES)
def test_a_token_takes_its_products_and_up_to_a_third_more(name: str) -> None:
    hardware = load_hardware(name)
    products = LAYER_FLOPS / hardware.flops * 1e9
    most = 1.45 if name in ON_PCIE else 1.33  # their memory is slower beside their products
    assert products < plain_cost(hardware=hardware).rates.token < most * products


def test_attention_takes_four_flops_for_each_pair_and_query_element() -> None:
    hardware = PLAIN
    pair = plain_cost().rates.pair
    assert pair == pytest.approx(4 * 3584 / 2 / hardware.attention_flops * 1e9)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_divides_attention_evenly_and_the_rest_less_than_evenly(tp: int) -> None:
    one, many = plain_cost().rates, plain_cost(tp=tp).rates
    assert many.pair == pytest.approx(one.pair / tp)
    assert many.head == pytest.approx(one.head / tp)
    assert many.link_token == pytest.approx(one.link_token / tp)
    assert one.token / tp < many.token < one.token
    assert one.chunk / tp < many.chunk < one.chunk


def test_collectives_are_four_rings_a_layer() -> None:
    """All-gather and reduce-scatter around attention and MLP: each sends three quarters of a token."""
    one, four = plain_cost().rates, plain_cost(tp=4).rates
    hardware = PLAIN
    assert four.token - one.token / 4 == pytest.approx(4 * 3584 * 2 * 3 / 4 / hardware.gpu_link_bytes * 1e9)


@pytest.mark.parametrize(
    ("ranks", "tp", "links"), [(8, 1, None), (16, 1, 8), (32, 1, 8), (12, 1, 4), (9, 1, 1), (8, 2, 4), (2, 8, 1)]
)
def test_rings_leave_a_node_by_the_links_of_all_members_that_it_has(ranks: int, tp: int, links: int | None) -> None:
    """As NCCL's do; what a single GPU sends to another node goes by its own link."""
    hardware = PLAIN
    expected = hardware.gpu_link_bytes if links is None else links * hardware.node_link_bytes
    assert hardware.ring_bytes(ranks, tp) == expected
    assert hardware.link_bytes(ranks * tp) == (hardware.gpu_link_bytes if links is None else hardware.node_link_bytes)
    assert replace(hardware, node_link_bytes=1e12).ring_bytes(ranks, tp) == hardware.gpu_link_bytes


def test_tensor_parallelism_across_nodes_is_slower() -> None:
    """The same collectives over the links between nodes."""
    near = PLAIN
    far = replace(near, gpus_per_node=2)
    assert plain_cost(hardware=far, tp=4).rates.token > 1.5 * plain_cost(hardware=near, tp=4).rates.token
    assert plain_cost(hardware=far, tp=2).rates == plain_cost(hardware=near, tp=2).rates


@pytest.mark.parametrize("tp", [0, 3, 7, 8])
def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused(tp: int) -> None:
    """Qwen2.5-7B has 28 query heads and 4 of keys and values."""
    expected = (
        f"tensor parallelism {tp} does not divide the (28|4) " if tp else "--tp is 0, expected a whole number from 1"
    )
    with pytest.raises(UsageError, match=expected):
        plain_cost(tp=tp)


def test_float32_takes_longer_by_the_rates_of_products_and_the_bytes_of_links() -> None:
    bf16, fp32 = plain_cost(tp=2).rates, plain_cost(tp=2, precision="fp32").rates
    assert fp32.token == pytest.approx(2 * bf16.token)
    assert fp32.pair == pytest.approx(2 * bf16.pair)
    assert fp32.link_token == pytest.approx(2 * bf16.link_token)


def test_checkpointing_recomputes_layers_but_not_the_head() -> None:
    tokens, attention_pairs = np.array([8192]), attention_pairs_of(np.array([8192]), np.array([0]))
    times = {
        checkpointing: durations(tokens, attention_pairs, plain_cost(checkpointing=checkpointing).rates, (14, 14))
        for checkpointing in ("none", "full")
    }
    forward, backward = OPS.index("forward"), OPS.index("backward")
    assert np.array_equal(times["none"][forward], times["full"][forward])
    longer = times["full"][backward] - times["none"][backward]
    assert longer == pytest.approx(np.array([1, 1])[:, None] * times["none"][forward, 0], abs=2)


def test_the_weight_half_of_a_backward_is_a_forward_of_products_with_layers_and_none_of_the_head() -> None:
    tokens, rates = np.array([8192]), plain_cost().rates
    times = durations(tokens, attention_pairs_of(tokens, np.zeros_like(tokens)), rates, (14, 14))
    backward, of_inputs, of_weights = (
        times[OPS.index(op), :, 0] for op in ("backward", "backward_input", "backward_weight")
    )
    assert abs(of_inputs + of_weights - backward).max() <= 1
    assert of_weights.tolist() == [round(14 * (rates.token * 8192 + rates.chunk + rates.sums.layer))] * 2


def test_every_backward_adds_the_gradients_of_its_weights_to_their_sums_however_few_tokens_it_has() -> None:
    """Of a matrix in bf16 6 bytes: the sum in float32 is read and written by the product, which writes no gradient.

    Of the head for every block of tokens whose logits there is room for, half a block more than the tokens fill; of the
    embeddings, whose rows alone are added, only in float32, once, on the first stage. The weight half has those of
    layers.
    """
    cost = plain_cost()
    ns = 6e9 / cost.hardware.copy_bytes
    of_layer, of_ends = ns * cost.shape.layer_parameters, ns * cost.shape.embedding_parameters
    without = cost.rates._replace(sums=GradientSumTime())
    for tokens in (np.array([100]), np.array([8192])):
        pairs = attention_pairs_of(tokens, np.zeros_like(tokens))
        longer = np.subtract(*(durations(tokens, pairs, rates, (15, 13)) for rates in (cost.rates, without)))[..., 0]
        of_head = of_ends * (tokens[0] / tokens_at_once(152064) + 0.5)
        backward = [15 * of_layer, 13 * of_layer + of_head]
        assert longer[OPS.index("backward")] == pytest.approx(backward, abs=2)
        assert longer[OPS.index("backward_input")] == pytest.approx([0, of_head], abs=2)
        assert longer[OPS.index("backward_weight")] == pytest.approx([15 * of_layer, 13 * of_layer], abs=2)
        assert not longer[[OPS.index(op) for op in ("forward", "forward_kv", "recompute")]].any()
    in_fp32, on_four = plain_cost(precision="fp32").rates.sums, plain_cost(tp=4).rates.sums
    assert (in_fp32.layer, on_four.layer) == pytest.approx((16 / 6 * of_layer, of_layer / 4))
    assert in_fp32.embeddings == pytest.approx(16 / 6 * of_ends)
    assert on_four.head.chunk == pytest.approx(of_ends / 8)
    adapters = plain_cost(lora_rank=8).rates.sums
    assert 0 < adapters.layer < of_layer / 50 and adapters == GradientSumTime(layer=adapters.layer)


def test_gradients_of_experts_are_stacks_which_no_product_adds_to_a_sum() -> None:
    """12 bytes of a weight of experts, 6 of all others."""
    cost = plain_cost(shape=MIXTURE)
    [layer] = cost.shape.kinds
    others = layer.mixer_parameters
    expected = 6 * others + 12 * (layer.parameters(cost.shape.hidden_size) - others)
    assert cost.rates.sums.layer == pytest.approx(expected * 1e9 / cost.hardware.copy_bytes)


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
def test_gradients_that_are_reduced_in_every_backward_are_copied_to_what_is_sent_and_not_summed(sharding: Any) -> None:
    """8 bytes of a weight of layers, on several ranks; embeddings and head are summed as ever."""
    whole, cost = plain_cost().rates.sums, plain_cost(sharding=sharding)
    reduced = cost.rates_on(8).sums
    assert reduced.layer == pytest.approx(8 / 6 * whole.layer)
    assert reduced[1:] == whole[1:]
    assert cost.rates_on(1).sums == whole


def test_smaller_chunks_are_less_efficient() -> None:
    """Time is affine: a chunk of 1K tokens loses a fifth or more to its fixed part, one of 32K next to nothing."""
    rates = plain_cost(tp=4, hardware=load_hardware("a100")).rates
    lost = {tokens: rates.chunk / (rates.chunk + rates.token * tokens) for tokens in (1024, 32768)}
    assert 0.2 < lost[1024] < 0.5
    assert lost[32768] < 0.03


def test_a_mixture_costs_what_a_token_meets_and_ramps_up_on_all_its_weights() -> None:
    dense, mixture = plain_cost().rates, plain_cost(shape=MIXTURE).rates
    assert dense.token < mixture.token < 1.1 * dense.token
    assert 3 * dense.chunk < mixture.chunk < 8 * dense.chunk


def test_work_is_forward_and_backward_and_utilisation_counts_six_flops_a_parameter() -> None:
    cost = plain_cost()
    tokens = np.array([100, 50_000])
    pairs = attention_pairs_of(tokens, np.zeros(2, np.int64))
    work = work_ns(cost, tokens, pairs)
    head = cost.rates.head * tokens
    sums = cost.rates.sums.head.token * tokens  # of the head: a block of tokens at a time
    assert work == pytest.approx(3 * (recompute_ns(cost, tokens, pairs) + head) + sums, abs=3)
    assert cost.model_flops(1.0, 0.0) == pytest.approx(6 * (QWEN2_5_7B.num_parameters - 3584 * 152064))
    flops = [cost.model_flops(float(t), float(t * t)) for t in tokens]
    utilisation = np.array(flops) / (work * 1e-9 * cost.hardware.peak_flops)
    assert utilisation.min() > 0.4 and utilisation.max() < 0.65


def test_offloaded_keys_and_values_hide_behind_attention_from_about_2k_tokens_a_chunk() -> None:
    """Both grow with the prefix: at that ChunkSize they take equally long, for 16 bytes or more each way over PCIe."""
    cost = plain_cost(kv_offload=True)
    size = cost.offload_chunk_size
    for prefix in (10_000, 1_000_000):
        attention = 2 * cost.rates.pair * 2 * size * prefix
        transfer = prefix * 2 * 512 * (2 + 4) / cost.hardware.host_bytes * 1e9
        assert attention == pytest.approx(transfer, rel=0.01)
    assert 1024 < size < 4096
    assert cost.rates._replace(host_kv=(0.0, 0.0)) == plain_cost().rates


# ---- what a manifest holds

MODELS = [
    CostModel(),
    CostModel(shape=MIXTURE, hardware=load_hardware("a100"), tp=4, precision="fp32"),
    CostModel(checkpointing="full", kv_offload=True),
]


@pytest.mark.parametrize("cost", MODELS)
def test_a_cost_model_comes_back_from_json_as_it_was(cost: CostModel) -> None:
    again = CostModel.from_dict(json.loads(json.dumps(cost.to_dict())), where="manifest.json")
    assert again == cost
    assert again.rates == cost.rates


def entries_of(values: dict[str, Any]) -> list[tuple[str, ...]]:
    inner = [(part, entry) for part in ("shape", "hardware") for entry in values[part] if entry not in OPTIONAL]
    return [*((entry,) for entry in values), *(path for path in inner if path[1] != "max_positions")]


@pytest.mark.parametrize("path", entries_of(CostModel().to_dict()), ids=".".join)
def test_a_damaged_entry_is_named(path: tuple[str, ...]) -> None:
    """Missing, of another type, or out of range."""
    *outer, entry = path
    damage: Any
    for damage in ("missing", None, -1, float("nan"), 10**400, [], {"a": 1}):
        values: Any = CostModel().to_dict()
        inner = values[outer[0]] if outer else values
        inner[entry] = damage
        if damage == "missing":
            del inner[entry]
        with pytest.raises(DataError, match=rf"`([a-z_]+\.)?{entry}[`.]") as caught:
            CostModel.from_dict(values, where="manifest.json")
        assert caught.value.where == "manifest.json"


def test_positions_may_be_unknown() -> None:
    values: Any = CostModel(shape=replace(QWEN2_5_7B, max_positions=131072)).to_dict()
    assert CostModel.from_dict(values, where="manifest.json").shape.max_positions == 131072
    values["shape"]["max_positions"] = None
    assert CostModel.from_dict(values, where="manifest.json") == CostModel()
    for damage in (0, -1, 1.5, "131072", 10**400):
        values["shape"]["max_positions"] = damage
        with pytest.raises(DataError, match=r"`shape\.max_positions` is"):
            CostModel.from_dict(values, where="manifest.json")


def test_a_manifest_whose_model_cannot_be_is_damaged() -> None:
    with pytest.raises(DataError, match="tensor parallelism 3"):
        CostModel.from_dict(CostModel().to_dict() | {"tp": 3}, where="manifest.json")
    other: Any
    for other in (None, [], "h100", 3):
        with pytest.raises(DataError, match="`cost_model` is"):
            CostModel.from_dict(other, where="manifest.json")
    unknown: Any = CostModel().to_dict()
    unknown["shape"]["num_heads"] = 3
    with pytest.raises(DataError, match="`num_heads` is unknown"):
        CostModel.from_dict(unknown, where="manifest.json")


@pytest.mark.parametrize(
    ("pp", "layers"), [(1, (28,)), (2, (15, 13)), (4, (8, 8, 7, 5)), (8, (4, 4, 4, 4, 4, 4, 3, 1))]
)
def test_the_last_stage_has_fewer_layers_as_the_head_takes_as_long_as_several(pp: int, layers: tuple[int, ...]) -> None:
    assert balance_layers(plain_cost(), pp, pairs_per_token=4096.0) == layers


@given(st.integers(1, 16), st.floats(0, 1e6))
def test_no_other_number_of_layers_of_the_last_stage_makes_the_slowest_much_faster(
    pp: int, pairs_per_token: float
) -> None:
    cost = plain_cost()
    rates = cost.rates
    layer, head = cost.forward_equivalents * (rates.token + rates.pair * pairs_per_token), rates.trained_head

    def slowest(layers: tuple[int, ...]) -> float:
        return max(layer * max(layers), layer * layers[-1] + head)

    found = balance_layers(cost, pp, pairs_per_token)
    assert sum(found) == 28 and len(found) == pp and min(found) >= 1
    for last in range(1, 28 - pp + 2):
        other = (*split_layers(28 - last, pp - 1), last) if pp > 1 else (28,)
        assert slowest(found) <= slowest(other) * (1 + 1 / 16 + 1e-12)


def test_no_action_takes_less_than_what_ranks_send_each_other_of_its_layers() -> None:
    """Gradients in backwards, weights in all but the half for weights; of chunks too small to hide it, the ends too."""
    tokens, pairs = np.array([1, 65_536]), np.array([1.0, 65_536.0**2])
    one = plain_cost()
    bytes_sent = 3 / 4 * one.shape.layer_parameters / one.hardware.gpu_link_bytes * 1e9
    gather, reduce = 2 * bytes_sent + one.hardware.link_ns, 4 * bytes_sent + one.hardware.link_ns
    least = {
        "gradients": (0, 0, 0, reduce, 0, reduce),
        "weights": (gather, gather, gather, gather + reduce, gather, reduce),
    }
    of_token = np.outer((1, 0, 1, 2, 2, 0), (0, one.rates.head))  # on the last stage, in the order of `OPS`
    sums = one.rates.sums
    ends = of_token + np.outer((0, 0, 0, 1, 1, 0), (sums.embeddings, sums.head.token + sums.head.chunk))
    for sharding in SHARDINGS:
        cost = plain_cost(sharding=sharding)
        assert cost.rates_on(1) == one.rates
        plain = durations(tokens, pairs, one.rates._replace(sums=cost.rates.sums), (14, 14))
        times = durations(tokens, pairs, cost.rates_on(4), (14, 14))
        sent = np.array(least.get(sharding, 6 * (0,)))  # in the order of `OPS`
        assert times[:, :, 0] == pytest.approx(np.maximum(14 * sent[:, None] + ends, plain[:, :, 0]), abs=1)
        assert (times[:, :, 1] == plain[:, :, 1]).all()
