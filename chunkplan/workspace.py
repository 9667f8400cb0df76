"""The workspace: the folder of the latest analysis and the latest plan, with optional settings of its own."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from chunkplan.errors import DataError

_SETTINGS = "workspace.toml"
_KEYS = ("tokenizer",)

#: What names a tokenizer rather than where it lies.
_NAME = re.compile(r"tiktoken:.+|[\w-][\w.-]*/[\w.-]+")
_HINT = 'the one setting is tokenizer = "FOLDER", relative to the workspace'


@dataclass(frozen=True)
class Workspace:
    """A workspace folder, which need not exist yet."""

    root: Path

    @classmethod
    def find(cls, option: Path | None = None) -> Workspace:
        """Return the workspace named by `option`, else by CHUNKPLAN_WORKSPACE, else `./chunkplan-out`."""
        return cls(option or _environment("CHUNKPLAN_WORKSPACE") or Path("chunkplan-out"))

    @property
    def analysis(self) -> Path:
        """The folder of the latest analysis."""
        return self.root / "analysis"

    @property
    def plan(self) -> Path:
        """The folder of the latest plan."""
        return self.root / "plan"

    @property
    def cache(self) -> Path:
        """The folder of what analyses have done before."""
        return self.root / "cache"

    def tokenizer(self) -> str | None:
        """Read the `tokenizer` entry of the optional `workspace.toml`: a path relative to the workspace, or a name.

        Raises:
            DataError: the file is not TOML, has an unknown key, or the entry is not a path.
        """
        path = self.root / _SETTINGS
        if not path.is_file():
            return None
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(f"not TOML: {error}", where=str(path), hint=_HINT) from error
        for key in settings:
            if key not in _KEYS:
                raise DataError(f"unknown key `{key}`, expected {', '.join(_KEYS)}", where=str(path), hint=_HINT)
        value = settings.get("tokenizer")
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise DataError(f"`tokenizer` is {value!r}, expected a path in quotes", where=str(path), hint=_HINT)
        return value if _NAME.fullmatch(value) and not (self.root / value).exists() else str(self.root / value)


def find_tokenizer(option: str | None, workspace: Workspace) -> str | None:
    """Return the tokenizer named by `option`, else by CHUNKPLAN_TOKENIZER, else by the workspace; or None."""
    return option or os.environ.get("CHUNKPLAN_TOKENIZER") or workspace.tokenizer()


def _environment(name: str) -> Path | None:
    """Return the path in an environment variable; an empty one counts as not set."""
    value = os.environ.get(name)
    return Path(value) if value else None
