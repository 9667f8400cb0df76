"""The options of a plan: those given, those of a TOML file, those that a tuning found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkplan.planning.config import PlanConfig

_CONFIG_HINT = "a config holds lines such as chunk-size = 8192"


def number(text: str) -> int | float:
    """A whole number where it is written as one."""
    from chunkplan.errors import UsageError

    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number", hint="for example: --holdout 0.01 --mix code.jsonl=2") from None


def weights_by_source(mix: list[str]) -> dict[str, int | float]:
    """Of "code.jsonl=2", each."""
    from chunkplan.errors import UsageError

    weights = {}
    for text in mix:
        source, equals, weight = text.rpartition("=")
        if not equals or not source:
            raise UsageError(f"--mix {text!r}, expected SOURCE=X", hint="for example: --mix code.jsonl=2")
        if source in weights:
            raise UsageError(f"{source} has two weights", hint="name every source at most once")
        weights[source] = number(weight)
    return weights


def k_and_k_by_length(text: str) -> tuple[int, list[list[int]]]:
    """K of "4", and of "4,131072:2" the pairs of tokens and K for longer sequences."""
    from chunkplan.errors import UsageError

    first, *others = text.split(",")
    pairs = [other.split(":") for other in others]
    words = [first, *(word for pair in pairs for word in pair)]
    if any(len(pair) != 2 for pair in pairs) or not all(word.isdecimal() and len(word) < 11 for word in words):
        raise UsageError(
            f"--k {text!r}, expected a number, or also TOKENS:K", hint="for example --k 4, or --k 8,131072:2"
        )
    return int(first), [[int(tokens), int(k)] for tokens, k in pairs]


def resolve(given: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """Of all options of a plan those given, and those of the TOML file."""
    import tomllib

    from chunkplan.errors import DataError, UsageError

    values: dict[str, Any] = {}
    if config is not None:
        if not config.is_file():
            raise UsageError(f"there is no file {config}", hint=_CONFIG_HINT)
        try:
            stated = tomllib.loads(config.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(f"not TOML: {error}", where=str(config), hint=_CONFIG_HINT) from error
        for key, value in stated.items():
            name = key.replace("-", "_")
            if name not in given:
                known = ", ".join(option.replace("_", "-") for option in given)
                raise UsageError(f"unknown option `{key}`", where=str(config), hint=f"known are {known}")
            values[name] = value
    if given["k"] is not None:  # without the pairs that belong to another K
        values.pop("k_by_length", None)
    return values | {name: value for name, value in given.items() if value is not None}


def plan_config(values: dict[str, Any]) -> PlanConfig:
    """A plan's configuration; what is missing takes its default."""
    from chunkplan.errors import UsageError
    from chunkplan.planning.config import PlanConfig

    for name in ("chunk_size", "k"):
        if name not in values:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} is missing",
                hint="for example: chunkplan build --chunk-size 8192 --k 4; or let --auto choose",
            )
    return PlanConfig(**values)


def describe_old(target: Path) -> str | None:
    """What `target` holds now, in words, if it is something that the new plan replaces."""
    from chunkplan.errors import ChunkplanError
    from chunkplan.planfile.load import load_plan

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        old = load_plan(target)
    except ChunkplanError:
        return "something that is no plan this version can read"
    config = old.config
    return f"a plan with ChunkSize {config['chunk_size']:,}, K {config['k']}, dp {config['dp']}, pp {config['pp']}"
