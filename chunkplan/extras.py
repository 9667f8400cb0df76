"""Commands that install an extra of this project, chosen by its packages or by a required package."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

from chunkplan.errors import UsageError


def pip_install(extra: str) -> str:
    """The command that installs what `extra` has: `pip install 'plotly<8,>=6'  # the extra report`.

    It names the packages and not this project, which may have come from a clone, a wheel or an index: the name is right
    in none of these ways alone. Where the metadata of an installation is missing, the command is for a clone.

    Raises:
        ValueError: there is no such extra.
    """
    try:
        requirements = requires("chunkplan") or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]'  # in the clone"
    split = [each.partition(";") for each in requirements]
    packages = [package.strip() for package, _, marker in split if marker.strip() == f"extra == '{extra}'"]
    if not packages:
        raise ValueError(f"no extra is called {extra}")
    quoted = " ".join(f"'{package}'" for package in packages)
    return f"pip install {quoted}  # the extra {extra}"


def not_installed(error: Exception) -> UsageError | None:
    """The error of a package that every installation of this project has and this one lacks.

    None where `error` is another one, or where no metadata of an installation says what it has.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    try:
        requirements = requires("chunkplan") or []
    except PackageNotFoundError:
        return None
    module = error.name.partition(".")[0]
    for each in requirements:
        if ";" not in each and re.split(r"[^\w-]", each)[0] == module:  # each is imported by its name
            return UsageError(f"{module} is not installed", hint=f"pip install '{each}'")
    return None
