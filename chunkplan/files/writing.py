"""Files written whole or not at all, and over nothing that is read; errors of the system that a user can act on.

What must not stay behind is undone, whether its block ends or the process does in the middle of it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from chunkplan.errors import UsageError

_ROOM_HINT = "make room, or write to another disk"

_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IS_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}
_OTHER_HINTS = {
    errno.ENAMETOOLONG: "give a shorter name: until it is whole it has a longer one",
    errno.ELOOP: "links on the way to it lead to themselves: give another name",
}

_undoings: dict[object, Callable[[], None]] = {}

#: Held while something is made that is undone later, while it is undone, and where half of a change is none; for good
#: by who ends the process.
changing = threading.RLock()


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` when the block ends, or `end_process` ends the process in it.

    What may be there only if it is undone is made, and the block begun, while `changing` is held.
    """
    key = object()
    _undoings[key] = undo
    try:
        yield
    finally:
        with changing:
            del _undoings[key]
            undo()


def end_process(code: int, last_words: str = "") -> NoReturn:
    """End the process from any thread, whatever the others are doing: all is undone, and no word follows the last."""
    changing.acquire()
    for undo in reversed(_undoings.values()):
        with suppress(Exception):
            undo()
    stderr = sys.stderr
    with suppress(Exception):
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
        print(end=last_words, file=stderr, flush=True)
    os._exit(code)


@contextmanager
def filling(place: Path, *, hint: str = _ROOM_HINT) -> Iterator[None]:
    """Turn a full disk, while `place` is written, into a UsageError; errors of reading are raised as they are."""
    try:
        yield
    except OSError as error:
        if error.errno in _IS_FULL:
            raise UsageError(f"no room is left to write {_final(place)}: {_reason(error)}", hint=hint) from error
        raise


@contextmanager
def writing(place: Path, *, room_hint: str = _ROOM_HINT) -> Iterator[None]:
    """Turn errors of writing `place`, a file or what is below a folder, into a UsageError.

    Raises UsageError: no room is left (with the hint `room_hint`), or the place is not there or not ours to write.
    """
    try:
        with filling(place, hint=room_hint):
            yield
    except OSError as error:
        if error.errno in _IS_REFUSED:
            hint = _OTHER_HINTS.get(error.errno, "check that the folder is there, and its permissions")
            raise UsageError(f"cannot write {_final(place)}: {_reason(error)}", hint=hint) from error
        raise


def _final(place: Path) -> Path:
    """`place` by its final name: without the temporary names of folders on the way."""
    return Path(*(re.sub(r"^\.(.+)\.tmp-.+$", r"\1", part) for part in place.parts))


def _reason(error: OSError) -> str:
    """What the system says of an error, without what pyarrow puts before it."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Yield a file under a temporary name beside `path`, synced and then renamed when the block ends without an error.

    What a link points at is replaced, not the link; into a pipe or a device it is written as it comes. Raises
    UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        places = _target_and_temporary(path)
        if places is None:
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        target, temporary = places
        with ExitStack() as made:
            with changing:
                made.enter_context(undone(partial(temporary.unlink, missing_ok=True)))
                file = made.enter_context(temporary.open("w", encoding="utf-8"))
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)


def refuse_unwritable(path: Path) -> None:
    """Refuse what `whole_file` could not write, for who has much to compute first.

    Raises UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        places = _target_and_temporary(path)
        if places is not None:
            with changing, undone(partial(places[1].unlink, missing_ok=True)):
                places[1].touch()


def _target_and_temporary(path: Path) -> tuple[Path, Path] | None:
    """Where `path` is to be written, and its temporary name; None for a pipe or a device, which is not replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file in it")
    if path.exists() and not path.is_file():
        return None
    target = Path(os.path.realpath(path))
    return target, target.parent / f".{target.name}.tmp-{os.getpid()}"


def refuse_overwriting(output: Path, inputs: Iterable[Path | str | None]) -> None:
    """Refuse to write `output` over one of `inputs`, or into a folder that is one.

    Raises UsageError: naming the input.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        if path is not None and target.is_relative_to(os.path.realpath(path)):
            raise UsageError(
                f"writing {output} would damage {path}, which is read", hint="give the output another name, elsewhere"
            )
