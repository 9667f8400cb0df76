"""Shapes of published models: parameters as stated, layers that differ, and what these cost."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.cost.activations import page_line, runs_of
from chunkplan.cost.durations import attention_pairs_of, whole_pairs, work_ns
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import KNOWN_TYPES, shape_of_config
from chunkplan.cost.shape import QWEN2_5_7B, AttentionPattern, Layer, ModelShape, kinds_and_order
from chunkplan.cost.token_bytes import ResidentTokens, token_bytes
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.layers import split_layers
from chunkplan.planning.sharing import head_degrees
from tests.support.published_models import MODELS, QWEN3_NEXT, of_type

SHAPES = {name: shape_of_config(copy.deepcopy(each.config), name) for name, each in MODELS.items()}


def shape_of(name: str, **changes: Any) -> ModelShape:
    """Of a published model, with other entries in the config of its text model."""
    config = copy.deepcopy(MODELS[name].config)
    config.get("text_config", config).update(changes)
    return shape_of_config(config, "config.json")


# ---- parameters


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_within_two_percent_of_the_published(name: str) -> None:
    shape, published = SHAPES[name], MODELS[name]
    if published.total is not None:
        assert shape.num_parameters == pytest.approx(published.total * 1e9, rel=0.02)
    if published.active is not None:
        active = shape.num_active_parameters - published.without * shape.embedding_parameters
        assert active == pytest.approx(published.active * 1e9, rel=0.02)
    if published.meta is not None:
        assert shape.num_parameters == pytest.approx(published.meta, rel=0.001)


def test_enough_models_state_their_active_parameters() -> None:
    stated = {name for name, each in MODELS.items() if each.active is not None}
    mixtures = {name for name in stated if any(kind.experts_per_token for kind in SHAPES[name].kinds)}
    assert len(stated) >= 24
    assert len(mixtures) >= 10


def test_a_model_of_every_type_is_among_them() -> None:
    seen = {each.config["model_type"] for each in MODELS.values()}
    seen |= {each.config["text_config"]["model_type"] for each in MODELS.values() if "text_config" in each.config}
    assert set(KNOWN_TYPES) - seen == {"gemma2", "glm4", "granitemoe", "ministral3"}, "made as others are"


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name, each in MODELS.items() if each.meta is not None])
def test_transformers_counts_as_many_parameters(name: str) -> None:
    torch = pytest.importorskip("torch", reason="a model is built on its meta device")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(MODELS[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.get("text_config", config)))
    assert sum(weight.numel() for weight in model.parameters()) == MODELS[name].meta


@pytest.mark.parametrize("name", ["Gemma-4-31B", "Kimi-Linear-48B-A3B", "Nemotron-H-8B", "LFM2-1.2B", "Llama-4-Scout"])
def test_what_transformers_writes_of_a_config_is_the_same_model(name: str) -> None:
    """Lists of types and other names take the place of what the published file has."""
    pytest.importorskip("transformers", reason="it writes configs")
    from transformers import AutoConfig

    config = copy.deepcopy(MODELS[name].config)
    written = AutoConfig.for_model(**config.get("text_config", config)).to_dict()
    again = shape_of_config(json.loads(json.dumps(written)), "")
    assert replace(again, name="", max_positions=None) == replace(SHAPES[name], name="", max_positions=None)


# ---- layers


def windows_of(shape: ModelShape) -> list[int | None]:
    return [shape.kinds[place].window for place in shape.order]


def test_ranks_share_latents_by_pages_only() -> None:
    """By heads they would expand them, which takes 71 times as much."""
    assert head_degrees(8, CostModel(shape=SHAPES["DeepSeek-V3"])) == [1]
    assert head_degrees(8, CostModel(shape=SHAPES["Phi-3-mini"])) == [1, 2, 4, 8]
    deepseek = CostModel(shape=SHAPES["DeepSeek-V3"])
    alone, shared = (memory_of(deepseek, 1, chunk_size=8192, shared_by=by)[0] for by in (1, 8))
    assert (alone.kv, alone.kv_gradients) == (shared.kv, shared.kv_gradients)


def test_layers_are_of_the_kinds_that_the_config_says() -> None:
    assert windows_of(SHAPES["gpt-oss-20b"]) == [128, None] * 12
    assert windows_of(SHAPES["Gemma-3-27B"])[:12] == ([1024] * 5 + [None]) * 2
    assert windows_of(SHAPES["Gemma-3-27B"])[-2:] == [1024, 1024]
    assert set(windows_of(SHAPES["Phi-3-mini"])) == {2047}
    qwen = SHAPES["Qwen3-Next-80B-A3B"]
    assert [qwen.kinds[place].query_width for place in qwen.order] == [0, 0, 0, 4096] * 12
    assert [qwen.kinds[place].state_elements > 0 for place in qwen.order] == [True, True, True, False] * 12
    deepseek = SHAPES["DeepSeek-V3"]
    assert [deepseek.kinds[place].experts_per_token for place in deepseek.order] == [0] * 3 + [8] * 58
    [latent, _] = deepseek.kinds
    assert (latent.key_width, latent.value_width, latent.latent_width) == (128 * 192, 128 * 128, 576)
    assert latent.cached_width == latent.latent_width == 576
    assert latent.expanded_width == latent.key_width + latent.value_width
    scout = SHAPES["Llama-4-Scout"]
    assert [scout.kinds[place].window for place in scout.order] == [8192, 8192, 8192, None] * 12
    assert scout.kinds[0].window_restarts
    assert not SHAPES["Mamba-Codestral-7B"].attention_patterns
    assert all(kind.state_elements and kind.query_width for kind in SHAPES["Falcon-H1-7B"].kinds)


def test_a_window_that_is_not_used_is_none() -> None:
    config: dict[str, Any] = of_type("qwen2", 64, 4, 4, 2, 128, 100, sliding_window=16, max_window_layers=3)
    assert windows_of(shape_of_config(config, "")) == [None] * 4
    assert windows_of(shape_of_config(config | {"use_sliding_window": True}, "")) == [None, None, None, 16]


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_comes_back_from_json_as_it_was(name: str) -> None:
    cost = CostModel(shape=SHAPES[name], tp=2)
    values = json.loads(json.dumps(cost.to_dict()))
    assert CostModel.from_dict(values, where="manifest.json") == cost
    assert (values["shape"]["name"], values["shape"]["num_layers"]) == (cost.shape.name, cost.shape.num_layers)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("kinds", []),
        ("kinds", [{}]),
        ("kinds", 3),
        ("order", [0] * 47),
        ("order", [0] * 48),
        ("order", [0, 0, 0, 2] * 12),
        ("order", [[]] * 48),
        ("num_layers", 47),
        ("hidden_size", -1),
        ("more", 1),
    ],
)
def test_damage_to_layers_that_differ_is_named(entry: str, value: Any) -> None:
    values = CostModel(shape=SHAPES["Qwen3-Next-80B-A3B"]).to_dict()
    values["shape"][entry] = value
    with pytest.raises(DataError, match=r"`shape|`more") as caught:
        CostModel.from_dict(values, where="manifest.json")
    assert caught.value.where == "manifest.json"


def test_damage_to_an_entry_of_a_kind_is_named() -> None:
    for name in asdict(SHAPES["Qwen3-Next-80B-A3B"].kinds[0]):
        for value in (-1, "1", [], 1.5):
            values = CostModel(shape=SHAPES["Qwen3-Next-80B-A3B"]).to_dict()
            values["shape"]["kinds"][0][name] = value
            with pytest.raises(DataError, match=rf"`shape\.kinds\[0\]\.{name}` is"):
                CostModel.from_dict(values, where="manifest.json")


# ---- what is refused

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "layers of type 'sparse_attention'": ("gpt-oss-20b", {"layer_types": ["sparse_attention"] * 24}),
    "which does not go by it": ("Phi-3-mini", {"layer_types": ["full_attention"] * 32}),
    "no window is given": (
        "Bamba-9B",
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "layer_types": ["sliding_attention"] * 32,
            "sliding_window": 64,
            "max_window_layers": 32,
        },
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_layers_that_are_not_known_are_refused_by_name(words: str) -> None:
    name, changes = REFUSED[words]
    with pytest.raises(UsageError, match=words) as caught:
        shape_of(name, **changes)
    assert caught.value.where == "config.json"


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("Gemma-4-31B", "hidden_size_per_layer_input", 256),
        ("Gemma-4-31B", "num_kv_shared_layers", 20),
        ("Gemma-4-31B", "per_layer_config", {"5": {"intermediate_size": 3}}),
        ("Gemma-3-27B", "use_bidirectional_attention", True),
        ("Nemotron-H-8B", "moe_latent_size", 1024),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23),
        ("GLM-4.7-Flash", "mlp_layer_types", ["dense"]),
        ("GLM-4.7-Flash", "mlp_layer_types", ["other"] * 47),
        ("Kimi-K2", "num_experts_per_tok", 385),
    ],
)
def test_entries_that_change_a_model_in_ways_not_known_are_refused(name: str, entry: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"`{entry}` is"):
        shape_of(name, **{entry: value})


STRANGE = [None, "28", -1, 0, 1.5, float("nan"), True, [28], {"a": 1}, 10**30]


@pytest.mark.parametrize("name", MODELS)
def test_whatever_an_entry_holds_it_is_read_or_refused_with_its_file(name: str) -> None:
    config = MODELS[name].config
    for entry in config.get("text_config", config):
        for value in STRANGE:
            try:
                shape_of(name, **{entry: value})
            except ChunkplanError as error:
                assert "config.json" in str(error)


def test_a_text_model_inside_of_another_has_to_be_there() -> None:
    for text in (None, [], "gemma3_text"):
        with pytest.raises(DataError, match="`text_config` is missing"):
            shape_of_config({"model_type": "gemma3", "text_config": text}, "config.json")


# ---- what layers that differ cost


@given(tokens=st.integers(1, 5000), prefix=st.integers(0, 5000), window=st.integers(1, 4000), restarts=st.booleans())
def test_what_a_window_leaves_is_what_queries_see(tokens: int, prefix: int, window: int, restarts: bool) -> None:
    """Twice the pairs that the mask leaves, of which a query has one with itself that counts once."""
    [found] = attention_pairs_of(np.array([tokens]), np.array([prefix]), [AttentionPattern(window, restarts)])
    places = np.arange(prefix, prefix + tokens)
    seen = places % window + 1 if restarts else np.minimum(places + 1, window)
    beyond = 0 if restarts else np.sum(places >= window)  # a full window has no half pair at its end
    assert found == np.sum(2 * seen - 1) + beyond


@given(
    lengths=st.lists(st.integers(1, 1 << 20), min_size=2, max_size=5).map(sorted),
    windows=st.lists(st.integers(1, 1 << 17), min_size=2, max_size=2).map(sorted),
)
def test_a_window_costs_no_more_than_a_longer_one_or_none(lengths: list[int], windows: list[int]) -> None:
    tokens = np.array(lengths)
    times = []
    for window in (*windows, None):
        kind = replace(QWEN2_5_7B.kinds[0], window=window)
        cost = CostModel(shape=replace(QWEN2_5_7B, kinds=(kind,)))
        times.append(work_ns(cost, tokens, whole_pairs(cost, tokens)))
    assert (times[0] <= times[1]).all()
    assert (times[1] <= times[2]).all()
    assert (np.diff(times) >= 0).all()  # longer sequences take no less


@given(
    length=st.integers(2, 1 << 18),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    name=st.sampled_from(["gpt-oss-20b", "Gemma-3-27B", "Llama-4-Scout", "Qwen3-Next-80B-A3B"]),
)
def test_the_parts_of_a_sequence_attend_to_what_it_does(length: int, cuts: list[float], name: str) -> None:
    stops = sorted({length, *(int(cut * length) for cut in cuts)} - {0})
    starts = np.array([0, *stops[:-1]])
    patterns = SHAPES[name].attention_patterns
    parts = attention_pairs_of(np.array(stops) - starts, starts, patterns)
    [whole] = attention_pairs_of(np.array([length]), np.array([0]), patterns)
    assert parts.sum() == pytest.approx(whole, abs=len(stops))  # each is rounded


def test_the_time_of_a_recurrent_model_grows_as_its_sequence_and_of_others_faster() -> None:
    tokens = np.array([1 << 17, 1 << 18])

    def grows(name: str) -> float:
        cost = CostModel(shape=SHAPES[name])
        short, long = work_ns(cost, tokens, whole_pairs(cost, tokens))
        return float(long / short)

    assert grows("Mamba-Codestral-7B") == pytest.approx(2, rel=1e-6)
    assert grows("Mamba-Codestral-7B") < grows("Nemotron-H-8B") < grows("OLMo-Hybrid-7B") < grows("OLMo-2-7B")
    assert grows("OLMo-2-7B") > 3


def of_layers(*layers: Layer) -> CostModel:
    kinds, order = kinds_and_order(layers)
    return CostModel(shape=replace(QWEN2_5_7B, kinds=kinds, order=order))


def test_the_mean_of_layers_that_are_alike_is_one_of_them() -> None:
    [layer] = QWEN2_5_7B.kinds
    sizes = of_layers(layer, replace(layer, mlp_width=3, all_mlp_width=3), replace(layer, query_width=7))
    for value in (lambda each: each.query_width, lambda each: each.all_mlp_width):
        assert sizes.shape.mean(value) == np.mean([value(sizes.shape.kinds[place]) for place in sizes.shape.order])
    assert of_layers(*[layer] * 28).rates == CostModel().rates


def memory_of(cost: CostModel, pp: int, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "dp": 1,
        "layers": split_layers(cost.shape.num_layers, pp),
        "held": [ResidentTokens(kv=65536, kv_gradients=65536)] * pp,
        "chunk_size": 8192,
    }
    return stage_memory(cost, **{**values, **changes})


def test_a_stage_holds_the_weights_and_keys_of_its_own_layers() -> None:
    """The first of DeepSeek's stages has the dense layers, and some of Qwen3-Next's more attention than others."""
    deepseek = CostModel(shape=SHAPES["DeepSeek-V3"])
    stages = memory_of(deepseek, 8)
    head = 2 * deepseek.shape.embedding_parameters
    assert sum(stage.weights for stage in stages) == pytest.approx(2 * deepseek.shape.num_parameters, rel=1e-9)
    assert stages[0].weights - head < 0.7 * stages[1].weights
    hybrid = CostModel(shape=SHAPES["Qwen3-Next-80B-A3B"])
    layers = (4, 1, 43)
    all_of_it, none, _ = memory_of(hybrid, 3, layers=layers)
    assert none.kv_gradients == 0
    fixed, of_token = page_line(hybrid, hybrid.shape.kinds[-1], 8192)
    more = fixed + of_token * 4 * 8192
    assert all_of_it.kv_gradients == 65536 * 2 * 512 * 4 + more


def test_a_recurrent_layer_keeps_a_state_for_each_chunk_size_and_no_keys() -> None:
    states = CostModel(shape=SHAPES["Mamba-Codestral-7B"])
    state = states.shape.total(lambda layer: layer.state_elements) * 4
    for chunk_size in (2048, 8192):
        [memory] = memory_of(states, 1, chunk_size=chunk_size)
        assert (memory.kv, memory.kv_gradients) == (65536 / chunk_size * state, 0)
        [offloaded] = memory_of(replace(states, kv_offload=True), 1, chunk_size=chunk_size)
        assert offloaded.kv == 2 * state
        assert token_bytes(states, runs_of(states, [64]), chunk_size).kv == state / chunk_size
    assert states.offload_chunk_size == 1


def test_a_layer_with_a_window_keeps_all_keys_and_values() -> None:
    [kind] = QWEN2_5_7B.kinds
    [slides] = memory_of(of_layers(*[replace(kind, window=1024)] * 28), 1)
    assert slides == memory_of(CostModel(), 1)[0]


def test_the_config_of_the_example_is_that_of_its_card() -> None:
    assert shape_of_config(QWEN3_NEXT, "").max_positions == 262144
