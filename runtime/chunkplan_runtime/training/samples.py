"""Samples of what a model generates in training: `generate` of transformers, on the model as it is between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from chunkplan.errors import UsageError
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.checks import max_positions
from chunkplan_runtime.models.model import CausalLM

#: Tokens that are generated at most.
NEW_TOKENS = 128


class Sampler:
    """Continues a prompt, each time with the most likely token, so that nothing is drawn that training would draw."""

    def __init__(self, prompt: str, tokenizer: list[Path], model: CausalLM, layout: RankLayout) -> None:
        """`tokenizer`: its files. Raises UsageError: this process has a part of the model, or there is no tokenizer."""
        if layout.world_size > 1:
            raise UsageError(
                f"--sample-every with {layout.world_size} processes: each has a part of the model or of its optimizer",
                hint="leave it out, and generate from final/ or with one process",
            )
        if not tokenizer:
            raise UsageError("--sample-prompt: the model has no tokenizer", hint="give --tokenizer")
        self._model = model
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer[0].parent, trust_remote_code=False)
        how: Any = {"return_tensors": "pt", "return_dict": True}
        if self._tokenizer.chat_template:
            asked = [{"role": "user", "content": prompt}]
            tokens: Any = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, **how)
        else:
            tokens = self._tokenizer(prompt, return_tensors="pt")
        self._tokens = tokens["input_ids"]
        self._room = min(NEW_TOKENS, (max_positions(model.config) or 1 << 62) - self._tokens.shape[1])
        if not self._tokens.shape[1] or self._room < 1:
            told = f"--sample-prompt has {self._tokens.shape[1]:,} tokens"
            raise UsageError(f"{told}, expected some, and fewer than the model has positions", hint="give another one")

    def generate(self) -> str:
        """The continuation, without special tokens."""
        model, current, tokens = self._model.model, self._model.current, self._tokens.to(self._model.device)
        config: Any = self._model.config
        attention, config._attn_implementation = config._attn_implementation, "eager"  # which every model has
        current.context, end = None, self._tokenizer.eos_token_id
        how: Any = {} if end is None else {"eos_token_id": end, "pad_token_id": end}
        how |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": self._room, "do_sample": False}
        model.eval()
        try:
            found = model.generate(input_ids=tokens, **how)
        finally:
            config._attn_implementation = attention
            model.train()
        return str(self._tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True))
