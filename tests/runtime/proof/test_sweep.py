"""What docs/models.md says of every type of causal language models is what their proofs say, here and now."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import version
from types import ModuleType

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()

#: By type: whether it is exact on one stage, and on two.
SAID = {
    name: (one == "exact", two == "exact")
    for name, one, two in re.findall(r"^\| (\S+) \| (.+?) \| (.+?) \|", PAGE, re.M)
}

#: One of each: an encoder, attention alone, states, and what is off.
FEW = ("bart", "llama", "mamba2", "openai-gpt")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("generate_models", ROOT / "docs" / "generate_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_models"] = module
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "docs"))
    return module


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.soak)
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_the_page_of_models_says_what_is_found(model_type: str, generate: ModuleType) -> None:
    if version("transformers") not in PAGE:
        pytest.skip("the page was written with another version of transformers")
    assert tuple(verdict.is_exact for verdict in generate.row(model_type)) == SAID[model_type]
