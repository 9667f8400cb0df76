"""Seeded synthetic lengths that the benchmarks are measured on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = ("long-tail", "uniform", "quarter", "triplet")


def lengths(kind: str, n: int, cap: int | None = 8192, seed: int = 20250302) -> npt.NDArray[np.int32]:
    """About n token counts of `kind`, none over `cap`; without a cap, only the long tail, up to 303,000.

    `long-tail`: chats with a few long documents, log-normal with 1 in 2,000 from a Pareto tail; 91 % below 1K, 99.5 %
    below 4K. `uniform`: 1 to cap. `quarter`: over a quarter and up to half of cap, so that three at most share a bin.
    `triplet`: cut from full bins, three from each, so that n / 3 bins are the optimum.
    """
    tag = {"long-tail": "lmsys"}.get(kind, kind)
    rng = np.random.default_rng([seed, n, sum(map(ord, tag)) if cap else 7])
    if kind == "long-tail":
        counts = np.exp(rng.normal(5.50, 1.074, n))
        in_tail = rng.random(n) < 5e-4
        counts[in_tail] = 8192.0 / (1 - rng.random(int(in_tail.sum())))
        return np.clip(counts, 16, min(303_000, cap or 303_000)).astype(np.int32)
    if cap is None:
        raise ValueError(f"{kind} lengths need a cap")
    quarter, half = cap // 4, cap // 2
    if kind == "uniform":
        return rng.integers(1, cap + 1, n, dtype=np.int32)
    if kind == "quarter":
        return rng.integers(quarter + 1, half + 1, n, dtype=np.int32)
    if kind == "triplet":
        first = rng.integers(int(0.38 * cap), int(0.49 * cap), n // 3)
        second = rng.integers(quarter + 1, np.minimum(cap - first - quarter - 1, half) + 1)
        triplets = np.concatenate([first, second, cap - first - second]).astype(np.int32)
        rng.shuffle(triplets)
        return triplets
    raise ValueError(f"there are no {kind} lengths, only {', '.join(KINDS)}")
