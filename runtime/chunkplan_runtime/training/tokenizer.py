"""The tokenizer that goes with trained weights: found, checked against data and model, copied byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.tokenizer_hash import tokenizer_hashes
from chunkplan_runtime.training.config import TrainConfig

_TOKENIZER = "tokenizer.json"
_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def find_tokenizer(config: TrainConfig) -> list[Path]:
    """The files of the run's tokenizer: that of `--tokenizer`, else that of the model; none where it has none.

    Raises:
        UsageError: `--tokenizer` has none, or the hub cannot be reached.
    """
    model = config.model if config.model is not None else str(config.model_config and config.model_config.parent)
    folder = _folder(config.tokenizer or model)
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if config.tokenizer is not None and not files:
        raise UsageError(f"{config.tokenizer} has no {_TOKENIZER}", hint="give a folder with one, or a name on the hub")
    return files


def check_tokenizer(files: list[Path], analysis: Analysis, vocab_size: int) -> None:
    """Refuse a tokenizer that is not the data's, that the model has no room for, or that cannot be loaded.

    Raises:
        UsageError: it is one of these.
    """
    if not files:
        return
    folder = files[0].parent
    made_with = analysis.manifest.get("tokenizer") or {}
    expected = made_with.get("content_hash")
    try:
        content = files[0].read_bytes() if files[0].name == _TOKENIZER else None
        hashes = () if content is None else tokenizer_hashes(json.loads(content), content)
        num_tokens = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:  # whatever it is, what it writes could not be loaded either
        raise UsageError(
            f"the tokenizer in {folder} cannot be loaded: {error}", hint="give another --tokenizer"
        ) from error
    if expected and hashes and expected not in hashes:
        raise UsageError(
            f"{files[0]} is not the tokenizer that the data was made with, {made_with.get('path')}",
            hint="give that one with --tokenizer, or analyze again with this one",
        )
    if num_tokens > vocab_size:
        raise UsageError(
            f"the tokenizer in {folder} has {num_tokens:,} tokens, the model's vocabulary {vocab_size:,}",
            hint="give the model's own tokenizer, and analyze with it",
        )


def _folder(name: str) -> Path:
    """The folder that a name means; of a name on the hub its files come here first."""
    if Path(name).exists() or name.startswith((".", "/", "~")):
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # its errors have no common base
        raise UsageError(
            f"cannot get the tokenizer of {name!r}: {str(error).splitlines()[0]}",
            hint="give a folder with --tokenizer; a name needs the Hugging Face Hub or its cache",
        ) from error
