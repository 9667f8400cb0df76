"""The invariants of an analysis, broken on purpose, are found under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from chunkplan import validate
from tests.support.manifests import change_manifest


def test_a_changed_token_is_found(analysis: Path) -> None:
    """One bit of one token id: the lengths still fit, the content hash does not."""
    part = analysis / "tokens" / "part-00000.arrow"
    content = bytearray(part.read_bytes())
    ids = pa.ipc.open_file(part).get_batch(0).column("input_ids").flatten().to_numpy().tobytes()
    content[content.find(ids)] ^= 1
    part.write_bytes(content)
    assert "content-hash" in {violation.invariant for violation in validate(analysis).violations}


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"totals": {"num_sequences": 20, "num_tokens": 1, "num_target_tokens": 1}}, "totals"),
        ({"rejected": {"empty": 1}}, "records"),
        ({"max_token_id": 3}, "tokens"),
        ({"content_hash": "0" * 64}, "content-hash"),
    ],
)
def test_a_broken_analysis_is_named(analysis: Path, change: dict[str, Any], invariant: str) -> None:
    for entry, value in change.items():
        change_manifest(analysis, entry, value=value)
    assert [violation.invariant for violation in validate(analysis).violations] == [invariant]
