"""A plan and a tuning of its data, made once for all tests of pages."""

from __future__ import annotations

from typing import Any

import pytest

from chunkplan.planfile.plan import Plan
from tests.support.page_cases import build_plan, tuning_of


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return build_plan(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="session")
def tuning(plan: Plan) -> dict[str, Any]:
    return tuning_of(plan.path.parent)
