"""What no schema takes, whatever else is in the record: preference pairs, images, sound."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.fields import unsupported

#: The better and the worse answer of a pair: as most data have them, and as OpenAI does.
_PREFERENCES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))

#: The worse answer of a pair, as swift has it beside the better one.
_WORSE = ("rejected_response", "rejected_messages")

#: A record in which one of these says something is refused.
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "pixel_values", "input_features")

#: A record without these keys is not refused.
SUSPECT = frozenset((*(key for pair in _PREFERENCES for key in pair), *_WORSE, *MEDIA))


def refuse(record: JsonObject) -> None:
    """Raises RecordError where `record`, which has some of the `SUSPECT` keys, is more than text.

    Keys that are null or empty say nothing: tables have them in every row.
    """
    for better, worse in _PREFERENCES:
        if record.get(better) is not None and record.get(worse) is not None:
            unsupported(
                f"a preference pair (`{better}` and `{worse}`); one record has to be one sequence",
                hint=f"keep the {better.partition('_')[0]} answer as a record with `messages` or `prompt` and "
                "`completion`; the other is not trained then",
            )
    for key in _WORSE:
        if record.get(key):
            unsupported(
                f"a preference pair (`{key}` beside the better one); one record has to be one sequence",
                hint=f"remove `{key}`, which is not trained then: what is left is a record of its own",
            )
    refuse_media(record)


def refuse_media(fields: JsonObject, path: str = "") -> None:
    """Raises RecordError where `fields`, of a record or of the message at `path`, have media."""
    for key in MEDIA:
        if fields.get(key):
            name = f"{path}.{key}" if path else key
            unsupported(f"`{name}` beside the text: only text is planned", hint="leave records with media out")
