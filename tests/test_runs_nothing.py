"""No file that is read is run: no pickle, no code of a model, no name that is looked up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import analyze, load_analysis
from chunkplan.errors import ChunkplanError
from tests.support.places import ROOT

#: Modules that run what they read, and calls that do, unless they are given the arguments named.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
ONLY_WITH = {
    ("torch", "load"): {"weights_only": True},
    ("np", "load"): {"allow_pickle": False},
    ("AutoConfig", "from_pretrained"): {"trust_remote_code": False},
    ("AutoTokenizer", "from_pretrained"): {"trust_remote_code": False},
    ("loader", "from_pretrained"): {"trust_remote_code": False, "use_safetensors": True},
    ("AutoModelForCausalLM", "from_pretrained"): {"trust_remote_code": False, "use_safetensors": True},
}


@pytest.mark.parametrize("folder", ["chunkplan", "runtime/chunkplan_runtime", "cli/chunkplan_cli", "examples"])
def test_nothing_that_is_read_is_run(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file.name}:{line}: {what}" for file in files for line, what in dangers(ast.parse(file.read_text()))]
    assert not found


def test_what_would_be_run_is_noticed() -> None:
    source = "import pickle\nfrom marshal import loads\neval('1')\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n"
    source += "AutoModel.from_pretrained(f)\nnp.load(f, allow_pickle=False)\nre.compile('x')\nmodel.eval()\n"
    source += "import yaml\nyaml.safe_load(f)\nyaml.load(f)\nfrom yaml import load\n"
    assert sorted(line for line, _ in dangers(ast.parse(source))) == [1, 2, 3, 4, 5, 6, 12, 13]


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of all in a module that could run what a file says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {module.partition(".")[0], *(alias.name.partition(".")[0] for alias in node.names)}
            if names & FORBIDDEN_MODULES or module == "yaml":
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and not is_harmless(node):
            yield node.lineno, ast.unparse(node)


def is_harmless(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id not in FORBIDDEN_CALLS
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return True
    owner, name = call.func.value.id, call.func.attr
    if owner == "yaml":
        return name == "safe_load"
    if name != "from_pretrained" and (owner, name) not in ONLY_WITH:
        return True
    given = {keyword.arg: keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)}
    return (owner, name) in ONLY_WITH and ONLY_WITH[owner, name].items() <= given.items()


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_objects_in_a_file_of_lengths_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([Trap(tmp_path / "sprung")], object), allow_pickle=True)
    with pytest.raises(ChunkplanError):
        load_analysis(tmp_path / "lengths.npy")
    with pytest.raises(ChunkplanError):
        analyze(tmp_path / "lengths.npy", tmp_path / "analysis", cache=tmp_path / "cache")
    assert not (tmp_path / "sprung").exists()
