"""CONTRIBUTING.md: its map of the rooms is complete and holds for every import, and the files it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import chunkplan
from tests.support.places import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
[MAP, RUNTIME_MAP] = re.findall(r"```text\n(.*?)```", PAGE, re.S)

#: Name of a package -> where it is.
PACKAGES = {
    "chunkplan": ROOT / "chunkplan",
    "chunkplan_runtime": ROOT / "runtime" / "chunkplan_runtime",
    "chunkplan_cli": ROOT / "cli" / "chunkplan_cli",
}

#: What the planner does without; transformers imports torch.
RUNTIME_ONLY = {"torch", "peft", "accelerate", "flash_attn", "transformers"}

#: (module, module it imports) of the exceptions that the page names.
EXCEPTIONS = {
    ("chunkplan_runtime.parity", "chunkplan.config.plan"),
    ("chunkplan_runtime.parity", "chunkplan.building"),
    ("chunkplan_runtime.training.chunk_trainer", "chunkplan.building"),
    ("chunkplan_runtime.adapters.transformers", "chunkplan.lengths"),
    ("chunkplan_runtime.adapters.transformers", "chunkplan.planning.step"),
    ("chunkplan_runtime.adapters.transformers", "chunkplan.planning.whole"),
    ("chunkplan_runtime.training.log_probs", "chunkplan.planning.step"),
    ("chunkplan.intake.backends.huggingface", "transformers"),
    ("chunkplan.adapters.verl", "torch"),
}


def rooms_of(line: str) -> list[str]:
    """The names at the beginning of a line of the map, before what it says of them."""
    return [re.sub(r"/$|\.py$", "", name) for name in re.split(r"\s{2,}", line)[0].split()]


def levels_of(rooms: str) -> dict[str, int]:
    """Room -> line of a map, from the top."""
    return {room: level for level, line in enumerate(rooms.splitlines()) for room in rooms_of(line)}


LEVELS, RUNTIME_LEVELS = levels_of(MAP), levels_of(RUNTIME_MAP)
GROUND = max(LEVELS.values())


def room_of(module: str) -> str:
    """The room of a module of ours; "" for `chunkplan` itself."""
    package, *inside = module.split(".")
    shorts = {"chunkplan_runtime": "runtime", "chunkplan_cli": "cli"}
    return shorts.get(package) or (inside[0] if inside else "")


def imports() -> Iterator[tuple[str, str]]:
    """(module, module it imports), wherever the import stands, also inside of functions.

    A name that `chunkplan` itself has counts as one of the module that it is from.
    """
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from ((module, name.name) for name in node.names)
                elif isinstance(node, ast.ImportFrom):
                    assert node.module and not node.level, f"{path}: imports are absolute"
                    homes = chunkplan.HOMES if node.module == "chunkplan" else {}
                    yield from ((module, homes.get(name.name, node.module)) for name in node.names)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """All but the exceptions."""
    pairs = [pair for pair in imports() if pair not in EXCEPTIONS]
    assert len(pairs) > 1000
    return pairs


@pytest.mark.docs
def test_the_map_has_every_room() -> None:
    planner = {path.stem for path in PACKAGES["chunkplan"].iterdir() if path.suffix == ".py" or path.is_dir()}
    assert planner - {"__init__", "__pycache__", "py"} <= LEVELS.keys()
    assert {"cli", "runtime", "planning", "planfile"} <= LEVELS.keys()


def test_imports_go_down(found: list[tuple[str, str]]) -> None:
    """To a lower line of the map; the ground is one line."""
    wrong = []
    for module, imported in found:
        home, room = room_of(module), room_of(imported)
        if imported.split(".")[0] not in PACKAGES or home == room or not home or not room:
            continue
        if not (LEVELS[room] > LEVELS[home] or LEVELS[room] == LEVELS[home] == GROUND):
            wrong.append(f"{module} imports {imported}")
    assert wrong == []


@pytest.mark.docs
def test_the_map_of_the_runtime_has_every_room() -> None:
    rooms = {path.stem for path in PACKAGES["chunkplan_runtime"].iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "py"} == {*RUNTIME_LEVELS} - {"-" * 106}


def test_imports_in_the_runtime_go_down(found: list[tuple[str, str]]) -> None:
    """To a lower line of its own map; the ground is one line."""
    inside = [
        (module.split(".")[1], imported.split(".")[1], module, imported)
        for module, imported in found
        if module.startswith("chunkplan_runtime.") and imported.startswith("chunkplan_runtime.")
    ]
    assert len(inside) > 100
    ground = max(RUNTIME_LEVELS.values())
    wrong = [
        f"{module} imports {imported}"
        for home, room, module, imported in inside
        if home != room
        and not (RUNTIME_LEVELS[room] > RUNTIME_LEVELS[home] or RUNTIME_LEVELS[room] == RUNTIME_LEVELS[home] == ground)
    ]
    assert wrong == []


def test_the_runtime_takes_of_the_planner_what_the_map_says(found: list[tuple[str, str]]) -> None:
    [words] = re.findall(r"^runtime/.*\n(?: .*\n)*", MAP, re.M)
    said = {re.sub(r"/$|\.py$", "", name) for name in re.findall(r"\w+(?:/|\.py)", words)}
    taken = {room_of(imported) for module, imported in found if room_of(module) == "runtime"}
    assert {room for room in taken & LEVELS.keys() if LEVELS[room] < GROUND} <= said


def test_the_runtime_plans_and_simulates_nothing(found: list[tuple[str, str]]) -> None:
    """Nor does it load compiled loops, but for the exceptions; wherever an import stands."""
    forbidden = {"schedule", "simulation", "planning", "compiled"}
    users = {
        f"{module} imports {imported}"
        for module, imported in found
        if room_of(module) == "runtime" and imported.split(".")[0] == "chunkplan" and room_of(imported) in forbidden
    }
    assert users == set()


def test_the_planner_never_imports_torch(found: list[tuple[str, str]]) -> None:
    users = {module for module, imported in found if imported.split(".")[0] in RUNTIME_ONLY}
    assert {module for module in users if module.startswith("chunkplan.")} == set()


@pytest.mark.docs
def test_the_exceptions_are_there_and_named() -> None:
    assert set(imports()) >= EXCEPTIONS
    for module, _ in EXCEPTIONS:
        assert re.search(rf"`(runtime/)?{module.replace('.', '/')}\.py`", PAGE), module


@pytest.mark.docs
def test_the_files_it_names_exist() -> None:
    paths = re.findall(r"`((?:chunkplan|cli|runtime|tests|docs|examples)/[\w./-]*)`", PAGE)
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.docs
def test_the_names_it_says_to_add_to_are_there() -> None:
    """`NAME` of `FILE` or in `FILE`."""
    pairs = re.findall(r"`(\w+)`\s(?:of|to|in)\s`((?:chunkplan|cli|runtime|tests)/[\w./]+\.py)`", PAGE)
    assert len(pairs) > 5
    for name, path in pairs:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


def test_the_folders_of_tests_are_those_of_the_rooms():
    """None is left behind when a room moves; beside them are those for documents, older files and what tests share."""
    tests = ROOT / "tests"
    rooms = {path.name for path in PACKAGES["chunkplan"].iterdir() if path.is_dir()} | {"cli", "runtime"}
    folders = {path.name for path in tests.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - {"docs", "golden", "support"} <= rooms
    inside = {path.name for path in PACKAGES["chunkplan_runtime"].iterdir() if path.is_dir()}
    assert {
        path.name for path in (tests / "runtime").iterdir() if path.is_dir() and path.name != "__pycache__"
    } <= inside
    assert {"intake", "planning", "schedule", "runtime"} <= folders
