"""The entry point of `chunkplan`: Ctrl-C ends it in words from its first moment to its last, whatever it imports."""

from __future__ import annotations

import signal
import sys

#: The exit code of an interrupted command, as shells have it: 128 and the number of SIGINT.
INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit."""
    try:
        from chunkplan_cli.app import run_command  # the most of the time that a command takes to begin

        run_command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:  # of what is imported before anything is run
        _report_missing(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and Python takes a while to end


def _report_missing(error: ModuleNotFoundError) -> None:
    from chunkplan.extras import not_installed

    missing = not_installed(error)
    if missing is None:
        raise error
    print(f"error: {missing}\nhint: {missing.hint}", file=sys.stderr)
    sys.exit(missing.exit_code)


if __name__ == "__main__":
    main()
