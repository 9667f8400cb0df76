"""The product keeps to its house rules: sizes, names, docstrings and types. There are no exceptions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tests.support.places import ROOT

FOLDERS = ("chunkplan", "cli/chunkplan_cli", "runtime/chunkplan_runtime")

MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 500, 80, 10

#: Lines of each room at most, and files of all: a change that needs more finds them by deleting or merging.
BUDGETS = {
    ("runtime/",): 15_720,
    ("chunkplan/intake/",): 11_840,
    ("chunkplan/reporting/", "cli/"): 10_225,
    ("chunkplan/cost/", "chunkplan/tuning/"): 7_190,
    ("chunkplan/schedule/", "chunkplan/validation/", "chunkplan/simulation.py"): 6_540,
    ("chunkplan/config/", "chunkplan/options.py", "chunkplan/domains.py"): 1_540,
    ("",): 64_700,
}
MOST_FILES = 328

#: Of `dict[str, Any]` there are no more than now: it is for JSON of any shape and for keyword arguments.
MOST_UNTYPED_DICTS = 51

#: First words that docstrings do not have: they begin with what the thing is or does.
NO_FIRST_WORDS = re.compile(
    r"(What|Whether|How|Where|Which|When|Why|Who|Of|Do|Let|See|Say|Those|That|Have|As|By|To|If)\b"
)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, str]:
    """Path from the project's folder -> text, of every file of the product."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert len(paths) > 250
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def definitions() -> dict[str, list[tuple[str, Definition]]]:
    """Path -> every class and function that stands in a module or in a class, with its name from the module down."""
    return {path: list(defined(ast.parse(text))) for path, text in sources().items()}


def defined(node: ast.AST, within: str = "") -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield within + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from defined(child, f"{within}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from defined(child, within)  # below an `if` or a `try`


def num_parameters(function: Definition) -> int:
    """How many a caller can give; of a method those beside the object or class itself."""
    if isinstance(function, ast.ClassDef):
        return 0
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in every if each.arg not in ("self", "cls")])


def is_sentence(docstring: str | None) -> bool:
    """Whether its first paragraph has at least three words, a beginning and an end, or refers to what it implements."""
    paragraph = " ".join((docstring or "").partition("\n\n")[0].split())
    if re.fullmatch(r"Implements `[\w.]+`\.", paragraph):
        return True
    return bool(re.fullmatch(r"[A-Z`].*[.:]", paragraph)) and len(paragraph.split()) >= 3


def test_no_two_public_classes_have_one_name() -> None:
    names = [name for found in definitions().values() for name, node in found if isinstance(node, ast.ClassDef)]
    counts = Counter(name for name in names if not name.startswith("_"))
    assert len(counts) > 150
    assert {name: count for name, count in counts.items() if count > 1} == {}


def test_no_file_is_long() -> None:
    assert [path for path, text in sources().items() if text.count("\n") > MOST_LINES] == []


def test_no_room_has_more_lines_than_its_budget() -> None:
    lines = {path: text.count("\n") for path, text in sources().items()}
    of_rooms = {room: sum(count for path, count in lines.items() if path.startswith(room)) for room in BUDGETS}
    assert {room: count for room, count in of_rooms.items() if count > BUDGETS[room]} == {}
    assert len(lines) <= MOST_FILES


def test_no_function_is_long_or_has_many_parameters() -> None:
    functions = [
        (f"{path}: {name}", node)
        for path, found in definitions().items()
        for name, node in found
        if not isinstance(node, ast.ClassDef)
    ]
    assert len(functions) > 1200
    assert [name for name, node in functions if (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES] == []
    assert [name for name, node in functions if num_parameters(node) > MOST_PARAMETERS] == []


def test_no_more_dictionaries_of_anything_come_in() -> None:
    assert sum(text.count("dict[str, Any]") for text in sources().values()) <= MOST_UNTYPED_DICTS


def test_the_docstring_of_every_public_class_and_function_is_a_sentence() -> None:
    public = [
        (f"{path}: {name}", node)
        for path, found in definitions().items()
        for name, node in found
        if not any(part.startswith("_") for part in name.split("."))
    ]
    assert len(public) > 700
    assert [name for name, node in public if not is_sentence(ast.get_docstring(node))] == []


def test_every_docstring_begins_with_what_the_thing_is_or_does() -> None:
    docstrings = [
        (path, docstring)
        for path, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Definition | ast.Module) and (docstring := ast.get_docstring(node))
    ]
    assert len(docstrings) > 2_500
    assert [(path, docstring) for path, docstring in docstrings if NO_FIRST_WORDS.match(docstring)] == []


def test_what_is_no_sentence_is_noticed() -> None:
    for text in ("Of times.", "None.", "all of them, in order.", "The steps of a plan", "", None, "Implements it."):
        assert not is_sentence(text), text
    for text in ("Return the steps\nof a plan.\n\nmore", "`k` is a number.", "All of them:", "Implements `A.forward`."):
        assert is_sentence(text), text


def test_a_method_a_nested_class_and_what_stands_below_an_if_are_looked_at() -> None:
    source = "class A:\n  class B:\n    def f(self, a, *, b): ...\nif 1:\n  def g(a, /, b, c): ...\n"
    found = dict(defined(ast.parse(source)))
    assert {name: num_parameters(node) for name, node in found.items()} == {"A": 0, "A.B": 0, "A.B.f": 2, "g": 3}
