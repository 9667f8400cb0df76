"""A tokenizer by its name on the Hugging Face hub, through transformers (the `hub` extra)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.backends.chat_templates import TemplateChoice, choose_template
from chunkplan.intake.backends.fast import FastTokenizer
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.tokenizer_hash import tokenizer_hashes

#: How long the hub has to answer before what was fetched from it earlier is all there is.
_SECONDS_TO_ANSWER = 5.0


def takes(name: str) -> bool:
    """Whether there is a name at all: it is asked last."""
    return bool(name)


def load(name: str, choice: TemplateChoice) -> RecordTokenizer:
    """Load what transformers loads under `name`, from its cache or the hub.

    Raises:
        UsageError: transformers is not installed, there is no such tokenizer, or it is not one of `tokenizers`.
        DataError: its chat template is not one.
    """
    if len(Path(name).parts) > 1 and Path(name).parent.is_dir():  # a path with a slip of the pen
        raise UsageError(f"there is no tokenizer at {name}", hint="give a tokenizer.json or a folder with one")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            f"there is no tokenizer at {name}, and a name on the hub needs transformers",
            hint=pip_install("hub"),
        ) from error
    silent = _silent_hub()
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=silent is not None)
    except Exception as error:  # it raises whatever came of the network, the cache and the files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if silent is not None:
            reason = f"{silent} does not answer, and it was not fetched before"
        raise UsageError(
            f"there is no tokenizer at {name}, and transformers cannot load one of that name: {reason}",
            hint="check the name, the network and HF_HOME, or give a tokenizer.json or a folder with one",
        ) from error
    own = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(own, Tokenizer):
        raise UsageError(
            f"the tokenizer {name} ({type(loaded).__name__}) is not one of the tokenizers library",
            hint="give a tokenizer that has a tokenizer.json",
        )
    content = own.to_str()
    description = json.loads(content)
    content_hash, text_hash = tokenizer_hashes(description, content.encode())  # before it is changed
    library = FastTokenizer(description, content)
    special_tokens: dict[str, str] = loaded.special_tokens_map
    return RecordTokenizer(
        path=name,
        content_hash=content_hash,
        earlier_hash=text_hash,
        bos=library.find(special_tokens.get("bos_token")),
        eos=library.find(special_tokens.get("eos_token")),
        begins_text=getattr(loaded, "add_bos_token", False) is True,
        ends_text=getattr(loaded, "add_eos_token", False) is True,
        template=choice.make(choose_template(loaded.chat_template, name), special_tokens, library.special_tokens),
        library=library,
        pad=library.find(special_tokens.get("pad_token")),
    )


def _silent_hub() -> str | None:
    """The address of the hub if it does not answer: transformers would try again for a minute, for each of its files.

    None also where HF_HUB_OFFLINE says that it is not to be asked.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER)
    except Exception:  # of whichever library makes the connection
        return str(constants.ENDPOINT)
    return None
