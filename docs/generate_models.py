"""Writes docs/models.md: for which causal language models of transformers chunked execution is proved exact.

A small model of each class is run whole and in chunks (`chunkplan_runtime.proof`), which takes some minutes for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from page_writing import paragraph, table, write_page
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from chunkplan.errors import UsageError
from chunkplan_runtime.models.model import checked_text_config
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
    "has an encoder": "it has an encoder",
    "in long sequences is not known": "entries of its config whose effect on long sequences is not known; "
    "the trainer's message names them",
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

The {number} types of causal language models of transformers {transformers}, tried with torch {torch} by
`docs/generate_models.py`.

Before training, a small model with the features of your config runs whole and in chunks (packed, split, both; K of 1
and 2) in float64. Yours is refused if a gradient differs by more than {tolerance:.0e} of its norm. Results are kept in
`~/.cache/chunkplan`; types that the tests of this project cover need no proof. Below are default configs.

| exact on one stage and on two | exact on one stage only | off | not proved |
| --- | --- | --- | --- |
| {both} types | {one} types | {off} types | {unproved} types |
"""

OFF = """## Off

Something crosses the border of a chunk that chunks do not carry; the error is of the worst gradient.
"""

NOT_PROVED = """## Not proved

The small model cannot be built, or does not run in chunks.
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

    @property
    def is_off(self) -> bool:
        """Whether it runs in chunks with other gradients."""
        return self.words.startswith("off")


def verdict(model_type: str, num_stages: int) -> Verdict:
    """Prove a type with its default config, on so many stages."""
    try:
        whole = AutoConfig.for_model(model_type, **dict.fromkeys(DROPOUTS, 0.0), **MORE.get(model_type, {}))
        proof = prove(checked_text_config(whole, "config"), num_stages=num_stages)
    except UsageError as error:
        return Verdict("not proved", why_not(error.message, num_stages))
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


def spans(types: Iterable[str]) -> str:
    """Format each type as code."""
    return ", ".join(f"`{each}`" for each in types)


def sections(rows: dict[str, tuple[Verdict, Verdict]]) -> Iterator[str]:
    """Yield the types that are exact, on two stages and on one only, then those that are off, then the others."""
    yield "## Exact"
    yield paragraph(f"On one stage and on two: {spans(name for name, (_, two) in rows.items() if two.is_exact)}.")
    yield "On one stage only:"
    one_stage = {name: two for name, (one, two) in rows.items() if one.is_exact and not two.is_exact}
    yield table(["type", "two stages", "why"], [(f"`{name}`", two.words, two.why) for name, two in one_stage.items()])
    yield OFF
    off = {name: one for name, (one, _) in rows.items() if one.is_off}
    yield table(["type", "error", "weight"], [(f"`{name}`", one.words, one.why) for name, one in off.items()])
    yield NOT_PROVED
    types_of: dict[str, list[str]] = {}
    for name, (one, _) in rows.items():
        if not one.is_exact and not one.is_off:
            types_of.setdefault(one.why[:160], []).append(name)
    yield table(["why", "types"], [(why, spans(types)) for why, types in types_of.items()])


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
        off=sum(one.is_off for one, _ in rows.values()),
        unproved=sum(not one.is_exact and not one.is_off for one, _ in rows.values()),
    )
    write_page("models.md", [introduction, *sections(rows)])


if __name__ == "__main__":
    main()
