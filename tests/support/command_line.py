"""The command line in this process: what a process of its own would print, without the time it takes to import."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


#: The config.json of a model of half a billion weights.
SMALL_MODEL = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}

#: Runs `chunkplan ARGUMENTS`: the fixture `command`.
Run = Callable[..., Ran]


def run_here(folder: Path, *words: str, columns: int = 100) -> CompletedProcess[str]:
    """`chunkplan WORDS` in `folder`, on a terminal of `columns`, with nothing set in the environment."""
    from chunkplan_cli.app import run_command

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["chunkplan", *words])
        patch.setenv("COLUMNS", str(columns))
        for name in ("CHUNKPLAN_TOKENIZER", "CHUNKPLAN_WORKSPACE"):
            patch.delenv(name, raising=False)
        with pytest.raises(SystemExit) as end:
            run_command()
    return CompletedProcess(words, int(end.value.code or 0), out.getvalue(), err.getvalue())
