"""The workspace: the folder of the latest analysis, tuning, plan and run, with optional settings of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkplan.config.intake import IntakeOptions
from chunkplan.domains import Domain
from chunkplan.options import Options, option, read_settings, same

_SETTINGS = "workspace.toml"

#: Prefixes and forms of tokenizer names that are no paths.
_NAME = re.compile(r"tiktoken:.+|[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class WorkspaceSettings(Options):
    """Settings file of a workspace: the tokenizer, and the layout of the records of sources."""

    tokenizer: str | None = option(
        Domain(lambda value: isinstance(value, str) and value != "", "the path of a tokenizer in quotes, or its name"),
        "A tokenizer: a path relative to the workspace, or a name.",
        group="",
        default=None,
    )
    schema: str | None = same(IntakeOptions, "schema")
    formats: Mapping[str, str] = same(IntakeOptions, "formats")
    columns: Mapping[str, str] = same(IntakeOptions, "columns")


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
    def tuning(self) -> Path:
        """The file of the latest tuning."""
        return self.root / "tuning.json"

    @property
    def run(self) -> Path:
        """The folder of a training run that was given no other."""
        return self.root / "run"

    @property
    def cache(self) -> Path:
        """The folder of what analyses have done before."""
        return self.root / "cache"

    @property
    def file(self) -> Path:
        """The file of its settings, which need not be there."""
        return self.root / _SETTINGS

    def settings(self) -> Mapping[str, Any]:
        """The `WorkspaceSettings` in its file, by field; none where there is no file.

        Raises:
            UsageError: the file is not TOML, or an entry is unknown or not what it may be.
        """
        return read_settings(self.file, WorkspaceSettings) if self.file.is_file() else {}

    def tokenizer(self) -> str | None:
        """The tokenizer that its settings name, or None; a path is made one from the current folder.

        Raises:
            UsageError: as `settings`.
        """
        value = self.settings().get("tokenizer")
        if value is None:
            return None
        return value if _NAME.fullmatch(value) and not (self.root / value).exists() else str(self.root / value)


def find_tokenizer(option: str | None, workspace: Workspace) -> str | None:
    """Return the tokenizer named by `option`, else by CHUNKPLAN_TOKENIZER, else by the workspace; or None."""
    return option or os.environ.get("CHUNKPLAN_TOKENIZER") or workspace.tokenizer()


def _environment(name: str) -> Path | None:
    """Return the path in an environment variable; an empty one counts as not set."""
    value = os.environ.get(name)
    return Path(value) if value else None
