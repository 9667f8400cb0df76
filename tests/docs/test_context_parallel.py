"""What docs/context-parallel.md says of bytes and times is what the cost model computes."""

from __future__ import annotations

import re

import numpy as np
import pytest

import chunkplan
from chunkplan.cost.durations import attention_pairs_of
from chunkplan.cost.exchange import exchange_times
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "context-parallel.md").read_text(encoding="utf-8")
COST = chunkplan.CostModel()

pytestmark = pytest.mark.docs


def shown_ms(tokens: int, prefix: int, ranks: int, heads: int) -> tuple[float, float]:
    """What a layer's forward and backward wait for, of a chunk of `tokens` behind `prefix`."""
    columns = (np.array([value]) for value in (tokens, prefix, prefix // tokens + 1, ranks, heads))
    forward, backward, *_ = exchange_times(COST, *columns)
    return forward[0] / 1e6, backward[0] / 1e6


def test_the_example_has_the_bytes_and_times_of_the_cost_model() -> None:
    [table] = re.findall(r"^\| \| prefix 0 \| prefix 262,144 \|.*?\n\n", PAGE, re.M | re.S)
    row = r"^\| (.*?) \| ([\d,.]+) M?B?m?s? ?\| ([\d,.]+) (?:MB|ms) \|"
    rows = {name: figures for name, *figures in re.findall(row, table, re.M)}
    assert len(rows) == 6
    link = COST.hardware.gpu_link_bytes
    for column, prefix in enumerate((0, 262_144)):
        tokens = 4 * 8192
        attention = COST.rates.pair * attention_pairs_of(np.array([tokens]), np.array([prefix]))[0] / 4 / 1e6
        by_heads = shown_ms(tokens, prefix, 4, 4)
        by_pages = shown_ms(tokens, prefix, 4, 1)
        pages_mb = (prefix + tokens) * 2 * 512 * 2 * 3 / 4 / 1e6
        heads_mb = (by_heads[0] / 1e3 - 2 * COST.hardware.link_ns / 1e9) * link / 1e6
        expected = [heads_mb, pages_mb, 3 * pages_mb, attention, by_heads[0], by_pages[0]]
        assert by_heads[0] == by_heads[1] and by_pages[0] == by_pages[1]
        for (name, figures), value in zip(rows.items(), expected, strict=True):
            stated = figures[column].replace(",", "")
            decimals = len(stated.partition(".")[2])
            assert float(stated) == pytest.approx(value, abs=0.51 * 10**-decimals), name


def test_heads_are_predicted_to_pay_between_nodes_as_the_page_has_it() -> None:
    prose = " ".join(PAGE.split())
    [(alone, both)] = re.findall(r"pages alone show ([\d.]+) ms in a backward, .*? ([\d.]+) ms\.", prose)
    assert float(alone) == pytest.approx(shown_ms(16 * 2048, 0, 16, 1)[1], abs=0.006)
    assert float(both) == pytest.approx(shown_ms(16 * 2048, 0, 16, 4)[1], abs=0.006)
