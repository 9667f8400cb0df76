"""Hash of a tokenizer.json by its encoding: equal for all files that give every text the same tokens.

It does not depend on white space, the order of keys, truncation, padding, the decoder and offsets, nor on the version
of the library: entries that are null, false or empty are left out, merges may be texts or pairs, and older names of
settings are replaced by those of the installed library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models

#: An object of JSON.
_Object = Mapping[str, Any]

#: The id of the text in what is put around it.
_TEXT = 2**32 - 1


def tokenizer_hash(description: _Object) -> str:
    """SHA-256 of what a tokenizer.json encodes.

    Raises:
        ValueError: it describes no tokenizer.
    """
    try:
        model = dict(description["model"])
        added = sorted(description.get("added_tokens") or (), key=lambda token: token["id"])
        merges = [one if isinstance(one, str) else " ".join(one) for one in model.pop("merges", None) or ()]
        vocabulary = model.pop("vocab")
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        off: _Object = {"added_tokens": [], "truncation": None, "padding": None}
        steps = Tokenizer.from_str(json.dumps({**description, **off, "model": empty}))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(str(error)) from error
    written = json.loads(steps.to_str())
    said = [_said(part) for part in (model, added, written["normalizer"], written["pre_tokenizer"])]
    parts = [*said, _put_around(steps), merges, vocabulary]
    encoded = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()  # no msgspec: the runtime hashes too
    return hashlib.sha256(encoded).hexdigest()


def _said(value: Any) -> Any:
    """`value` without entries that say nothing, and without those of offsets."""
    if isinstance(value, dict):
        some = {key: _said(each) for key, each in value.items() if key != "trim_offsets"}
        return {key: each for key, each in some.items() if each is not None and each is not False and each != ""}
    return [_said(each) for each in value] if isinstance(value, list) else value


def _put_around(steps: Tokenizer) -> list[int]:
    """The tokens that are put around a text, which stands for itself with one id."""
    text = Tokenizer(models.WordLevel({"a": _TEXT}, unk_token="a"))
    return list(steps.post_process(text.encode("a")).ids)
