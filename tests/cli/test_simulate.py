"""`chunkplan simulate` as people type it: screens that fit, traces that open, mistakes that are explained."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.config.plan import SCHEDULES
from tests.support.command_line import Run
from tests.support.places import ROOT

DOCUMENT = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
EXAMPLE = ("--lengths", "1024,1024,2048,4096", "--pp", "4", "--cost", "unit")
K2 = (*EXAMPLE, "--chunk-size", "2048", "--k", "2")


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in an empty folder."""
    return command


@pytest.fixture
def plans(run: Run, tmp_path: Path) -> Path:
    """The plan of the workspace has 8 stages, 2 ranks, 3 steps and over 100 chunks a rank; `one` has one stage."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(6, 1.2, 500).astype(int) + 10, 20_000)
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--chunk-size", 1024, "--k", 2, "--global-batch", 200, "--cp", "off")
    assert run("build", "lengths.npy", *options, "--pp", 8, "--dp", 2).code == 0
    assert run("build", "lengths.npy", *options, "--output", "one").code == 0
    return tmp_path


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_screen_fits_and_says_the_same_without_colour(run: Run, plans: Path, width: int) -> None:
    for words in (
        K2,
        (*K2, "--schedule", "interleaved"),
        (*EXAMPLE, "--chunk-size", "none", "--schedule", "zero-bubble"),
        (),
        ("--step", 1, "--rank", 0),
        ("one",),
        ("--compare", "1f1b,interleaved,zero-bubble"),
    ):
        plain, coloured = run("simulate", *words, width=width), run("simulate", *words, width=width, colour=True)
        assert plain.code == 0, plain.err
        assert "\x1b" not in plain.out
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.out) == plain.out
        assert coloured.out.count("\x1b[") > 10
        assert max(map(len, plain.out.splitlines())) <= width


def test_the_line_of_a_stage_shows_it_in_proportion(run: Run, plans: Path) -> None:
    """Hundreds of actions in 92 columns: letters, rules and dots are still what the stage does, to a few columns."""
    shown = json.loads(run("simulate", "--json").out)
    screen = run("simulate", width=100).out
    for stage in range(8):
        bars = [line[8:] for line in screen.splitlines() if re.match(rf"stage {stage} [A-Za-z.]", line)]
        cells = "".join(bars)
        assert abs(cells.count(".") / len(cells) - (1 - shown["busy_per_stage"][stage])) < 0.03


def test_json_has_what_the_screen_has(run: Run) -> None:
    shown = json.loads(run("simulate", *K2, "--schedule", "1f1b", "--json").out)
    assert (shown["makespan"], shown["unit"], shown["schedule"]) == (46 * 1024, "tokens", "1f1b")
    assert shown["bubble"] == pytest.approx(1 - 24 / 46)
    assert len(shown["bubble_per_stage"]) == len(shown["peak_retained_tokens"]) == 4
    assert shown["peak_retained_tokens"] == [8192, 6144, 4096, 4096]
    assert shown["lower_bound"] == 42 * 1024
    assert sum(shown["critical_path"].values()) == shown["makespan"]
    assert sum(shown["critical_ranks"].values()) == shown["makespan"], "links take no time"
    assert [chunk["num_tokens"] for chunk in shown["chunks"]] == [2048] * 4
    assert shown["chunks"][3] == {
        "chunk_id": 3,
        "group_id": 0,
        "group_index": 1,
        "group_size": 2,
        "num_tokens": 2048,
        "prefix_tokens": 2048,
        "keeps_activations": True,
        "segments": [{"sequence_id": 3, "start": 2048, "end": 4096}],
        "kept_attention": "",
    }
    assert shown["waiting_for_ranks_per_stage"] == shown["exchange_per_stage"] == [0] * 4
    places = [(action["stage"], action["start"]) for action in shown["actions"]]
    assert places == sorted(places)
    first = {"stage": 0, "op": "forward", "chunk_id": 0, "virtual_stage": 0, "start": 0, "end": 2048, "critical": True}
    assert shown["actions"][0] == {**first, "waited_for_ranks": 0, "exchange": 0}


def test_a_plan_is_named_in_json_and_its_last_rank_is_the_default(run: Run, plans: Path) -> None:
    shown = json.loads(run("simulate", "--step", 2, "--json").out)
    assert (shown["plan"], shown["exact"], shown["unit"]) == ("chunkplan-out/plan", True, "microseconds")
    ranks = [json.loads(run("simulate", "--step", 2, "--rank", rank, "--json").out) for rank in (0, 1)]
    assert shown["makespan"] == max(rank["makespan"] for rank in ranks)
    step = json.loads(run("inspect", "--step", 2, "--json").out)
    assert shown["makespan"] == pytest.approx(step["predicted_us"], rel=1e-6)
    assert len(json.loads(run("simulate", "one", "--json").out)["bubble_per_stage"]) == 1


def check_trace(path: Path) -> list[dict[str, Any]]:
    """Every event is what the format asks for: keys by phase, names for tracks, order, and no overlap on a track."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document) - {"otherData"} == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    keys = {
        "M": {"name", "ph", "ts", "pid", "tid", "args"},
        "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
        "C": {"name", "ph", "ts", "pid", "tid", "args"},
        "s": {"name", "cat", "id", "ph", "ts", "pid", "tid", "args"},
        "f": {"name", "cat", "id", "ph", "bp", "ts", "pid", "tid", "args"},
    }
    free: dict[tuple[int, int], float] = {}
    last = 0.0
    for event in events:
        assert set(event) == keys[event["ph"]], event
        assert type(event["name"]) is str and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ts"] >= last, "sorted by time"
        last = event["ts"]
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["dur"] >= 0
            assert event["ts"] > free.get(track, 0.0) - 1e-4, "actions of a stage overlap"
            free[track] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert event["name"].startswith(f"stage {event['tid']}: ")
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(free) == set(named)
    assert all(name == f"stage {tid}" for (_, tid), name in named.items())
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert processes == {pid for pid, _ in free}
    return events


