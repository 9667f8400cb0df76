"""What tests of tokenizers share: a small byte-level one, ChatML, texts, and masks found in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chunkplan.intake.records import Conversation, Message

CORPUS = ["def f(x):\n    return x  # yes", "日本語のテキスト and naïve café 😀😀", "What is it? It is fine."] * 4

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Strings whose characters take one to four bytes, some of which only combine into what is seen.
STRINGS = ["plain text", "    indented", "日本語", "😀", "\U0001f469\u200d\U0001f467 family"]
STRINGS += ["e\u0301\u0323 combined", "\n\n", " ", "naïve café", "𝔘nicode"]


def byte_level() -> Tokenizer:
    """A byte-level BPE like GPT-2's, so small that most characters outside ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    return folder


def reference_mask(tokenizer: Tokenizer, ids: list[int], text: str, prompt: str) -> list[bool]:
    """Found from the bytes of every token alone: is one of them of a character at or after the end of the prompt?

    The name of a byte-level token has one character a byte.
    """
    character = [index for index, letter in enumerate(text) for _ in letter.encode()]
    stops = np.cumsum([len(tokenizer.id_to_token(token)) for token in ids])
    return [bool(index) and character[stop - 1] >= len(prompt) for index, stop in enumerate(stops)]


def conversation(*messages: tuple[str, str], counts: tuple[bool, ...] | None = None) -> Conversation:
    said = counts or (None,) * len(messages)
    return Conversation(
        tuple(Message(role, content, count) for (role, content), count in zip(messages, said, strict=True))
    )
