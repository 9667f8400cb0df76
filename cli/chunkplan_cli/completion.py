"""What a shell completes where an option takes one of some names.

The names are written out: to import what they name takes longer than a key may. A test compares them with the
registries.
"""

from __future__ import annotations

from collections.abc import Callable

SCHEDULES = ("algorithm2", "1f1b", "interleaved", "zero-bubble", "search")
PACKERS = ("auto", "bfd", "mbs", "column-generation", "exact")
HARDWARE = ("a100", "h100", "h200")
ATTENTION = ("auto", "flash-attn-2", "torch-cuda", "torch-cpu", "reference")
SCHEMAS = (
    *("text", "messages", "conversations", "prompt+completion", "instruction", "question+answer", "input_ids"),
    "length",
)

Completer = Callable[[str], list[str]]


def one_of(names: tuple[str, ...]) -> Completer:
    """For `autocompletion=` of an option that takes one of `names`; the shell picks those that fit what is typed."""

    def complete(incomplete: str) -> list[str]:
        return list(names)

    return complete


def some_of(names: tuple[str, ...]) -> Completer:
    """For one that takes several with commas between: the last is completed."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name not in before.split(",")]

    return complete