def check_arrows(events: list[dict[str, Any]], num_stages: int) -> None:
    """Each chunk's forward has an arrow from every stage to the next, its backward one back; both ends are in bars."""
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    bars = [event for event in events if event["ph"] == "X" and event["cat"] in ("forward", "forward_kv", "backward")]
    assert len(ends) == len(bars) // num_stages * (num_stages - 1)
    for arrow in ends.values():
        start, end = arrow["s"], arrow["f"]
        assert end["tid"] - start["tid"] == (1 if start["name"].startswith("forward") else -1)
        for each in (start, end):
            [bar] = [
                bar
                for bar in bars
                if bar["tid"] == each["tid"] and bar["ts"] <= each["ts"] < bar["ts"] + bar["dur"]
                if f"chunk {bar['args']['chunk']}" in each["name"] and bar["cat"][:7] == each["name"][:7]
            ]
            assert bar["pid"] == each["pid"]


def test_a_trace_of_a_plan_opens_and_holds_what_json_holds(run: Run, plans: Path) -> None:
    ran = run("simulate", "--trace", "step.json", "--json")
    assert "trace in step.json" in ran.err
    shown = json.loads(ran.out)
    events = check_trace(plans / "step.json")
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == len(shown["actions"])
    assert max(event["ts"] + event["dur"] for event in actions) == pytest.approx(shown["makespan"])
    check_arrows(events, num_stages=8)
    hashed = json.loads((plans / "step.json").read_text(encoding="utf-8"))["otherData"]
    assert hashed == {"plan": chunkplan.load_plan(plans / "chunkplan-out" / "plan").content_hash}
    held = {chunk["chunk_id"]: chunk["segments"] for chunk in shown["chunks"]}
    for event in actions:
        ids = dict.fromkeys(segment["sequence_id"] for segment in held[event["args"]["chunk"]])
        assert event["args"]["sequences"] == ", ".join(map(str, ids))
    for stage in range(8):
        for name, peaks in (("retained tokens", "peak_retained_tokens"), ("KV tokens", "peak_kv_tokens")):
            counts = [event["args"]["tokens"] for event in events if event["name"] == f"stage {stage}: {name}"]
            assert (max(counts), counts[-1]) == (shown[peaks][stage], 0)


