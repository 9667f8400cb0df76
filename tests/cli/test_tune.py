"""`chunkplan tune` and `build --auto` as they are typed: what they print, write, and refuse."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chunkplan import load_plan, validate
from chunkplan.cost.model import CostModel
from tests.support.command_line import SMALL_MODEL
from tests.support.command_line import run_here as run

GRID = ("--chunk-sizes", "2048,8192", "--ks", "1,4", "--global-batch", "32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lengths of a long tail, and the configuration of a small model."""
    folder = tmp_path_factory.mktemp("data")
    tokens = np.random.default_rng(0).lognormal(6.3, 1.5, 4000)
    np.save(folder / "lengths.npy", np.clip(tokens, 1, 150_000).astype(np.int32))
    (folder / "config.json").write_text(json.dumps(SMALL_MODEL))
    return folder


def text_of(screen: str) -> str:
    """What is on a screen, without lines of boxes and breaks."""
    return " ".join(screen.replace("│", " ").split())


def test_adapters_are_tuned_built_and_named_on_the_way(data: Path, tmp_path: Path) -> None:
    lengths, adapters = str(data / "lengths.npy"), ("--lora-rank", "8", "--load-in-4bit")
    options = ("--model", str(data), "--chunk-size", "8192", "--k", "1", *adapters)
    ran = run(tmp_path, "build", lengths, "--auto", *options, columns=200)
    assert ran.returncode == 0, ran.stderr
    assert "adapters of rank 8 on weights in 4 bits" in ran.stderr and "adapters of rank 8" in ran.stdout
    cost = load_plan(tmp_path / "chunkplan-out" / "plan").cost
    assert (cost.lora_rank, cost.load_in_4bit) == (8, True)
    ran = run(tmp_path, "build", lengths, *options[:-1], "--dp", "2", "--load-in-4bit", "--dry-run", columns=200)
    assert "plan only: the runtime cannot run weights in 4 bits on several GPUs yet" in ran.stderr


def test_an_optimizer_is_tuned_built_and_named_on_the_way(data: Path, tmp_path: Path) -> None:
    lengths, eight = str(data / "lengths.npy"), ("--model", str(data), "--optimizer", "adamw-8bit")
    ran = run(tmp_path, "tune", lengths, *eight, *GRID, columns=200)
    assert ran.returncode == 0, ran.stderr
    assert ", adamw-8bit" in ran.stdout
    auto = ("--chunk-size", "8192", "--k", "1", *eight)
    ran = run(tmp_path, "build", lengths, "--auto", *auto, columns=200)
    assert "adamw-8bit" in ran.stderr and "adamw-8bit" in ran.stdout
    assert load_plan(tmp_path / "chunkplan-out" / "plan").cost.optimizer == "adamw-8bit"
    rest = ("--chunk-size", "8192", "--k", "1", "--model", str(data), "--dry-run")
    ran = run(tmp_path, "build", lengths, *rest, "--dp", "2", "--optimizer", "adafactor", columns=200)
    assert "plan only: the runtime cannot run adafactor on several data-parallel ranks yet" in ran.stderr


def test_split_backwards_are_recommended_where_they_are_faster(data: Path) -> None:
    options = ("--model", ".", "--pp", "4", "--global-batch", "8", "--chunk-sizes", "8192", "--ks", "1,4")
    ran = run(data, "tune", "lengths.npy", *options, columns=120)
    assert "plan only" not in ran.stdout
    assert re.search(r"setting .*, zero-bubble", ran.stdout)


