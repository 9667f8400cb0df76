"""The trainer on processes that share sequences leaves what one process leaves, and refuses what it cannot do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkplan import PlanConfig, build, load_plan
from chunkplan_runtime.train import main
from tests.runtime.distributed.test_train import all_well, options, same_run, together
from tests.support.analyses import write_analysis
from tests.support.ports import free_port
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.shared_plans import given_blocks
from tests.support.sharing_cases import stalled_exchange
from tests.support.training_checks import hidden_files, lines, same_weights

LENGTHS = [33, 6, 14, 40, 3, 25, 12, 9, 33, 14, 40, 25]

#: Plans of the same steps: name -> their ranks and stages, and who shares what, see `given_blocks`.
PLANS: dict[str, tuple[dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "one": ({}, {}),
    "heads": ({"dp": 4}, {40: (0, 4, 4), 33: (0, 4, 2), 25: (2, 2, 2)}),
    "pages": ({"dp": 4}, {40: (0, 4, 1), 33: (0, 2, 1), 25: (2, 2, 1)}),
    "pipes": ({"dp": 2, "pp": 2}, {40: (0, 2, 1), 33: (0, 2, 2), 14: (0, 2, 2)}),
    "eight": ({"dp": 8}, {40: (0, 8, 4), 33: (0, 4, 2), 25: (4, 2, 2), 14: (6, 2, 1)}),
    "six": ({"dp": 6}, {40: (0, 2, 2), 33: (0, 6, 1)}),
    "equal": ({"dp": 2, "k": 1, "equal_chunks": True}, {40: (0, 2, 1)}),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4, joined=False) as started:
        yield started


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Any], random_sequences: Callable[..., Any]
) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_analysis(folder / "analysis", random_sequences(LENGTHS, seed=4))
    for name, (layout, blocks) in PLANS.items():
        settings = {"chunk_size": 6, "k": 2, "global_batch": 3, "epochs": 3, "holdout": 2, **layout}
        with given_blocks(blocks):
            build(folder / "analysis", folder / name, PlanConfig(**settings, cp="auto"), workers=1)
        shared = set(load_plan(folder / name).chunks().column("cp_size").to_pylist()) - {1} if blocks else set()
        assert shared == {size for _, size, _ in blocks.values()}
    config = tiny_config("qwen2", num_key_value_heads=4)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "layouts",
    [
        [(4, "pipes", ("--kv-offload",)), (4, "pipes", ("--sharding", "weights"))],
        pytest.param(
            [
                *((4, "heads", ()), (4, "pages", ("--checkpointing", "keep-attention")), (4, "eight", ())),
                *((2, "eight", ()), (2, "pipes", ()), (3, "six", ()), (1, "eight", ())),
            ],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["few", "others"],
)
def test_every_layout_that_shares_sequences_trains_as_one_process_does(
    layouts: list[tuple[int, str, tuple[str, ...]]], made: Path, tmp_path: Path, pool: ProcessPool
) -> None:
    more = ("--precision", "fp64", "--eval-every", 1, "--save-every", 0, "--max-steps", 2, "--log-sequences")
    assert main(options(made, tmp_path / "one", *more, plan="one")) == 0
    of_each = lines(tmp_path / "one" / "sequences.jsonl")
    for place, (size, plan, how) in enumerate(layouts):
        output = tmp_path / f"{place}-{plan}-{size}"
        said = all_well(pool, size, options(made, output, *more, *how, plan=plan))
        same_run(tmp_path / "one", output)
        found = lines(output / "sequences.jsonl")
        places = [(row["step"], row["sequence_id"], row["target_tokens"]) for row in found]
        assert sorted(places) == sorted((row["step"], row["sequence_id"], row["target_tokens"]) for row in of_each)
        losses = {(row["step"], row["sequence_id"]): row["loss"] for row in found}
        assert losses == pytest.approx({(row["step"], row["sequence_id"]): row["loss"] for row in of_each}, rel=1e-12)
        assert ("for shared sequences; made in" in said) == ((size, plan) not in [(1, "eight"), (2, "pipes")])
        assert size == 1 or json.loads((output / "measured.json").read_text())["processes"]
        assert hidden_files(output) == []


@pytest.mark.soak
@pytest.mark.parametrize("size", [4, 2])
def test_a_run_that_shares_sequences_goes_on_on_other_numbers_of_processes(
    made: Path, tmp_path: Path, pool: ProcessPool, size: int
) -> None:
    """Written by four, read by four bit for bit, or by two, of which each joins four ranks."""
    more = ("--precision", "fp64", "--save-every", 2, "--max-steps", 3)
    arguments = options(made, tmp_path / "run", *more, plan="eight")
    all_well(pool, 4, arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "final")
    assert "resumed   at step 2" in all_well(pool, size, [*arguments, "--resume"])
    same_run(tmp_path / "run", tmp_path / "whole", tolerance=1e-10)
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final") or size < 4


def test_what_cannot_be_shared_is_refused_by_name(
    made: Path, tmp_path: Path, pool: ProcessPool, tiny_config: Callable[..., Any]
) -> None:
    (tmp_path / "two.json").write_text(json.dumps(tiny_config("qwen2", num_key_value_heads=2)))
    heads = "4 processes cannot share the model's 2 key and value heads evenly"
    for size, plan, more, message, hint in (
        (4, "heads", ("--model-config", tmp_path / "two.json"), heads, "--model-config"),
        (2, "six", (), "processes of 3 data-parallel ranks each cannot share what ranks 0 to 1", "with 1 or 3 or 6"),
    ):
        told = together(pool, size, options(made, tmp_path / "run", *more, plan=plan))
        assert [code for code, _ in told] == [2] * size
        [said] = [text for _, text in told if text]
        assert message in said and hint in said
    # Before weights are loaded, of which there are none here.
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "two.json", tmp_path / "two" / "config.json")
    where = {"--plan": made / "heads", "--model": tmp_path / "two", "--output": tmp_path / "run", "--device": "cpu"}
    told = together(pool, 4, [str(word) for pair in where.items() for word in pair])
    assert "".join(text for _, text in told).count(heads) == 1
    assert not (tmp_path / "run").exists()
    # Two processes that run two ranks each have half as many heads to share.
    how = ("--model-config", tmp_path / "two.json", "--max-steps", 1, "--save-every", 0)
    all_well(pool, 2, options(made, tmp_path / "run", *how, plan="heads"))


def test_a_process_that_waits_for_a_page_says_for_which_and_for_whom(
    made: Path, tmp_path: Path, pool: ProcessPool
) -> None:
    arguments = options(made, tmp_path / "run", "--max-steps", 1, "--save-every", 0, plan="pages")
    told = pool.run(4, stalled_exchange, size=4, port=free_port(), arguments=[arguments])
    pool.stop()
    assert [code for code, _ in told] == [0] * 4
    who = re.escape("warning: process 1 of 4 (data parallel) has not moved for 500.0 ms: ")
    place = r"step 0, rank 1, in the forward(_kv)? of chunk 0, fetching the page of tokens 0 to \d+ of sequence \d+ "
    assert re.search(rf"^{who}{place}from process(es)? 0", told[1][1], re.M)
