"""Worker processes that have imported torch: every case makes a new process group of some of them."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds that a case may take: what waits longer for another process never ends.
TIMEOUT = 90


class ProcessPool:
    """`run(world_size, function, **arguments)` calls a module's function on ranks 0 to world_size - 1 at once.

    Unless `joined`, the function makes its process group itself, and its processes end with it.
    """

    def __init__(self, joined: bool) -> None:
        self._joined = joined
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What the function returned, by rank."""
        while len(self._workers) < world_size:
            self._start(len(self._workers))
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store") if self._joined else None
            task = (world_size, store, function.__module__, function.__qualname__, arguments)
            for _, pipe in self._workers[:world_size]:
                pipe.send(task)
            answers = self._answers(world_size)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in sorted(answers.items()) if error]
        if errors or not self._joined:  # others may still wait for the one that failed, and a watchdog end them
            self.stop()
        assert not errors, "\n".join(errors)
        return [answers[rank][1] for rank in range(world_size)]

    def stop(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def _start(self, rank: int) -> None:
        # Forked from a process that has imported what all of them need, once.
        context = multiprocessing.get_context("forkserver")
        cases = ["tests.support.distributed_cases", "tests.support.training_cases"]
        context.set_forkserver_preload([*cases, "chunkplan.simulation"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()  # else its end would not be noticed
        self._workers.append((process, ours))

    def _answers(self, world_size: int) -> dict[int, tuple[str | None, Any]]:
        """Errors and values by rank; after an error those that come at once, for others may deadlock."""
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        answers: dict[int, tuple[str | None, Any]] = {}
        while len(answers) < world_size:
            failed = any(error for error, _ in answers.values())
            waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
            ready = [pipe for pipe in wait(waiting, 1 if failed else TIMEOUT) if isinstance(pipe, Connection)]
            if not ready:
                missing = {ranks[pipe]: (f"no answer within {TIMEOUT} s", None) for pipe in waiting}
                return answers if failed else {**answers, **missing}
            for pipe in ready:
                try:
                    answers[ranks[pipe]] = pipe.recv()
                except EOFError:
                    process = self._workers[ranks[pipe]][0]
                    process.join(5)
                    answers[ranks[pipe]] = f"ended with {process.exitcode}", None
        return answers


def _work(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            world_size, store, module, name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if store:
                dist.init_process_group(
                    "gloo", f"file://{store}", timedelta(seconds=TIMEOUT), world_size=world_size, rank=rank
                )
            function = getattr(importlib.import_module(module), name)
            value = function(rank, **arguments)
            if dist.is_initialized():  # before the answer, after which the folder of its file goes
                dist.destroy_process_group()
            pipe.send((None, value))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
