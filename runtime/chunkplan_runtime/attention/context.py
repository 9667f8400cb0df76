"""What the attention of a chunk knows beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chunkplan_runtime.attention.kernel import Kernels
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.spans import Span


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a chunk: a part of a split sequence, or whole sequences with `borders` from 0 on."""

    start: int
    stop: int
    part: Span | None = None
    borders: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ChunkContext:
    """What the attention of a chunk has to know beyond its tensors. The spans lie side by side and cover the chunk.

    `windows`: the sliding window of each layer, None for full attention; empty where no layer has one. `seed`: of its
    dropout.
    """

    spans: Sequence[Span]
    store: StateStore
    kernels: Kernels
    causal: bool = True
    windows: Sequence[int | None] = ()
    seed: int | None = None

    @cached_property
    def ranges(self) -> list[TokenRange]:
        """The chunk as the attention takes it: every part by itself, whole sequences side by side in one range."""
        ranges: list[TokenRange] = []
        borders: list[int] = []

        def close() -> None:
            if borders:
                relative = tuple(border - borders[0] for border in borders)
                ranges.append(TokenRange(borders[0], borders[-1], borders=relative))
                borders.clear()

        for span in self.spans:
            if span.is_split:
                close()
                ranges.append(TokenRange(span.chunk_start, span.chunk_stop, part=span))
            else:
                borders.extend([span.chunk_start, span.chunk_stop] if not borders else [span.chunk_stop])
        close()
        return ranges