def test_a_trace_names_what_it_shows(run: Run, tmp_path: Path) -> None:
    run("simulate", *EXAMPLE, "--chunk-size", 2048, "--k", 1, "--trace", "what-if.json")
    events = check_trace(tmp_path / "what-if.json")
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names == {"F 0", "F 1", "f 2", "F 3", "R 2", *(f"B {chunk}" for chunk in range(4))}
    recompute = next(event for event in events if event["name"] == "R 2")
    assert (recompute["cat"], recompute["dur"]) == ("recompute", 2048)
    shown = {name: value for name, value in recompute["args"].items() if name != "critical"}
    said = {"chunk": 2, "virtual_stage": 0, "group": 0, "part": "1 of 2", "tokens": 2048, "prefix": 0}
    assert shown == {**said, "sequences": "3"}
    assert [path.name for path in tmp_path.iterdir()] == ["what-if.json"], "no temporary file stays"


def test_a_trace_of_a_comparison_has_a_process_for_each_schedule(run: Run, tmp_path: Path) -> None:
    run("simulate", *K2, "--compare", "1f1b,interleaved", "--virtual-stages", 3, "--trace", "both.json")
    events = check_trace(tmp_path / "both.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert ["1f1b" in names[0], "interleaved" in names[1]] == [True, True]
    assert {event["args"]["virtual_stage"] for event in events if event["ph"] == "X" and event["pid"] == 1} == {0, 1, 2}


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "no plan": ((), "there is no plan in the workspace"),
    "lengths that are none": (("--lengths", "12,abc", "--chunk-size", "8", "--k", 1), "expected a number of tokens"),
    "a length of 0": (("--lengths", "12,0", "--chunk-size", "8", "--k", 1), "a length is 0"),
    "a negative length": (("--lengths", "12,-4", "--chunk-size", "8", "--k", 1), "expected a number of tokens"),
    "a huge length": (("--lengths", "99999999999999", "--chunk-size", "8", "--k", 1), "expected a number of tokens"),
    "no chunk size": (("--lengths", "12", "--k", 1), "--chunk-size is missing"),
    "a chunk size that is none": (("--lengths", "12", "--chunk-size", "big", "--k", 1), "--chunk-size is 'big'"),
    "no K": (("--lengths", "12", "--chunk-size", "8"), "k is missing"),
    "an unknown schedule": ((*K2, "--schedule", "gpipe"), "expected algorithm2 (on one stage) or auto or 1f1b"),
    "an unknown schedule to compare": (
        (*K2, "--compare", "1f1b,gpipe"),
        "--compare is '1f1b,gpipe', expected algorithm2 (on one stage) or auto or 1f1b",
    ),
    "a schedule of one stage": ((*K2, "--schedule", "algorithm2"), "is for one stage"),
    "both ways to name a schedule": ((*K2, "--schedule", "1f1b", "--compare", "1f1b"), "exclude each other"),
    "too little memory for a chunk": (
        (*K2, "--schedule", "search", "--max-activation-tokens", 2000),
        "below one chunk",
    ),
    "too little memory for K chunks": (
        (*K2, "--schedule", "search", "--max-activation-tokens", 3000),
        "max-activation-tokens allows",
    ),
    "too little memory for 1F1B": (
        (*K2, "--schedule", "1f1b", "--max-activation-tokens", 4096),
        "holds activations of 8,192 tokens",
    ),
    "virtual stages that are one": (
        (*K2, "--schedule", "interleaved", "--virtual-stages", 1),
        "hint: use schedule 1f1b, which has one",
    ),
    "virtual stages where there are none": ((*K2, "--virtual-stages", 2), "has one virtual stage"),
    "more stages than layers": (("--lengths", "9,9", "--chunk-size", "none", "--pp", 40), "28 layers"),
    "a step of lengths": ((*K2, "--step", 1), "--step is for plans"),
    "a rank of lengths": ((*K2, "--rank", 0), "--rank is for plans"),
    "a plan and lengths": (("chunkplan-out/plan", *K2), "PLAN is for plans"),
    "hardware of a unit": ((*K2, "--hardware", "h100"), "--cost unit knows no model"),
    "unknown hardware": (("--lengths", "9", "--chunk-size", "none", "--hardware", "z80"), "z80 is no hardware"),
    "no such model": (("--lengths", "9", "--chunk-size", "none", "--model", "no.json"), "no.json"),
    "a trace in no folder": ((*K2, "--trace", "nowhere/trace.json"), "cannot write nowhere/trace.json"),
    "a trace that is a folder": ((*K2, "--trace", "."), "error: . is a folder"),
    "a cluster beyond reason": (("--lengths", "9", "--chunk-size", "none", "--pp", 5000), "pp is 5000"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message_and_a_hint(run: Run, tmp_path: Path, mistake: str) -> None:
    words, message = MISTAKES[mistake]
    ran = run("simulate", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert "\nhint: " in ran.err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_about_a_plan_say_what_the_plan_has(run: Run, plans: Path) -> None:
    for words, message in {
        ("--pp", 4): "the plan is for 8 pipeline stages, --pp is 4",
        ("--step", 3): "hint: the plan has steps 0 to 2",
        ("--step", -1): "there is no step -1",
        ("--rank", 2): "hint: the plan has ranks 0 to 1",
        ("--chunk-size", 512): "--chunk-size is for --lengths",
        ("--cost", "unit"): "--cost is for --lengths",
        ("--schedule", "search", "--max-activation-tokens", 1500): "max-activation-tokens",
        ("one", "--schedule", "1f1b"): "is for two stages or more",
    }.items():
        ran = run("simulate", *words)
        assert (ran.code, ran.out) == (2, ""), ran.out
        assert message in ran.err
        assert "hint: " in ran.err
    assert run("simulate", "--pp", 8).code == 0


def test_every_command_of_the_document_runs_as_written(run: Run, tmp_path: Path) -> None:
    """In order, in a folder with a file of lengths."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(10, 9000, 300))
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "chunkplan"
        ran = run(*arguments)
        assert ran.code == 0, f"{command}\n{ran.err}"


def test_the_table_of_the_document_is_what_its_command_prints(run: Run) -> None:
    """Every row names the options of the chunks; every column a schedule; a cell is `units (bubble)`."""
    [table] = re.findall(r"^\| chunks \|.*?(?=\n\n)", DOCUMENT, re.DOTALL | re.MULTILINE)
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    schedules = [name.strip("`") for name in header[1:]]
    assert set(schedules) == set(SCHEDULES) - {"algorithm2"}
    assert len(rows) >= 5
    for options, *cells in rows:
        words = shlex.split(options.strip("`"))
        shown = json.loads(run("simulate", *EXAMPLE, *words, "--compare", ",".join(schedules), "--json").out)
        found = [f"{simulation['makespan'] / 1024:g} ({simulation['bubble']:.1%})" for simulation in shown["schedules"]]
        assert found == cells, options
        searched = shown["schedules"][schedules.index("search")]
        assert searched["makespan"] == searched["lower_bound"], "cannot be improved"


def test_the_document_draws_what_the_command_draws(run: Run) -> None:
    [(command, screen)] = re.findall(r"```console\n\$ chunkplan (.*?)\n(.*?)```", DOCUMENT, re.DOTALL)
    drawn = run(*shlex.split(command.replace("\\\n", " ")), width=100).out
    assert [line.rstrip() for line in drawn.splitlines()] == screen.rstrip("\n").splitlines()


def test_the_python_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    [block] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "schedules.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("42.0 0.428")
    assert [line.split()[0] for line in lines[1:]] == ["1f1b", "interleaved", "zero-bubble"]
    check_trace(tmp_path / "trace.json")
