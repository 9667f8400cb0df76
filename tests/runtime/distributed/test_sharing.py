"""Processes that share sequences have the gradients of whole sequences, by heads, by pages and by both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chunkplan import PlanConfig, build, validate
from tests.runtime.distributed.test_gradients import check, four_layers
from tests.support.analyses import write_analysis
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.shared_plans import given_blocks

#: Two shared sequences, one of a single chunk, and those that are packed, split and alone beside them.
LENGTHS = [97, 5, 9, 3, 26, 30, 8]

#: Of a sequence of so many tokens the first rank, how many share it, and how many of them share heads.
BY_HEADS = {97: (0, 4, 4), 26: (2, 2, 2)}
BY_PAGES = {97: (0, 4, 1), 26: (2, 2, 1)}
BY_BOTH = {97: (0, 4, 2), 26: (2, 2, 2), 30: (0, 2, 1)}
WAYS = {"heads": BY_HEADS, "pages": BY_PAGES, "both": BY_BOTH}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as started:
        yield started


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Any], random_sequences: Callable[..., Any]
) -> Callable[..., dict[str, Path]]:
    """`make(blocks, model, **settings of the plan)`: see `given_blocks`."""

    def make(
        blocks: Mapping[int, tuple[int, ...]], model: dict[str, Any] | None = None, **plan: Any
    ) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("sharing")
        write_analysis(folder / "analysis", random_sequences(LENGTHS, seed=3))
        settings = {"chunk_size": 8, "k": 2, "dp": 4, "cp": "auto", "global_batch": len(LENGTHS), **plan}
        with given_blocks(blocks):
            built = build(folder / "analysis", folder / "plan", PlanConfig(**settings), workers=1)
        assert validate(built.path).ok
        shapes = {(chunk.cp_size, chunk.cp_heads) for chunk in next(built.iter_steps()).chunks[0]}
        assert shapes >= {(block[1], block[2]) for block in blocks.values() if block[0] == 0}
        config = tiny_config(**four_layers({"num_key_value_heads": 4, **(model or {"model_type": "qwen2"})}))
        (folder / "config.json").write_text(json.dumps(config))
        return {"plan": folder / "plan", "config": folder / "config.json"}

    return make


@pytest.mark.parametrize("k", [1, 2, 100])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_sequences_have_the_gradients_of_one_process(
    pool: ProcessPool, made: Any, way: str, k: int
) -> None:
    check(pool, 4, made(WAYS[way], k=k), evaluates=True)
