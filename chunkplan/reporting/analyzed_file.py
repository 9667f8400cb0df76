"""A file and the analysis that it may be a source of, wherever both are looked at from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from chunkplan.config.intake import IntakeOptions
from chunkplan.planfile.analysis import Analysis


class AnalyzedFile(NamedTuple):
    """A file: where it is, which source of the analysis it is, if any, and whether its size is another one now."""

    path: str
    source: int | None
    has_changed: bool


def find_analyzed(analysis: Analysis, path: str) -> AnalyzedFile:
    """Find the file `path`, and itself among the sources of `analysis`.

    Relative paths are looked for here, and from each folder above the analysis.
    """
    folders: list[str | Path] = ["", *analysis.path.resolve().parents]
    here = next((str(place) for folder in folders if (place := Path(folder, path)).is_file()), None)
    if here is None:
        return AnalyzedFile(path, None, False)
    for number, source in enumerate(analysis.manifest.get("sources", ())):
        places = (Path(folder, source["path"]) for folder in folders)
        found = next((place for place in places if place.is_file()), None)
        if found is not None and found.samefile(here):
            return AnalyzedFile(here, number, source["bytes"] not in (None, found.stat().st_size))
    return AnalyzedFile(here, None, False)


def options_for(analysis: Analysis, file: AnalyzedFile) -> IntakeOptions:
    """How records of a file are read as `analysis` has read its own.

    How these are laid out says nothing of a file that is no source of it.
    """
    options = analysis.options or IntakeOptions()
    if file.source is not None:
        return options
    return replace(options, schema=None, formats={}, columns={}, ignore_columns=())
