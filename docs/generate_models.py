"""Writes docs/models.md: for which causal language models of transformers chunked execution is proved exact.

A small model of each class is run whole and in chunks (`chunkplan_runtime.proof`), which takes some minutes for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from page_writing import table, write_page
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from chunkplan.errors import UsageError
from chunkplan_runtime.models.text_part import checked_text_config
from chunkplan_runtime.proof.prove import TOLERANCE, prove

#: What default configs leave out, or have at a value at which nothing happens; as published models have it.
MORE: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.0625},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        "d_model": 6144,
        "n_heads": 48,
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_text": {"num_hidden_layers": 35, "num_kv_shared_layers": 20},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoe": {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "phi3": {"sliding_window": 2047},
    "starcoder2": {"sliding_window": 4096},
}

#: Dropout in attention is refused; of these types it is set to 0.
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")

_OWN = "an attention of its own, which does not call transformers' interface"

#: What stands in the way, by words of what was found.
REASONS = {
    "position_bias": "attention with a bias by position",
    "without a chunk": _OWN,
    "'chunkplan'": _OWN,
    "'Mask' object has no attribute 'dtype'": "it chooses keys by the whole mask, as sparse attention does",
    "'Mask'": _OWN,
    "is_causal=False": "tokens see those that come after them",
    "a second time": "a state that its modules keep, and not transformers' cache",
    "no list of layers": "no decoder of layers",
    "Unrecognized configuration class": "transformers has no causal language model for its text part",
    "Class validation error": "transformers itself refuses its default config",
    "set of layer types": "transformers itself refuses its default config",
}

#: The same of two stages.
STAGE_REASONS = {
    "input_ids": "its later stages need the tokens too",
    "values to unpack": "its layers hand more on than hidden states",
    "is invalid for input of size": "its layers hand several streams of hidden states on",
    "KeyError": "its later stages need what earlier layers made",
}

INTRODUCTION = """\
# Models that are proved exact

*Written by `docs/generate_models.py`, with transformers {transformers} and torch {torch}: what its proof says of the
{number} types of causal language models there.*

Before a model is trained, a small one of its class runs a few sequences whole and in chunks: packed, split, and both in
one chunk, with one chunk of a sequence in flight and with two; in float64, so that nothing but rounding may differ. It
has all that the config of the whole one switches on (patterns of layers, windows, scalings, experts), so what is said
here of default configs is measured again for yours, and kept in `~/.cache/chunkplan`. It is accepted or refused by the
worst error of a gradient: at most {tolerance:.0e}. Types that the tests of this project hold are let through.

- **exact** on one stage and on two: **{both}** types; on one stage only: {one}.
- **off**: something crosses the border of a chunk that chunks do not carry, and the error is what gradients would be
  off by.
- **not proved**: the small model cannot be built, or does not run in chunks, for the reason that is given.
"""


@dataclass(frozen=True)
class Verdict:
    """What is known of a model: exact, by how much it is off, or why that cannot be measured."""

    words: str
    why: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether chunks are exact."""
        return self.words == "exact"


def verdict(model_type: str, num_stages: int) -> Verdict:
    """Prove a type with its default config, on so many stages."""
    try:
        whole = AutoConfig.for_model(model_type, **dict.fromkeys(DROPOUTS, 0.0), **MORE.get(model_type, {}))
        proof = prove(checked_text_config(whole, "config"), num_stages=num_stages)
    except UsageError as error:
        return Verdict("not proved", error.message)
    except Exception as error:  # an UnprovedError, or a default config that transformers itself refuses
        return Verdict("not proved", why_not(str(error), num_stages))
    return Verdict("exact") if proof.holds else Verdict(f"off by {proof.error:.0e}", f"`{proof.where}`")


def why_not(error: str, num_stages: int) -> str:
    """A reason in words, or the first line of what was found."""
    reasons = REASONS if num_stages == 1 else STAGE_REASONS | REASONS
    return next((reason for word, reason in reasons.items() if word in error), error.splitlines()[0])


def row(model_type: str) -> tuple[Verdict, Verdict]:
    """What is found for a type on one stage, and on two."""
    one = verdict(model_type, 1)
    return one, verdict(model_type, 2) if one.is_exact else one


def main() -> None:
    """Prove all types and write the page."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    rows = {name: row(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    introduction = INTRODUCTION.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        number=len(rows),
        tolerance=TOLERANCE,
        both=sum(two.is_exact for _, two in rows.values()),
        one=sum(one.is_exact and not two.is_exact for one, two in rows.values()),
    )
    lines = [[name, one.words, two.words, two.why[:160]] for name, (one, two) in rows.items()]
    write_page("models.md", [introduction, table(["type", "one stage", "two stages", "why not"], lines)])


if __name__ == "__main__":
    main()
