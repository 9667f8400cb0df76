"""Refuses to install where chunkplan cannot run; hatchling calls it before it builds anything."""

from __future__ import annotations

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Refuse(BuildHookInterface[Any]):
    """Locks of folders, signals and forked readers are those of POSIX systems."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise RuntimeError on Windows; pip prints it last."""
        if sys.platform == "win32":
            raise RuntimeError("chunkplan does not run on Windows: install it in WSL, which is Linux on Windows")
