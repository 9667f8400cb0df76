"""chunkplan: plans long-context fine-tuning offline. Every command has its twin here: analyze, build, validate, ...

Names are imported when first used, so that `import chunkplan` and `chunkplan --help` stay instant.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkplan.version import __version__

if sys.platform == "win32":
    raise ImportError("chunkplan does not run on Windows: install it in WSL, which is Linux on Windows")

if TYPE_CHECKING:
    from chunkplan.building import build, build_like
    from chunkplan.config.intake import IntakeOptions
    from chunkplan.config.plan import PlanConfig
    from chunkplan.cost.hardware import load_hardware
    from chunkplan.cost.model import CostModel
    from chunkplan.cost.model_config import read_model_config
    from chunkplan.exporting.export import export
    from chunkplan.exporting.rows import pack
    from chunkplan.exporting.torch_pipelining import export_order
    from chunkplan.intake.reading import IntakeRequest, analyze
    from chunkplan.intake.shard import merge, write_shard
    from chunkplan.lengths import length_report
    from chunkplan.planfile.load import load_analysis, load_plan
    from chunkplan.reporting.chunk_view import view_chunk
    from chunkplan.reporting.difference import diff
    from chunkplan.reporting.page.write import write_report
    from chunkplan.reporting.per_step import per_step
    from chunkplan.reporting.plan_report import plan_report
    from chunkplan.reporting.record_view import view_record
    from chunkplan.reporting.token_text import open_tokenizer
    from chunkplan.schedule.trace import write_trace
    from chunkplan.simulation import compare_schedules, simulate_lengths, simulate_plan
    from chunkplan.summary import summarize_plan
    from chunkplan.tuning.options import TuneOptions
    from chunkplan.tuning.tune import tune
    from chunkplan.validation.validate import validate

__all__ = [
    "CostModel",
    "IntakeOptions",
    "IntakeRequest",
    "PlanConfig",
    "TuneOptions",
    "__version__",
    "analyze",
    "build",
    "build_like",
    "compare_schedules",
    "diff",
    "export",
    "export_order",
    "length_report",
    "load_analysis",
    "load_hardware",
    "load_plan",
    "merge",
    "open_tokenizer",
    "pack",
    "per_step",
    "plan_report",
    "read_model_config",
    "simulate_lengths",
    "simulate_plan",
    "summarize_plan",
    "tune",
    "validate",
    "view_chunk",
    "view_record",
    "write_report",
    "write_shard",
    "write_trace",
]

#: Public name -> the module that has it, which is imported when the name is first asked for.
HOMES = {
    "CostModel": "chunkplan.cost.model",
    "IntakeOptions": "chunkplan.config.intake",
    "IntakeRequest": "chunkplan.intake.reading",
    "PlanConfig": "chunkplan.config.plan",
    "TuneOptions": "chunkplan.tuning.options",
    "analyze": "chunkplan.intake.reading",
    "build": "chunkplan.building",
    "build_like": "chunkplan.building",
    "compare_schedules": "chunkplan.simulation",
    "diff": "chunkplan.reporting.difference",
    "export": "chunkplan.exporting.export",
    "export_order": "chunkplan.exporting.torch_pipelining",
    "length_report": "chunkplan.lengths",
    "load_analysis": "chunkplan.planfile.load",
    "load_hardware": "chunkplan.cost.hardware",
    "load_plan": "chunkplan.planfile.load",
    "merge": "chunkplan.intake.shard",
    "open_tokenizer": "chunkplan.reporting.token_text",
    "pack": "chunkplan.exporting.rows",
    "per_step": "chunkplan.reporting.per_step",
    "plan_report": "chunkplan.reporting.plan_report",
    "read_model_config": "chunkplan.cost.model_config",
    "simulate_lengths": "chunkplan.simulation",
    "simulate_plan": "chunkplan.simulation",
    "summarize_plan": "chunkplan.summary",
    "tune": "chunkplan.tuning.tune",
    "validate": "chunkplan.validation.validate",
    "view_chunk": "chunkplan.reporting.chunk_view",
    "view_record": "chunkplan.reporting.record_view",
    "write_report": "chunkplan.reporting.page.write",
    "write_shard": "chunkplan.intake.shard",
    "write_trace": "chunkplan.schedule.trace",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'chunkplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