@pytest.mark.soak
def test_a_plan_takes_what_was_tuned_at_once_or_from_a_file(data: Path, tmp_path: Path) -> None:
    """The same plan either way, of the model and the hardware it was tuned for."""
    lengths = str(data / "lengths.npy")
    machine = ("--model", str(data), "--hardware", "a100", "--gpu-memory", "40GiB", "--tp", "2", "--pp", "2")
    at_once = run(tmp_path, "build", lengths, "--auto", *machine, *GRID[-2:], "--chunk-size", "8192", "--output", "one")
    assert at_once.returncode == 0, at_once.stderr
    assert "plan only: the runtime cannot run tensor parallelism" in at_once.stderr
    ran = run(tmp_path, "tune", lengths, *machine, *GRID[-2:], "--chunk-sizes", "8192", "--output", "tune.json")
    assert f"next: chunkplan build {lengths} --auto --from tune.json" in ran.stderr
    from_file = run(tmp_path, "build", lengths, "--auto", "--from", "tune.json", "--output", "other")
    assert from_file.returncode == 0, from_file.stderr
    assert "drifted" not in from_file.stderr
    one, other = load_plan(tmp_path / "one"), load_plan(tmp_path / "other")
    assert one.content_hash == other.content_hash
    chosen = json.loads((tmp_path / "tune.json").read_text())["chosen"]
    assert {name: getattr(one.config, name) for name in ("chunk_size", "k", "pp", "schedule")} == {
        name: chosen[name] for name in ("chunk_size", "k", "pp", "schedule")
    }
    cost = CostModel.from_dict(one.manifest["predictions"]["cost_model"], where="plan")
    assert (cost.hardware.name, cost.tp, cost.shape.num_layers) == ("a100", 2, 24)
    assert validate(one.path).ok


def test_ranks_that_share_weights_get_a_plan_that_the_trainer_runs(data: Path, tmp_path: Path) -> None:
    """Also where something else is asked for than was tuned."""
    lengths = str(data / "lengths.npy")
    shared = ("--model", str(data), "--dp", "4", "--sharding", "weights", *GRID)
    ran = run(tmp_path, "tune", lengths, *shared, "--output", "tune.json")
    assert "─ recommended ─" in ran.stdout, ran.stderr
    ran = run(tmp_path, "build", lengths, "--auto", "--from", "tune.json")
    assert ran.returncode == 0, ran.stderr
    assert "plan only" not in ran.stderr
    plan = load_plan(tmp_path / "chunkplan-out" / "plan")
    assert not plan.config.equal_chunks
    assert validate(plan.path).ok
    ran = run(tmp_path, "build", lengths, "--auto", "--from", "tune.json", "--k", "7", "--dry-run", columns=200)
    assert ran.returncode == 0 and "plan only" not in ran.stderr


def test_what_was_tuned_last_is_what_auto_takes_unless_another_machine_is_given(data: Path, tmp_path: Path) -> None:
    lengths, machine = str(data / "lengths.npy"), ("--model", str(data), "--dp", "2", *GRID[-2:])
    ran = run(tmp_path, "tune", lengths, *machine)
    assert ran.stderr.endswith(f"tuning in chunkplan-out/tuning.json\nnext: chunkplan build {lengths} --auto\n")
    chosen = json.loads((tmp_path / "chunkplan-out" / "tuning.json").read_text())["chosen"]
    for given in ((), machine):
        ran = run(tmp_path, "build", lengths, "--auto", *given, columns=200)
        assert ran.returncode == 0, ran.stderr
        assert "chosen as in chunkplan-out/tuning.json: ChunkSize " in ran.stderr
        config = load_plan(tmp_path / "chunkplan-out" / "plan").config
        assert {name: getattr(config, name) for name in ("chunk_size", "k", "dp", "pp")} == {
            name: chosen[name] for name in ("chunk_size", "k", "dp", "pp")
        }
    others: tuple[tuple[str, ...], ...] = (("--gpu-memory", "60GiB"), ("--lora-rank", "8"))
    for changed in others:
        ran = run(tmp_path, "build", lengths, "--auto", *machine, *changed, "--dry-run", columns=200)
        assert "chunkplan-out/tuning.json was found with other options than these: tuning again" in ran.stderr
        assert "chosen: ChunkSize " in ran.stderr
    for given, layout in (((), ", dp 2, adapters"), (("--gpus", "1"), ", one GPU, adapters")):
        ran = run(tmp_path, "build", lengths, "--auto", "--lora-rank", "8", *given, "--dry-run", columns=200)
        assert layout in ran.stderr and "adapters of rank 8" in ran.stderr
    ran = run(tmp_path, "build", lengths, "--auto", *machine, "--chunk-size", "4096", "--dry-run", columns=200)
    assert "chosen: ChunkSize 4,096" in ran.stderr
    (tmp_path / "chunkplan-out" / "tuning.json").write_text("{}")
    ran = run(tmp_path, "build", lengths, "--auto")
    assert ran.returncode == 3 and "hint: write it again with `chunkplan tune`" in ran.stderr


