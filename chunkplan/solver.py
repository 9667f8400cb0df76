"""CP-SAT as all searches here use it: with the same answer on every machine, as effort is counted, not timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def deterministic_solver(effort: float) -> cp_model.CpSolver:
    """A solver on one thread that stops after `effort` deterministic seconds of CP-SAT."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # its handler would end the process from another thread
    solver.parameters.max_deterministic_time = effort
    return solver
