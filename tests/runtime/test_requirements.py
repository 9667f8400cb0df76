"""What is asked for before a run: torch and transformers, without the noise of what comes with them."""

from __future__ import annotations

import sys
from importlib import import_module
from unittest import mock

import pytest

from chunkplan.errors import UsageError
from chunkplan_runtime import require_torch

#: What bitsandbytes does when peft imports it on a CPU.
WARNS = """
import logging
logging.getLogger(__name__).warning("Failed to load CPU gemm_4bit_forward from kernels-community")
"""


def test_bitsandbytes_does_not_warn_of_a_package_that_nobody_asked_for(tmp_path, monkeypatch, caplog):
    """A package of this name stands for the real one, which is not installed everywhere."""
    folder = tmp_path / "bitsandbytes" / "backends" / "cpu"
    folder.mkdir(parents=True)
    (folder / "ops.py").write_text(WARNS)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    require_torch()
    with mock.patch.dict(sys.modules):  # which puts back the real one and takes away this one
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
            del sys.modules[name]
        import_module("bitsandbytes.backends.cpu.ops")
    assert [record for record in caplog.records if record.name.startswith("bitsandbytes")] == []


def test_transformers_without_tokenizers_is_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="tokenizers is not installed") as refused:
        require_torch()
    assert refused.value.hint.startswith("pip install 'tokenizers")
