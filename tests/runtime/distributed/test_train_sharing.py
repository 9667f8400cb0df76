"""The trainer on processes that share sequences leaves what one process leaves, and refuses what it cannot do."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from chunkplan import PlanConfig, build, build_like, load_plan
from chunkplan_runtime.train import main
from tests.runtime.distributed.test_train import options
from tests.support.analyses import write_analysis
from tests.support.shared_plans import given_blocks
from tests.support.sharing_cases import stalled_exchange
from tests.support.training_cases import all_well, together
from tests.support.training_checks import hidden_files, lines, same_run, same_weights

LENGTHS = [33, 6, 14, 40, 3, 25, 12, 9, 33, 14, 40, 25]

#: Plans of the same steps: name -> their ranks and stages, and who shares what, see `given_blocks`.
PLANS = {
    "one": ({}, {}),
    "heads": ({"dp": 4}, {40: (0, 4, 4), 33: (0, 4, 2), 25: (2, 2, 2)}),
    "pages": ({"dp": 4}, {40: (0, 4, 1), 33: (0, 2, 1), 25: (2, 2, 1)}),
    "pipes": ({"dp": 2, "pp": 2}, {40: (0, 2, 1), 33: (0, 2, 2), 14: (0, 2, 2)}),
    "equal": ({"dp": 2, "k": 1, "equal_chunks": True}, {40: (0, 2, 1)}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
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
        pytest.param([(4, "heads", ()), (4, "pages", ("--checkpointing", "keep-attention"))], marks=pytest.mark.soak),
    ],
    ids=["few", "others"],
)
def test_every_layout_that_shares_sequences_trains_as_one_process_does(layouts, made, tmp_path, trainers):
    more = ("--precision", "fp64", "--eval-every", 1, "--save-every", 0, "--max-steps", 2, "--log-sequences")
    assert main(options(made, tmp_path / "one", *more, plan="one")) == 0
    of_each = lines(tmp_path / "one" / "sequences.jsonl")
    for place, (size, plan, how) in enumerate(layouts):
        output = tmp_path / f"{place}-{plan}-{size}"
        said = all_well(trainers, size, options(made, output, *more, *how, plan=plan))
        same_run(tmp_path / "one", output)
        found = lines(output / "sequences.jsonl")
        places = [(row["step"], row["sequence_id"], row["target_tokens"]) for row in found]
        assert sorted(places) == sorted((row["step"], row["sequence_id"], row["target_tokens"]) for row in of_each)
        losses = {(row["step"], row["sequence_id"]): row["loss"] for row in found}
        assert losses == pytest.approx({(row["step"], row["sequence_id"]): row["loss"] for row in of_each}, rel=1e-12)
        assert "for shared sequences; made in" in said
        assert json.loads((output / "measured.json").read_text())["processes"]
        assert hidden_files(output) == []


@pytest.mark.parametrize(
    "first, then",
    [
        (("pages", 4), ("one", 1)),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in ((("one", 1), ("two", 2)), (("heads", 4), ("two", 2)), (("pages", 4), ("pages", 4)))
        ),
    ],
)
def test_a_run_goes_on_in_an_epoch_with_a_plan_like_its_own_for_other_ranks(made, tmp_path, trainers, first, then):
    """As if it had not been stopped; with its own plan bit for bit."""
    like = tmp_path / "like"
    with given_blocks({40: (0, 2, 1)} if then[0] == "two" else {}):
        build_like(made / first[0], like, dp=then[1])
    assert load_plan(like).content_hash != load_plan(made / first[0]).content_hash or first == then
    # A gradient that is zero but for rounding moves a weight by up to that over epsilon.
    more = ("--precision", "fp64", "--save-every", 2, "--max-steps", 3, "--eval-every", 1, "--lr", "1e-4")
    arguments = options(made, tmp_path / "run", *more, plan=first[0])
    run_on(trainers, first[1], arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "final")
    plan = made / first[0] if first == then else like
    run_on(trainers, then[1], [*arguments, "--resume", "--plan", str(plan)])
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["step"] == 2, "a step of the first epoch, which has four"
    assert len([name for name in state["files"] if name.startswith("weights/")]) == first[1]
    same_run(tmp_path / "run", tmp_path / "whole")
    ends = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("run", "whole")]
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-12, atol=1e-12)
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final") or first != then


def run_on(trainers, size, arguments):
    if size == 1:
        assert main(arguments) == 0
    else:
        all_well(trainers, size, arguments)


def test_what_cannot_be_shared_is_refused_by_name(made, tmp_path, trainers, tiny_config, capsys):
    (tmp_path / "two.json").write_text(json.dumps(tiny_config("qwen2", num_key_value_heads=2)))
    heads = "4 processes cannot share the model's 2 key and value heads evenly"
    for size, plan, more, message, hint in (
        (4, "heads", ("--model-config", tmp_path / "two.json"), heads, "--model"),
        (2, "heads", (), "as many replicas as it has ranks, 4, not 2", f"--like {made / 'heads'} --dp 2 --output"),
    ):
        told = together(trainers, size, options(made, tmp_path / "run", *more, plan=plan))
        assert [code for code, _ in told] == [2] * size
        [said] = [text for _, text in told if text]
        assert message in said and hint in said
    # Before weights are loaded, of which there are none here.
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "two.json", tmp_path / "two" / "config.json")
    where = {"--plan": made / "heads", "--model": tmp_path / "two", "--output": tmp_path / "run", "--device": "cpu"}
    told = together(trainers, 4, [str(word) for pair in where.items() for word in pair])
    assert "".join(text for _, text in told).count(heads) == 1
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    assert main(options(made, tmp_path / "run", "--model-config", "none.json", plan="heads")) == 2
    assert f"--like {made / 'heads'} --dp 1 --output {made / 'heads-dp1'}" in capsys.readouterr().err
    assert main(options(made, tmp_path / "run", "--eval-plan", made / "pages", plan="one")) == 2
    assert f"--like {made / 'pages'} --dp 1 --output" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_process_that_waits_for_a_page_says_for_which_and_for_whom(made, tmp_path, trainers):
    arguments = options(made, tmp_path / "run", "--max-steps", 1, "--save-every", 0, plan="pages")
    told = together(trainers, 4, arguments, run=stalled_exchange)
    assert [code for code, _ in told] == [0] * 4
    who = re.escape("warning: process 1 of 4 (data parallel) has not moved for 500.0 ms: ")
    place = r"step 0, rank 1, in the forward(_kv)? of chunk 0, fetching the page of tokens 0 to \d+ of sequence \d+ "
    assert re.search(rf"^{who}{place}from process(es)? 0", told[1][1], re.M)
