"""Models of text and more (images, sound): the language model within is what is trained.

Its config is the text part of theirs, for which transformers has a class of its own. The weights of the other parts are
not loaded, and what is saved is the language model.
"""

from __future__ import annotations

import re
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chunkplan_runtime.models.checks import check_config

#: What weights of a language model are called within a model of text and more -> their names in it alone.
TEXT_WEIGHTS = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


def checked_text_config(config: Any, where: str, *, router_loss: bool = False) -> Any:
    """The config of the language model in a model with this config, which may be all there is; checked.

    `router_loss`: see `check_config`.

    Raises:
        UsageError: chunked execution would get it wrong.
    """
    text = config.get_text_config(decoder=True)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if classes.get(config.model_type) != classes.get(text.model_type):  # a class of its own, which ties by its own flag
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    check_config(text, where, router_loss=router_loss)
    return text


def is_text_weight(name: str) -> bool:
    """Whether a weight of a checkpoint belongs to its language model, by its name."""
    return re.match(r"lm_head\.|(model\.)?(language_model|layers|embed_tokens|norm)\.", name) is not None


def forget_text_weights(model: Any) -> None:
    """Let a model be saved under its own names: transformers would turn `TEXT_WEIGHTS` back, which cannot be done."""
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        mapped = set(TEXT_WEIGHTS)
        model._weight_conversions = [each for each in used if not mapped & set(each.source_patterns)]
