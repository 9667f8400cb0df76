"""A tuning as a document: read as it was written, refused where it is damaged; how far data have drifted from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

import numpy as np
import pytest

from chunkplan.errors import DataError
from chunkplan.tuning.document import read_tuning, tuned, tuning_document, write_tuning
from chunkplan.tuning.document_entries import (
    EXPECTED,
    BaselineEntry,
    ChoiceEntry,
    DataEntry,
    OptionsEntry,
    TuningDocument,
)
from chunkplan.tuning.drift import find_drift
from chunkplan.tuning.tune import Tuning


def test_what_is_written_is_read_again(tuning: Tuning, tmp_path: Path) -> None:
    write_tuning(tuning, tmp_path / "tune.json")
    assert read_tuning(tmp_path / "tune.json") == tuned(tuning)
    document = json.loads((tmp_path / "tune.json").read_text())
    assert document == json.loads(json.dumps(tuning_document(tuning)))
    assert list(tmp_path.iterdir()) == [tmp_path / "tune.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("chosen"),
        lambda document: document["chosen"].update(chunk_size=0),
        lambda document: document["chosen"].update(schedule="fastest"),
        lambda document: document["chosen"].update(k_by_length=[[5, 1], [5, 1]]),
        lambda document: document["data"].update(token_histogram={"x": 1}),
        lambda document: document["cost_model"].update(tp="four"),
        lambda document: document["options"].update(gpu_memory=10**400),
        lambda document: document.update(schema_version=2),
    ],
)
def test_a_damaged_document_is_refused_by_name(tuning: Tuning, tmp_path: Path, change: Any) -> None:
    document = json.loads(json.dumps(tuning_document(tuning)))
    change(document)
    (tmp_path / "tune.json").write_text(json.dumps(document))
    with pytest.raises(DataError) as error:
        read_tuning(tmp_path / "tune.json")
    assert str(tmp_path / "tune.json") in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"kind": "plan"}', "[" * 100_000])
def test_what_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(DataError):
        read_tuning(tmp_path / "tune.json")


def test_drift_is_the_share_of_tokens_that_changed_their_length_class(tuning: Tuning, lengths: Path) -> None:
    before = np.load(lengths)
    choice = tuned(tuning)
    config = choice.config
    same = find_drift(before, choice, config)
    assert same.moved == pytest.approx(0)
    assert same.fits
    assert not same.has_drifted
    shorter = find_drift(np.minimum(before, 1000).astype(np.int32), choice, config)
    assert shorter.has_drifted
    assert shorter.fits
    longer = find_drift(np.append(before, np.int32(40_000_000)).astype(np.int32), choice, config)
    assert longer.has_drifted
    assert not longer.fits
    assert longer.longest_now == 40_000_000


def relied_on(entry: type) -> set[str]:
    """The entries that readers of a typed dict rely on."""
    hints = get_type_hints(entry, include_extras=True)
    return {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}


def test_every_entry_that_is_relied_on_is_checked_when_a_document_is_read() -> None:
    expected: Any = EXPECTED
    assert relied_on(TuningDocument) == set(expected)
    assert relied_on(OptionsEntry) == set(expected["options"])
    assert relied_on(DataEntry) == set(expected["data"])
    assert relied_on(ChoiceEntry) == set(expected["chosen"]) - {
        "cp?",
        "stage_layers?",
        "split?",
        "keep_attention?",
        "loss?",
    }
    assert expected["choices"] == [expected["chosen"]]
    assert relied_on(BaselineEntry) == set(expected["baselines"][0])
