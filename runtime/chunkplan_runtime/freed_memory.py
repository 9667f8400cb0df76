"""Has memory of the host that is freed go back to the system at once, while a model is loaded or saved.

As blocks of some size are freed, glibc takes the next ones of that size, up to 32 MiB, from its heap, where what is
freed between others stays with the process: up to a tenth of its share of a model, more in some runs than in others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

#: As glibc's malloc.h has them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

#: From this size on, blocks are not taken from the heap, at first and at most.
_LEAST, _MOST = 1 << 17, 1 << 25


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Within the block all tensors of 128 KiB and more are blocks of their own; afterwards, those of 32 MiB and more.

    The latter is what glibc comes to by itself in a run on a CPU. With another C library nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # that has no such function, or is not one that can be asked
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LEAST)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, 2 * _MOST)
