"""The entry point of `chunkplan`: Ctrl-C ends it in words from its first moment to its last, whatever it imports."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

#: The exit code of an interrupted command, as shells have it: 128 and the number of SIGINT.
INTERRUPTED = 130

#: Commands in which Python raises what a signal asks for: they end other processes, or write a checkpoint. All others
#: spend their time in compiled code, which crashes where it finds that Python has raised something in it.
_RAISING = ("analyze", "gain", "merge", "train")


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault("NUMBA_OPT", "1")  # compiles sooner; the planner's loops run as fast as with 3
    try:
        from chunkplan_cli.app import run_command  # the most of the time that a command takes to begin

        with nullcontext() if set(_RAISING).intersection(sys.argv[1:2]) else _ended_by_signals():
            run_command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:  # of what is imported before anything is run
        _report_missing(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and Python takes a while to end


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """In the block a thread waits for Ctrl-C and SIGTERM, and ends the process: no other thread ever gets them."""
    from chunkplan.files.writing import changing, end_process

    numbers = {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN}

    def end() -> None:
        number = signal.sigwait(numbers)
        end_process(128 + number, "interrupted\n" if number == signal.SIGINT else "")

    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # threads that are started later inherit this
    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    finally:
        changing.acquire()  # for good: all is done, and nothing is undone any more


def _report_missing(error: ModuleNotFoundError) -> None:
    from chunkplan.extras import not_installed

    missing = not_installed(error)
    if missing is None:
        raise error
    print(f"error: {missing}\nhint: {missing.hint}", file=sys.stderr)
    sys.exit(missing.exit_code)


if __name__ == "__main__":
    main()