def test_where_there_is_nothing_to_gain_the_box_says_so(data: Path, tmp_path: Path) -> None:
    """Of data without a long tail; what an epoch costs, of 8 steps with a short last one, is said for a price."""
    np.save(tmp_path / "short.npy", np.full(500, 8192))
    grid = ("--model", str(data), "--gpus", "8", "--chunk-sizes", "8192", "--ks", "1", "--global-batch", "64")
    ran = run(tmp_path, "tune", "short.npy", *grid, "--gpu-hour-price", "2.5")
    shown = text_of(ran.stdout)
    assert " gain none: keep " in shown
    document = json.loads((tmp_path / "chunkplan-out" / "tuning.json").read_text())
    assert document["gpu_hours"] == pytest.approx(document["epoch_seconds"] * 8 / 3600)
    assert document["price"] == pytest.approx(2.5 * document["gpu_hours"])
    assert document["chosen"]["step_seconds"] * 8 == pytest.approx(document["epoch_seconds"])
    assert " at 2.5 a GPU-hour" in shown


@pytest.mark.soak
def test_the_fewest_gpus_are_enough_and_half_of_them_are_not(data: Path, tmp_path: Path) -> None:
    """Also where nothing fits what was asked for: the hint has a number that works."""
    lengths, asked = str(data / "lengths.npy"), ("--chunk-sizes", "2048", "--ks", "1", "--global-batch", "32")
    ran = run(tmp_path, "tune", lengths, "--gpus", "8", *asked, columns=120)
    fewest = json.loads((tmp_path / "chunkplan-out" / "tuning.json").read_text())["fewest_gpus"]
    assert 1 < fewest < 8 and f"fewest GPUs {fewest} (`--gpus {fewest}xh100`" in text_of(ran.stdout)
    assert run(tmp_path, "tune", lengths, "--gpus", str(fewest), *asked).returncode == 0
    ran = run(tmp_path, "tune", lengths, "--gpus", str(fewest // 2), *asked)
    assert ran.returncode == 2 and f"hint: more GPUs (--gpus {fewest}xh100 is enough)" in ran.stderr


def test_lengths_that_have_drifted_are_reported_and_too_long_ones_refused(data: Path, tmp_path: Path) -> None:
    tuned = run(
        data, "tune", "lengths.npy", "--model", ".", "--gpu-memory", "80GiB", *GRID,
        "--output", str(tmp_path / "tune.json"),
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr
    before = np.load(data / "lengths.npy")
    np.save(tmp_path / "shorter.npy", np.minimum(before, 500))
    ran = run(tmp_path, "build", "shorter.npy", "--auto", "--from", "tune.json")
    assert ran.returncode == 0, ran.stderr
    assert "the lengths have drifted: " in ran.stderr
    np.save(tmp_path / "longer.npy", np.append(before, np.int32(30_000_000)).astype(np.int32))
    ran = run(tmp_path, "build", "longer.npy", "--auto", "--from", "tune.json", "--output", "none")
    assert ran.returncode == 2
    assert "the longest sequence has 30,000,000 tokens" in ran.stderr
    assert "hint: run `chunkplan tune` again" in ran.stderr
    assert not (tmp_path / "none").exists()


REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "no memory": (("tune", "lengths.npy", "--gpu-memory", "6GiB", "--dp", "8", *GRID), "nothing fits 6.0 GiB a GPU"),
    "no size": (("tune", "lengths.npy", "--gpu-memory", "80"), "--gpu-memory is '80', expected a size of memory"),
    "no hardware": (("tune", "lengths.npy", "--hardware", "h900"), "h900"),
    "no model": (("tune", "lengths.npy", "--model", "none.json"), "none.json"),
    "no lengths": (("tune", "none.npy"), "none.npy"),
    "no workspace": (("tune",), "there is no analysis in the workspace"),
    "no numbers": (("tune", "lengths.npy", "--ks", "1,x"), "--ks is '1,x'"),
    "gpus and stages": (("tune", "lengths.npy", "--gpus", "8", "--pp", "2"), "exclude each other"),
    "heads": (("tune", "lengths.npy", "--tp", "8"), "tensor parallelism 8 does not divide"),
    "stages": (("tune", "lengths.npy", "--pp", "40"), "28 layers, too few for 40 stages"),
    "schedule of one stage": (("tune", "lengths.npy", "--schedules", "1f1b"), "schedules are for pipelines"),
    "schedule": (
        ("tune", "lengths.npy", "--pp", "2", "--schedules", "best"),
        "--schedules is 'best', expected algorithm2 (on one stage) or auto or 1f1b",
    ),
    "from without auto": (("build", "lengths.npy", "--from", "x.json"), "--from is for --auto"),
    "gpus without auto": (("build", "lengths.npy", "--gpus", "8"), "--gpus is for --auto"),
    "from and hardware": (("build", "lengths.npy", "--auto", "--from", "x.json", "--hardware", "h100"), "exclude"),
    "no file": (("build", "lengths.npy", "--auto", "--from", "x.json"), "there is no file x.json"),
    "k": (("build", "lengths.npy", "--chunk-size", "8", "--k", "4,5"), "expected a number, or also TOKENS:K"),
    "levels of too few layers": (
        ("build", "lengths.npy", "--chunk-size", "8", "--k", "4", "--checkpointing", "full:8,none:19"),
        "--checkpointing is full:8,none:19, of 27 layers: the model has 28",
    ),
    "levels in no words": (
        ("build", "lengths.npy", "--chunk-size", "8", "--k", "4", "--checkpointing", "half"),
        "--checkpointing is 'half', expected auto, none, keep-products",
    ),
    "chosen levels": (("build", "lengths.npy", "--auto", "--checkpointing", "auto"), "--auto chooses it"),
    "checkpointing": (("build", "lengths.npy", "--auto", "--checkpointing", "full"), "--auto chooses it"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_in_words(data: Path, case: str, tmp_path: Path) -> None:
    """And nothing is left behind."""
    for name in ("lengths.npy", "config.json"):
        shutil.copy(data / name, tmp_path)
    words, message = REFUSALS[case]
    ran = run(tmp_path, *words, columns=500)
    assert ran.returncode in (2, 3), ran.stderr
    assert message in ran.stderr
    assert "hint: " in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "chunkplan-out").exists()


@pytest.mark.soak
def test_what_an_analysis_names_next_works_as_it_is(tmp_path: Path) -> None:
    """...to the plan, whose steps fit the GPUs."""
    records = [{"text": "word " * count} for count in (5, 9, 4000, 90_000)] * 9
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    said = run(tmp_path, "analyze", "data.jsonl", "--workspace", "a place").stderr
    for command in ("gain", "build", "inspect"):
        found = re.search(f"^(?:next:| {{5}}) chunkplan ({command} .*)$", said, re.MULTILINE)
        assert found, said
        ran = run(tmp_path, *shlex.split(found[1]))
        assert ran.returncode == 0, ran.stderr
        said = ran.stderr
        assert " a GPU in step " not in said
    assert load_plan(tmp_path / "a place" / "plan").config.global_batch == 256


def test_an_analysis_simulates_nothing_unasked(tmp_path: Path) -> None:
    """...nor loads what would: the report is there at once, as a document too."""
    np.save(tmp_path / "lengths.npy", np.array([5, 90_000]))
    code = (
        "import sys; from chunkplan_cli.main import main\n"
        "for words in ([], ['--json']):\n"
        "    sys.argv = ['chunkplan', 'analyze', 'lengths.npy', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'numba', 'ortools', 'chunkplan.tuning.tune'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
