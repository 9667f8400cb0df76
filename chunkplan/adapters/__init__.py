"""Doors of other frameworks, one module each; none of these frameworks is imported before its module is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chunkplan.errors import ChunkplanError


@contextmanager
def value_errors() -> Iterator[None]:
    """Raise our errors as ValueError, which these frameworks raise of data and settings, with the hint."""
    try:
        yield
    except ChunkplanError as error:
        raise ValueError(f"{error}; {error.hint}") from error
