"""Whether the disk has room for what is about to be written: asked before, so that little fails halfway."""

from __future__ import annotations

import shutil
from pathlib import Path

from chunkplan.errors import UsageError

#: Room that is left to others: as much as is written, and no more than this.
RESERVE_BYTES = 256 << 20

#: Bytes that are stored for a byte of text where tokens are long, and where every character is one.
LEAST, MOST = 0.6, 5.5

ROOM_HINT = (
    "make room, put --workspace elsewhere, or store lengths only with --no-tokens; what was finished is not done again"
)


def check_room(folder: Path, num_bytes: float, what: str) -> None:
    """Refuse to begin `what`, which writes about `num_bytes` below `folder`, where there is no room for it.

    Raises:
        UsageError: the disk has less than that, and a reserve.
    """
    while not folder.exists():
        folder = folder.parent
    free, reserve = shutil.disk_usage(folder).free, min(num_bytes, RESERVE_BYTES)
    if free < num_bytes + reserve:
        place = next(place for place in (folder, *folder.parents) if ".tmp-" not in place.name)
        raise UsageError(
            f"{what} takes about {_size(num_bytes)}, {_size(reserve)} are to stay free, and {place} has {_size(free)} "
            "left",
            hint=ROOM_HINT,
        )


def _size(num_bytes: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= size), ("KB", 1e3))
    return f"{num_bytes / size:,.1f} {unit}"
