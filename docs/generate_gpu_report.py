"""Writes docs/gpu-report.md from the files in benchmarks/measured/, as `make gpu-report` does when it has measured."""

from __future__ import annotations

import runpy
from pathlib import Path

from page_writing import write_page

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

if __name__ == "__main__":
    write_page("gpu-report.md", [runpy.run_path(str(BENCHMARKS / "gpu_page.py"))["page"](BENCHMARKS / "measured")])
