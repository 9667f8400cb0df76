"""chunkplan: plans long-context fine-tuning offline. Every command has its twin here: analyze, build, validate, ...

Names are imported when first used, so that `import chunkplan` and `chunkplan --help` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkplan.version import __version__

if TYPE_CHECKING:
    from chunkplan.building import build
    from chunkplan.intake.analyze import analyze
    from chunkplan.lengths import length_report
    from chunkplan.planfile.load import load_analysis, load_plan
    from chunkplan.planning.config import PlanConfig
    from chunkplan.rows import pack
    from chunkplan.summary import summarize_plan
    from chunkplan.validation import validate

__all__ = [
    "PlanConfig",
    "__version__",
    "analyze",
    "build",
    "length_report",
    "load_analysis",
    "load_plan",
    "pack",
    "summarize_plan",
    "validate",
]

_HOMES = {
    "PlanConfig": "chunkplan.planning.config",
    "analyze": "chunkplan.intake.analyze",
    "build": "chunkplan.building",
    "length_report": "chunkplan.lengths",
    "load_analysis": "chunkplan.planfile.load",
    "load_plan": "chunkplan.planfile.load",
    "pack": "chunkplan.rows",
    "summarize_plan": "chunkplan.summary",
    "validate": "chunkplan.validation",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'chunkplan' has no attribute {name!r}")
