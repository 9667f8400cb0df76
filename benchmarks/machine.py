"""What figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*packages: str) -> dict[str, str | int | None]:
    """Name processor, cores, Python, and the versions of `packages`, None for those that are not installed."""
    found: dict[str, str | int | None] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    """The name that the processor gives itself."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
