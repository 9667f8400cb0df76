"""What a check says of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """The first place where an invariant is broken, and how many there are."""

    invariant: str
    message: str
    step: int | None = None
    dp_rank: int | None = None
    chunk_id: int | None = None
    count: int = 1

    @property
    def where(self) -> str:
        """`step 3, rank 0, chunk 2`, as far as it is known."""
        names = (("step", self.step), ("rank", self.dp_rank), ("chunk", self.chunk_id))
        return ", ".join(f"{name} {value}" for name, value in names if value is not None)
