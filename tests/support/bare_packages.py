"""Lets modules of Megatron-Bridge be imported without its models, which need transformer_engine and so a GPU.

Its packages import these in their `__init__`; here they are packages with the same modules and nothing in `__init__`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGES = ("", ".data", ".data.builders", ".data.datasets", ".models", ".models.hf_pretrained", ".training")

_spec = importlib.util.find_spec("megatron")
for _folder in _spec.submodule_search_locations or [] if _spec else []:
    if Path(_folder, "bridge").is_dir():
        for _package in _PACKAGES:
            _module = ModuleType(f"megatron.bridge{_package}")
            _module.__path__ = [str(Path(_folder, "bridge", *_package.split(".")))]
            sys.modules[_module.__name__] = _module
