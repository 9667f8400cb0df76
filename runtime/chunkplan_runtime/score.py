"""`python -m chunkplan_runtime.score`, or under torchrun: writes log-probabilities of a plan's target tokens."""

from __future__ import annotations

import sys

from chunkplan_runtime.train import main

if __name__ == "__main__":
    sys.exit(main(scores=True))
