"""Writes LICENCES.md: what chunkplan needs and under which licence, as the metadata of the installed packages say.

Run it after a change of pyproject.toml or constraints.txt, with all of them installed: python docs/list_licences.py
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

#: What `make` does not install, with the licence that its own repository names.
NOT_INSTALLED = {"bitsandbytes": "MIT", "flash-attn": "BSD-3-Clause", "liger-kernel": "BSD-2-Clause"}

HEAD = """# Licences

chunkplan is Apache-2.0 ([LICENSE](LICENSE)). What it needs is installed beside it, unchanged. Below are the versions
that `make` installs (`constraints.txt`), each with the licence that its own metadata name; `docs/list_licences.py`
writes this page. Sources and licences of the sample data are in [sample_data/README.md](sample_data/README.md).
"""


def project() -> dict[str, list[Requirement]]:
    """The requirements of pyproject.toml by extra; the core is ""."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": described["dependencies"], **described["optional-dependencies"]}
    return {
        extra: [each for each in map(Requirement, words) if each.name != described["name"]]
        for extra, words in asked.items()
    }


def licence(name: str) -> str:
    """The licence expression of a package; before there were any, its licence in a word or its classifiers."""
    if name in NOT_INSTALLED:
        return NOT_INSTALLED[name]
    described = metadata.metadata(name)
    free_text = (described.get("License") or "").strip()
    if expression := described.get("License-Expression"):
        return expression
    if free_text and "\n" not in free_text:
        return free_text
    classifiers = described.get_all("Classifier") or []
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    return ", ".join(named) or free_text.partition("\n")[0]


def version(name: str) -> str:
    """The version of a package without its build, which differs between machines: 2.13.0 of 2.13.0+cpu."""
    return "-" if name in NOT_INSTALLED else metadata.version(name).partition("+")[0]


def whole(direct: Iterable[Requirement]) -> dict[str, set[str]]:
    """The names of packages and of all they need in turn, each with those that need it; "chunkplan" for `direct`."""
    needed_by: dict[str, set[str]] = defaultdict(set)
    open_ends = [("chunkplan", each, "") for each in direct]
    while open_ends:
        parent, requirement, extra = open_ends.pop()
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": extra})) or parent in needed_by[name]:
            continue
        needed_by[name].add(parent)
        for own_extra in ("", *requirement.extras):
            open_ends += [(name, Requirement(each), own_extra) for each in metadata.requires(name) or []]
    return {name: parents for name, parents in needed_by.items() if parents}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *sorted(map(list, rows))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write() -> str:
    """Format the whole page of licences."""
    asked = project()
    core = [
        (name, version(name), licence(name), ", ".join(sorted(parents)))
        for name, parents in whole(asked.pop("")).items()
    ]
    development = [(each.name, version(each.name), licence(each.name)) for each in asked.pop("dev")]
    extras: dict[str, list[str]] = defaultdict(list)
    for extra, requirements in asked.items():
        for each in requirements:
            extras[each.name].append(extra)
    extra_rows = [(name, version(name), licence(name), ", ".join(names)) for name, names in extras.items()]
    return (
        "\n".join(
            [
                HEAD,
                "## Always installed\n\nWhat chunkplan itself asks for, and what that needs in turn, on Linux.\n",
                table(("Package", "Version", "Licence", "Needed by"), core),
                "## With extras\n\nWhat these need in turn is their own to say.\n",
                table(("Package", "Version", "Licence", "Extra"), extra_rows),
                "## For development only\n\nThe extra `dev` has these, and those of most other extras.\n",
                table(("Package", "Version", "Licence"), development),
            ]
        ).rstrip("\n")
        + "\n"
    )


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "LICENCES.md"
    output.write_text(write(), encoding="utf-8", newline="\n")
