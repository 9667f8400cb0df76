"""A model is accepted or refused by the error that a small one of its class has, on one stage and on two."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from transformers import AutoConfig

from chunkplan.errors import UsageError
from chunkplan_runtime.attention import interface
from chunkplan_runtime.attention.interface import Mask
from chunkplan_runtime.models import model as models
from chunkplan_runtime.models import parts
from chunkplan_runtime.models.router_loss import RouterLoss
from chunkplan_runtime.models.tiny import tiny_document, unknown_numbers
from chunkplan_runtime.proof import prove as record
from chunkplan_runtime.proof.prove import TOLERANCE, UnprovedError, check_exact, prove

#: Models by what they have that others have not, with what their default config leaves out.
EXACT = {
    "apertus": {},  # an activation with weights, rope as of Llama 3
    "cohere2": {},  # logits are scaled, every fourth layer sees all
    "deepseek_v3": {},  # latents, dense layers before mixtures
    "exaone4": {},
    "gemma2": {},
    "glm4_moe": {},
    "gpt2": {},  # embeddings of positions
    "gpt_neox": {},  # parallel residuals, layers by another name
    "gpt_oss": {},  # sinks
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "llama4_text": {},  # attention in tiles, a scale by position
    "mamba": {},  # a scan whose function takes no state
    "minicpm3": {},
    "minimax": {},  # a cache of its own
    "mimo_v2_flash": {},
    "nanochat": {},  # a softcap behind the head
    "olmo3": {},
    "nemotron_h": {},  # Mamba-2, attention and mixtures
    "phi": {},
    "phimoe": {"router_jitter_noise": 0.9, "input_jitter_noise": 0.2},  # a router that draws experts at random
    "qwen3_next": {},  # a gated delta rule
    "stablelm": {},  # layers that pass nothing on to attention
    "starcoder2": {},
}

#: Those that are always tried; `make soak` has all.
FEW = ("deepseek_v3", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "nemotron_h", "phimoe", "stablelm")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(model_type, **changes):
    return AutoConfig.for_model(model_type, **changes)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in FEW else pytest.mark.soak) for each in EXACT]
)
def test_models_of_many_kinds_are_proved_exact(model_type, num_stages):
    proof = prove(config_of(model_type, **EXACT[model_type]), num_stages=num_stages)
    assert proof.error < (1e-10 if model_type == "qwen3_next" else 1e-13) <= TOLERANCE, proof


@pytest.mark.parametrize("model_type", ["diffllama", "openai-gpt"])
def test_a_model_that_does_more_than_chunks_carry_is_refused_by_the_error_it_makes(model_type):
    with pytest.raises(UsageError, match=rf"model type '{model_type}' are off by \d.*\(.*, K [12]\)") as refused:
        check_exact(config_of(model_type), "model")
    assert "docs/models.md" in str(refused.value.hint)


def test_a_head_without_the_scaling_that_the_model_has_would_be_found(monkeypatch):
    """Not with a scaling of 1, which is why the small model has that of the whole one."""
    monkeypatch.setattr(models, "logits_of", lambda model, hidden: model.get_output_embeddings()(hidden[None]))
    assert prove(config_of("granite", logits_scaling=1.0)).holds
    assert prove(config_of("granite", logits_scaling=8.0)).error > 0.1


def test_noise_that_is_drawn_anew_in_a_recompute_would_be_found(monkeypatch):
    noisy = config_of("phimoe", router_jitter_noise=0.9)
    count = itertools.count()
    monkeypatch.setattr(parts, "set_seed", lambda _: torch.manual_seed(next(count)))
    proof = prove(noisy)
    assert proof.error > 1e-3 and "with noise" in proof.where


@pytest.mark.parametrize(
    "model_type, num_stages",
    [
        ("ernie4_5_moe", 1),
        ("jetmoe", 2),
        *(
            pytest.param(model_type, num_stages, marks=pytest.mark.soak)
            for model_type in ("ernie4_5_moe", "jetmoe", "phimoe", "qwen3_next")
            for num_stages in (1, 2)
            if (model_type, num_stages) not in (("ernie4_5_moe", 1), ("jetmoe", 2))
        ),
    ],
)
def test_the_load_balancing_loss_of_transformers_is_proved_where_a_config_asks_for_it(
    model_type, num_stages, monkeypatch
):
    config = config_of(model_type, output_router_logits=True)
    assert prove(config, num_stages=num_stages).error < 1e-11
    monkeypatch.setattr(RouterLoss, "_gradient", lambda self, router, spans, counts, logits: torch.zeros_like(logits))
    assert prove(config, num_stages=num_stages).error > 1e-5


def test_what_a_trainer_is_asked_for_is_proved_whatever_the_config_says(monkeypatch):
    proved = []

    def seen(config, *, num_stages):
        proved.append(config.output_router_logits)
        return prove(config, num_stages=num_stages)

    monkeypatch.setattr(record, "prove", seen)
    for asks in (False, True):
        config = config_of("olmoe", output_router_logits=asks)
        check_exact(config, "model", router_loss="none" if asks else "batch")
        assert config.output_router_logits is asks
    assert proved == [True, False]


def test_a_window_that_is_left_out_would_be_found(monkeypatch):
    """The small model has a window that its sequences go beyond."""
    called = interface.chunk_attention

    def without(module, query, key, value, mask, **asked):
        return called(module, query, key, value, Mask(), **asked | {"sliding_window": None})

    from transformers import AttentionInterface

    monkeypatch.setattr(interface, "register_attention", lambda: None)
    monkeypatch.setattr(models, "register_attention", lambda: None)
    AttentionInterface.register(interface.ATTENTION, without)
    try:
        assert prove(config_of("gpt_oss")).error > 1e-3
    finally:
        monkeypatch.undo()
        interface.register_attention()
    assert prove(config_of("gpt_oss")).holds


def test_what_is_large_still_in_a_small_model_is_not_taken_for_harmless():
    config = config_of("olmo3")
    assert not unknown_numbers(tiny_document(config.to_dict()))
    config.sees_at_most = 4096
    with pytest.raises(UnprovedError, match="what sees_at_most 4096 changes in long sequences is not known"):
        prove(config)


def test_numbers_that_only_say_how_positions_are_rotated_are_known_however_they_are_written():
    """Published configs have many of them as whole numbers."""
    rope = {"rope_type": "yarn", "rope_theta": 10000, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    assert prove(config_of("deepseek_v3", rope_parameters=rope)).holds
    assert not unknown_numbers(tiny_document(config_of("gpt_oss", initial_context_length=4096).to_dict()))


def test_every_kind_of_layer_is_in_a_small_model():
    config = config_of("gemma3_text", num_hidden_layers=26, sliding_window=4096)
    tiny = AutoConfig.for_model(**tiny_document(config.to_dict()))
    assert {*tiny.layer_types} == {*config.layer_types} and len(tiny.layer_types) == tiny.num_hidden_layers < 26
    assert tiny.sliding_window < 16
    assert tiny.final_logit_softcapping == config.final_logit_softcapping


@pytest.mark.parametrize("model_type", [pytest.param("gemma3n_text", marks=pytest.mark.soak), "gemma4_text"])
def test_layers_that_share_keys_and_values_are_in_a_small_model_and_exact_on_one_stage(model_type):
    """Of every kind, as the whole model has them; on two stages the later one would lack them."""
    config = config_of(model_type, num_hidden_layers=35, num_kv_shared_layers=15)
    tiny = AutoConfig.for_model(**tiny_document(config.to_dict()))
    first = tiny.num_hidden_layers - tiny.num_kv_shared_layers
    assert {*tiny.layer_types[first:]} == {*tiny.layer_types[:first]} == {"full_attention", "sliding_attention"}
    assert prove(config).holds
    with pytest.raises(UnprovedError):
        prove(config, num_stages=2)


def test_what_was_proved_is_not_proved_again_but_for_other_features(monkeypatch):
    calls = []

    def counted(config, *, num_stages):
        calls.append(num_stages)
        return prove(config, num_stages=num_stages)

    monkeypatch.setattr(record, "prove", counted)
    for _ in range(2):
        check_exact(config_of("olmo"), "model")
    assert calls == [1]
    check_exact(config_of("olmo", num_hidden_layers=99, hidden_size=8192), "model")
    assert calls == [1], "the same features, wider and deeper"
    check_exact(config_of("olmo", clip_qkv=2.0), "model")
    check_exact(config_of("olmo"), "model", num_stages=4)
    assert calls == [1, 1, 2]
    for _ in range(2):
        with pytest.raises(UsageError):
            check_exact(config_of("diffllama"), "model")
    assert calls == [1, 1, 2, 1]


def test_a_proof_leaves_nothing_behind(monkeypatch, tmp_path):
    """Neither in the state of random numbers nor, where nothing can be written, anything missing."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = torch.random.get_rng_state()
    check_exact(config_of("olmo"), "model")
    assert torch.equal(before, torch.random.get_rng_state())


def test_types_that_tests_of_this_project_hold_are_not_proved_again(monkeypatch):
    monkeypatch.setattr(record, "prove", partial(pytest.fail, "not proved"))
    check_exact(config_of("llama"), "model")
