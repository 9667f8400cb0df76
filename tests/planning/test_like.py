"""A plan that is like another has the same samples in every step, whatever else is asked for."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan import CostModel, PlanConfig, build, build_like, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.likeness import samples_of
from chunkplan.planfile.load import evaluation_folder
from chunkplan.planfile.plan import Plan
from tests.support.command_line import Run
from tests.support.places import ROOT
from tests.support.planned_steps import write_analysis

LENGTHS = [900, 40, 300, 12, 7, 2000, 64, 33, 5, 150, 80, 1200]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    pp = draw(st.sampled_from([1, 1, 2]))
    dp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return {
        "dp": dp,
        "pp": pp,
        "cp": draw(st.sampled_from(["auto", "off"])),
        "chunk_size": draw(st.integers(4, 300)),
        "k": draw(st.integers(1, 3)),
        "global_batch": draw(st.integers(1, 5)),
        "epochs": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
        "last_batch": draw(st.sampled_from(["keep", "drop"])),
        "holdout": draw(st.sampled_from([None, 2])),
        "split": draw(st.sampled_from(["full", "even"])),
        "equal_chunks": draw(st.booleans()),
    }


def samples_by_step(plan: Plan) -> list[tuple[int, Counter[int]]]:
    """Of every step its epoch, and how often it has each sequence, by the tokens of its own segments."""
    found = []
    for step in plan.iter_steps():
        tokens: Counter[int] = Counter()
        for chunk in (chunk for chunks in step.chunks.values() for chunk in chunks):
            for segment in chunk.segments:
                tokens[segment.sequence_id] += segment.end - segment.start
        found.append((step.epoch, tokens))
    return found


@settings(max_examples=20)
@given(configs(), st.sampled_from([1, 2, 4, 6]), st.sampled_from([None, 50]), st.sampled_from([None, 1, 2]))
def test_every_step_has_the_same_samples(
    config: dict[str, Any], dp: int, chunk_size: int | None, pp: int | None
) -> None:
    changes = {name: value for name, value in {"dp": dp, "chunk_size": chunk_size, "pp": pp}.items() if value}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_analysis(folder / "analysis", LENGTHS)
        plan = build(folder / "analysis", folder / "plan", PlanConfig(**config), workers=1)
        like = build_like(folder / "plan", folder / "like", workers=1, **changes)
        assert validate(like.path).ok
        assert samples_by_step(like) == samples_by_step(plan)
        assert samples_of(like.manifest) == samples_of(plan.manifest)
        assert {entry: getattr(like.config, entry) for entry in changes} == changes
        assert (like.config.k, like.config.split) == (plan.config.k, plan.config.split)
        held_out = [evaluation_folder(each.path) for each in (plan, like)]
        assert [each.exists() for each in held_out] == [config["holdout"] is not None] * 2
        if config["holdout"]:
            assert samples_by_step(load_plan(held_out[1])) == samples_by_step(load_plan(held_out[0]))


def test_what_was_chosen_stays_and_what_followed_follows_anew(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    made = {}
    for name, options in {"one": {}, "off": {"dp": 4, "cp": "off"}, "two": {"dp": 4, "cp": 2}, "k": {"dp": 2}}.items():
        config = PlanConfig(chunk_size=64, k=2, k_by_length=((800, 1),), **options)
        made[name] = build(tmp_path / "lengths.npy", tmp_path / name, config, cost=CostModel(lora_rank=8)).path

    def like(name: str, **changes: Any) -> Plan:
        return build_like(made[name], tmp_path / "like", **changes)

    shared = like("one", dp=4)
    assert (shared.config.cp, shared.config.k_by_length, shared.cost.lora_rank) == ("auto", ((800, 1),), 8)
    piped = like("one", pp=2)
    assert (piped.config.schedule, piped.config.tail_sharing) == ("auto", False)
    assert like("off", dp=2).config.cp == "off"
    assert like("two", dp=8).config.cp == 2
    assert like("k", dp=1).config.cp == "off"
    assert [like("two", dp=dp).config.cp for dp in (1, 3)] == ["off", "auto"]
    with pytest.raises(UsageError, match="cp is 2, expected a divisor of dp, which is 3"):
        like("two", dp=3, cp=2)
    assert like("two").content_hash == load_plan(made["two"]).content_hash


def test_the_command_refuses_what_would_change_samples_and_takes_what_is_the_same(tmp_path: Path, command: Run) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    np.save(tmp_path / "others.npy", LENGTHS[1:])
    (tmp_path / "seed.toml").write_text("seed = 1\n")
    of_plan = ("--global-batch", 4, "--seed", 3, "--epochs", 2, "--holdout", 2, "--last-batch", "drop")
    built = command("build", "lengths.npy", "--chunk-size", 64, "--k", 1, "--dp", 4, *of_plan, "--output", "plan")
    assert built.code == 0, built.err
    like = ("build", "--like", "plan", "--dp", 2, "--output", "new")
    for words, message in {
        ("--global-batch", 8): "--global-batch is 8, for the plan it was 4",
        ("--seed", 0): "--seed is 0, for the plan it was 3",
        ("--epochs", 1): "--epochs is 1, for the plan it was 2",
        ("--holdout", 0.5): "--holdout is 0.5, for the plan it was 2",
        ("--last-batch", "keep"): "--last-batch is keep, for the plan it was drop",
        ("--config", "seed.toml"): "--seed is 1, for the plan it was 3",
        ("--auto",): "--like and --auto exclude each other",
        ("--gpus", 8): "--gpus is for --auto",
    }.items():
        ran = command(*like, *words)
        assert ran.code == 2 and f"error: {message}" in ran.err and "\nhint: " in ran.err, ran.err
    ran = command("build", "others.npy", *like[1:])
    assert ran.code == 2 and "others.npy is not the analysis of the plan plan" in ran.err
    ran = command("build", "--like", "plan", "--dp", 2)
    assert ran.code == 2 and "--like without --output could replace the plan itself" in ran.err
    for words, message in {("--gpus", 8): "--gpus is for --auto", ("--from", "x.json"): "--from is for --auto"}.items():
        ran = command(*like, *words)
        assert f"error: {message}, which --like excludes\nhint: leave it out; --dp and --pp say" in ran.err
    ran = command("build", "lengths.npy", "--chunk-size", 64, "--k", 1, "--output", "whole")
    assert ran.code == 0, ran.err
    ran = command("build", "--like", "whole", "--holdout", 2, "--output", "new")
    assert ran.code == 2 and "error: --holdout is 2, for the plan it was not given: --like keeps" in ran.err
    for entry in ("like", "output", "workers"):
        (tmp_path / "entry.toml").write_text(f'{entry} = "plan"\n')
        ran = command("build", "--config", "entry.toml")
        assert ran.code == 2 and f"unknown entry `{entry}`\nhint: it is one of " in ran.err
        assert "what else there is is given in the command" in ran.err
    ran = command("build", "--like", "lengths.npy", "--output", "new")
    assert ran.code == 2 and "Traceback" not in ran.err
    assert not (tmp_path / "new").exists()
    ran = command("build", "lengths.npy", *like[1:], *of_plan, "--json")
    assert ran.code == 0, ran.err
    config = json.loads(ran.out)["manifest"]["config"]
    assert (config["dp"], config["chunk_size"], config["k"], config["seed"]) == (2, 64, 1, 3)
    assert "plan of the 2 sequences held out in new-eval" in ran.err and "plan in new\n" in ran.err


def test_a_mix_is_the_same_by_the_name_of_its_source(tmp_path: Path, command: Run) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * n}) + "\n" for n in (9, 20, 30)))
    tokenizer = ROOT / "sample_data" / "tokenizer"
    assert command("analyze", "a.jsonl", "b.jsonl", "--tokenizer", tokenizer).code == 0
    assert command("build", "--chunk-size", 64, "--k", 1, "--mix", "a.jsonl=2", "--output", "plan").code == 0
    like = ("build", "--like", "plan", "--output", "new", "--dry-run")
    assert command(*like, "--mix", "a.jsonl=2").code == 0
    for words in (("--mix", "a.jsonl=3"), ("--mix", "b.jsonl=2"), ("--mix", "a.jsonl=2", "--mix", "b.jsonl=2")):
        ran = command(*like, *words)
        assert ran.code == 2
        assert f"error: --mix is {','.join(words[1::2])}, for the plan it was a.jsonl=2: --like" in ran.err


@pytest.mark.parametrize(
    ("options", "typed", "fallen"),
    [
        ({"pp": 2, "schedule": "zero-bubble"}, {"pp": 1}, "--schedule zero-bubble"),
        ({"pp": 2, "schedule": "zero-bubble"}, {"pp": 4}, None),
        ({"pp": 2, "schedule": "zero-bubble-v"}, {"pp": 20}, "--schedule zero-bubble-v"),
        ({"pp": 2, "schedule": "interleaved"}, {"pp": 1, "dp": 2}, "--schedule interleaved"),
        (
            {"pp": 2, "schedule": "interleaved", "virtual_stages": 3, "stage_layers": "4,4,5,5,5,5"},
            {"pp": 1},
            "--stage-layers 4,4,5,5,5,5, --virtual-stages 3, --schedule interleaved",
        ),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 8}, {"pp": 4}, "--virtual-stages 8"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 3}, {"schedule": "1f1b"}, "--virtual-stages 3"),
        ({"pp": 2, "stage_layers": "13,15"}, {"pp": 4}, "--stage-layers 13,15"),
        ({"pp": 2, "stage_layers": "13,15"}, {"pp": 1}, "--stage-layers 13,15"),
        ({"pp": 2, "stage_layers": "13,15"}, {"dp": 2}, None),
        ({"pp": 2, "stage_layers": "13,15"}, {"model": "model"}, "--stage-layers 13,15"),
        ({"dp": 4, "cp": 2}, {"dp": 1}, "--cp 2"),
        ({"dp": 4, "cp": 2}, {"dp": 3}, "--cp 2"),
        ({"dp": 4, "cp": 2}, {"dp": 6}, None),
        ({"dp": 4, "cp": 2}, {"balance": "search"}, "--cp 2"),
        ({"dp": 4, "cp": 2}, {"split": "none", "chunk_size": 2000}, "--cp 2"),
        ({"dp": 4, "cp": 2, "pp": 2, "schedule": "1f1b"}, {"pp": 1}, "--schedule 1f1b"),
        ({"dp": 4, "cp": 2, "pp": 2, "stage_layers": "13,15"}, {"pp": 1, "dp": 3}, "--cp 2, --stage-layers 13,15"),
    ],
)
def test_what_cannot_hold_and_was_not_typed_falls_back_and_is_said(
    tmp_path: Path, command: Run, options: dict[str, Any], typed: dict[str, Any], fallen: str | None
) -> None:
    """As little as has to falls back; all else stays as it was."""

    def build_words(*words: Any, **values: Any) -> list[Any]:
        flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
        return ["build", *words, *flags, "--json"]

    np.save(tmp_path / "lengths.npy", LENGTHS)
    (tmp_path / "model").symlink_to(ROOT / "sample_data" / "model")
    made = command(*build_words("lengths.npy", chunk_size=64, k=1, output="plan", **options))
    assert made.code == 0, made.err
    before = json.loads(made.out)["manifest"]["config"]
    ran = command(*build_words(like="plan", output="new", **typed))
    assert ran.code == 0, ran.err
    said = f"left to the default, as what plan has cannot hold here: {fallen}\n"
    assert said in ran.err if fallen else "left to the default" not in ran.err
    now = json.loads(ran.out)["manifest"]["config"]
    for name in options:
        is_kept = name not in typed and f"--{name.replace('_', '-')} " not in (fallen or "")
        assert (now.get(name) == before[name]) == is_kept, name
    assert validate(tmp_path / "new").ok


def test_a_plan_and_what_it_holds_out_are_not_replaced(
    tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    config = PlanConfig(chunk_size=64, k=1, dp=2, holdout=2)
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", config)
    (tmp_path / "link").symlink_to("plan")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    plans = ("plan", "link", tmp_path / "plan")
    outputs = ("plan", "./plan", "plan/", tmp_path / "plan", "link", "folder/../plan", "gone/../plan", "plan-eval")
    for like, output in [(like, output) for like in plans for output in outputs]:
        ran = command("build", "--like", like, "--dp", 1, "--output", output)
        assert ran.code == 2 and "error: the new plan would replace " in ran.err, (like, output, ran.err)
        [other] = re.findall(r"hint: give a new folder, for example --output (\S+)\n", ran.err)
        assert not Path(other).exists()
        with pytest.raises(UsageError, match="the new plan would replace"):
            build_like(like, output, dp=1)
    (tmp_path / "held").symlink_to("plan-eval")
    for like, output in product(("plan-eval", "held", tmp_path / "plan-eval"), ("plan", "link", "./plan")):
        ran = command("build", "--like", like, "--dp", 1, "--output", output)
        assert ran.code == 2 and f"/plan, of which {like} is held out\nhint: give a new folder" in ran.err, ran.err
    assert load_plan(tmp_path / "plan").content_hash == plan.content_hash
    assert command("build", "--like", "plan", "--output", other).code == 0


def test_a_plan_is_built_again_only_from_its_own_analysis(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=64, k=1, dp=2, cp="off"))
    again = build_like(plan.path, tmp_path / "again")
    assert again.manifest == plan.manifest
    np.save(tmp_path / "lengths.npy", LENGTHS[1:])
    with pytest.raises(DataError, match="not the analysis of the plan"):
        build_like(plan.path, tmp_path / "other")
    (tmp_path / "lengths.npy").unlink()
    with pytest.raises(UsageError, match="is not at"):
        build_like(plan.path, tmp_path / "other")
