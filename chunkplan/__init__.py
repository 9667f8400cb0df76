"""chunkplan: plans long-context fine-tuning offline. Every command has its twin here: analyze, build, validate, ...

Names are imported when first used, so that `import chunkplan` and `chunkplan --help` stay instant.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("chunkplan does not run on Windows: install it in WSL, which is Linux on Windows")

if TYPE_CHECKING:
    from chunkplan.building import build as build
    from chunkplan.building import build_like as build_like
    from chunkplan.config.intake import IntakeOptions as IntakeOptions
    from chunkplan.config.plan import PlanConfig as PlanConfig
    from chunkplan.cost.hardware import load_hardware as load_hardware
    from chunkplan.cost.model import CostModel as CostModel
    from chunkplan.cost.model_config import read_model_config as read_model_config
    from chunkplan.exporting.export import export as export
    from chunkplan.exporting.rows import pack as pack
    from chunkplan.exporting.torch_pipelining import export_order as export_order
    from chunkplan.intake.reading import IntakeRequest as IntakeRequest
    from chunkplan.intake.reading import analyze as analyze
    from chunkplan.intake.shard import merge as merge
    from chunkplan.intake.shard import write_shard as write_shard
    from chunkplan.lengths import length_report as length_report
    from chunkplan.planfile.load import load_analysis as load_analysis
    from chunkplan.planfile.load import load_plan as load_plan
    from chunkplan.planning.step import plan_step as plan_step
    from chunkplan.planning.step import prewarm as prewarm
    from chunkplan.reporting.chunk_view import view_chunk as view_chunk
    from chunkplan.reporting.difference import diff as diff
    from chunkplan.reporting.page.write import write_report as write_report
    from chunkplan.reporting.per_step import per_step as per_step
    from chunkplan.reporting.plan_report import plan_report as plan_report
    from chunkplan.reporting.record_view import view_record as view_record
    from chunkplan.reporting.token_text import open_tokenizer as open_tokenizer
    from chunkplan.schedule.trace import write_trace as write_trace
    from chunkplan.simulation import (
        compare_schedules as compare_schedules,
    )
    from chunkplan.simulation import (
        simulate_lengths as simulate_lengths,
    )
    from chunkplan.simulation import (
        simulate_plan as simulate_plan,
    )
    from chunkplan.summary import summarize_plan as summarize_plan
    from chunkplan.tuning.options import TuneOptions as TuneOptions
    from chunkplan.tuning.tune import tune as tune
    from chunkplan.validation.validate import validate as validate
    from chunkplan.version import __version__ as __version__

#: Public name -> the module that has it, which is imported when the name is first asked for.
HOMES = {
    "__version__": "chunkplan.version",
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
    "plan_step": "chunkplan.planning.step",
    "prewarm": "chunkplan.planning.step",
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

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'chunkplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
