"""Folders that `save_to_disk` of Hugging Face datasets wrote: which of their files are data, and in which order."""

from __future__ import annotations

import json

from chunkplan.errors import DataError
from chunkplan.intake.files import Files, join, open_file, reading

#: What is written beside the data: of one split, and of a folder of splits.
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def data_files(files: Files, folder: str) -> list[str]:
    """The data files of a folder of `save_to_disk`, as it lists them.

    Raises:
        DataError: it does not say what its files are, or one is missing.
    """
    if files.exists(join(folder, SPLITS)):
        splits = _listed(join(folder, SPLITS), "splits")
        return [file for split in splits for file in data_files(files, join(folder, split))]
    listed = [join(folder, file) for file in _listed(join(folder, STATE), "_data_files")]
    missing = next((file for file in listed if not files.exists(file)), None)
    if missing is not None:
        raise DataError(f"{missing} is missing", where=join(folder, STATE), hint="save the dataset to disk again")
    return listed


def _listed(path: str, key: str) -> list[str]:
    """Names in a file of `save_to_disk`: strings, or objects with a `filename`."""
    with reading(path), open_file(path) as file:
        content = file.read()
    try:
        return [entry if isinstance(entry, str) else str(entry["filename"]) for entry in json.loads(content)[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"does not list the {key.strip('_')} of a dataset ({type(error).__name__})",
            where=path,
            hint="save the dataset to disk again, or name its files",
        ) from error
