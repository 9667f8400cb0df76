"""What no schema takes, whatever else is in the record: preference pairs, images, sound."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.fields import unsupported

_PREFERENCE = ("chosen", "rejected")

#: The worse answer of a pair, as swift has it beside the better one.
_WORSE = ("rejected_response", "rejected_messages")

#: A record in which one of these says something is refused.
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "pixel_values", "input_features")

#: A record without these keys is not refused.
SUSPECT = frozenset((*_PREFERENCE, *_WORSE, *MEDIA))


def refuse(record: JsonObject) -> None:
    """Raises RecordError where `record`, which has some of the `SUSPECT` keys, is more than text.

    Keys that are null or empty say nothing: tables have them in every row.
    """
    if all(record.get(key) is not None for key in _PREFERENCE):
        unsupported(
            "a preference pair (`chosen` and `rejected`); one record has to be one sequence",
            hint="keep the chosen answer as a record with `messages` or `prompt` and `completion`",
        )
    for key in _WORSE:
        if record.get(key):
            unsupported(
                f"a preference pair (`{key}` beside the better one); one record has to be one sequence",
                hint=f"remove `{key}`: what is left is a record of its own",
            )
    refuse_media(record)


def refuse_media(fields: JsonObject, path: str = "") -> None:
    """Raises RecordError where `fields`, of a record or of the message at `path`, have media."""
    for key in MEDIA:
        if fields.get(key):
            name = f"{path}.{key}" if path else key
            unsupported(f"`{name}` beside the text: only text is planned", hint="leave records with media out")
