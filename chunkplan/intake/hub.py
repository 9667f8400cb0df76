"""Datasets by their name on the Hugging Face Hub: owner/name, and with a part owner/name:SPLIT, :CONFIG, :CONFIG/SPLIT.

Their files are fetched into the cache of huggingface_hub and read there as any others; nothing of them is run. Which
files a split has is said in the first lines of README.md, else by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from chunkplan.errors import UsageError

#: A name on the Hub, perhaps with a part of the dataset.
_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(:(?P<part>[\w.-]+(/[\w.-]+)?))?", re.ASCII)

#: How long the Hub has to answer before what was fetched earlier is all there is.
_SECONDS_TO_ANSWER = 5.0

#: The files of each split, or of a whole dataset under "", as patterns.
Patterns = Mapping[str, Sequence[str]]


def is_name(path: str) -> bool:
    """True if a path that is not there may be a name on the Hub: its first folder is not here either."""
    return _NAME.fullmatch(path) is not None and not Path(path.partition("/")[0]).exists()


def fetch_dataset(path: str, patterns: Sequence[str]) -> list[tuple[Path, str]]:
    """Fetch what `path` names; its files, each with its split, or "" where only the name of the file may say that.

    `patterns` are those of the ends of data files, where README.md does not say which files are data.

    Raises:
        UsageError: there is no such dataset, config or split, the Hub does not answer, or more than one split is for
            training and none is named.
    """
    match = _NAME.fullmatch(path)
    assert match is not None
    name, part = match["name"], match["part"] or ""
    splits = _choose(name, part, _configs(_snapshot(name, ["README.md"]) / "README.md"))
    splits = splits or {"": [f"*{part}*{pattern}" for pattern in patterns]}
    folder = _snapshot(name, [pattern for one in splits.values() for pattern in one])
    there = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    found = {
        file: split
        for split, chosen in splits.items()
        for file in there
        if any(fnmatchcase(file, pattern) for pattern in chosen)
    }
    if not found:
        raise UsageError(
            f"the dataset {name} on the Hub has no files of {part or 'kinds that are read'}",
            hint=f"name a file of https://huggingface.co/datasets/{name}/tree/main: hf://datasets/{name}/FILE",
        )
    return [(folder / file, split) for file, split in found.items()]


def silent_hub() -> str | None:
    """The words for a Hub that does not answer, which its client would retry for a minute; None where it does."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER)
        except Exception:  # of whichever library makes the connection
            return f"{constants.ENDPOINT} does not answer"
    return None


def _snapshot(name: str, patterns: list[str]) -> Path:
    """The folder of a dataset in the cache, with the files of these patterns."""
    from huggingface_hub import constants, snapshot_download

    silent = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else silent_hub()
    try:
        is_offline = silent is not None
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, local_files_only=is_offline))
    except Exception as error:  # it raises whatever came of the network, the cache and the name
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"{silent}, and it was not fetched before" if silent else first
        raise UsageError(
            f"there is no file {name}, and no dataset of that name can be fetched from the Hugging Face Hub: {why}",
            hint="check the name, the network and `hf auth login`; or give files, folders, patterns or URLs of data",
        ) from error


def _configs(readme: Path) -> dict[str, Patterns]:
    """Config -> split -> patterns, as the first lines of README.md say; the default config comes first."""
    from huggingface_hub import metadata_load

    found: dict[str, Patterns] = {}
    try:
        entries = ((metadata_load(readme) if readme.is_file() else None) or {}).get("configs") or []
        for entry in sorted(entries, key=lambda one: not one.get("default", one["config_name"] == "default")):
            files = entry["data_files"]
            if not isinstance(files, list) or not all(isinstance(one, Mapping) for one in files):
                files = [{"split": "train", "path": files}]
            paths = [(one["split"], one["path"]) for one in files]
            found[entry["config_name"]] = {split: [one] if isinstance(one, str) else one for split, one in paths}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}  # another layout than the Hub documents: the names of the files say what they are
    return found


def _choose(name: str, part: str, configs: Mapping[str, Patterns]) -> Patterns:
    """The splits of `configs` that `part` names: SPLIT, CONFIG or CONFIG/SPLIT; without any, those of the only config.

    Nothing where there are no configs.
    """
    first, _, second = part.partition("/")
    if not configs:
        return {}
    if not part and len(configs) > 1 and "default" not in configs:
        raise UsageError(
            f"the dataset {name} has the configs {', '.join(configs)}",
            hint=f"say which, such as {name}:{next(iter(configs))}",
        )
    config = first if first in configs else next(iter(configs))
    splits = configs[config]
    split = second or ("" if first == config else first)
    if split and split in splits:
        return {split: splits[split]}
    prefix = "" if len(configs) == 1 else f"{config}/"
    if split or (second and first not in configs):
        there = ", ".join(f"{name}:{config}/{one}" for config, splits in configs.items() for one in splits)
        raise UsageError(f"the dataset {name} has no config or split {part}", hint=f"it has {there}")
    if len(trained := [one for one in splits if one.startswith("train")]) > 1:
        raise UsageError(
            f"the dataset {name} has the splits {', '.join(splits)}",
            hint=f"say which is trained, such as {name}:{prefix}{trained[0]}",
        )
    return splits
