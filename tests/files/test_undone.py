"""A process that ends in the middle of writing, by another of its threads: all is whole, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.process_checks import left_behind

#: Writes a folder and a file again and again, each time with one number in all of their parts.
WRITE = """
import sys, threading, time
from pathlib import Path
from chunkplan.files.folder import replace_folder
from chunkplan.files.writing import end_process
from chunkplan.files.writing import whole_file

place, seconds = Path(sys.argv[1]), float(sys.argv[2])
end = threading.Thread(target=lambda: (time.sleep(seconds), end_process(130, "last words\\n")), daemon=True)
number = 0
while True:
    number += 1
    with replace_folder(place / "plan", "plan") as folder:
        (folder / "manifest.json").write_text(f'{{"kind": "plan", "number": {number}}}')
        for name in ("steps", "chunks", "schedule"):
            (folder / f"{name}.parquet").write_text(f'{{"kind": "plan", "number": {number}}}')
    with whole_file(place / "file") as file:
        file.write(str(number))
        file.flush()
        file.write(str(number))
    sys.stderr.write("a word\\n")
    if number == 1:
        end.start()
"""


@pytest.mark.parametrize("turns", [5, pytest.param(100, marks=pytest.mark.soak)])
def test_whatever_is_being_written_is_whole_or_as_it_was(tmp_path: Path, turns: int) -> None:
    for turn in range(turns):
        ran = subprocess.run(
            [sys.executable, "-c", WRITE, str(tmp_path), str(0.001 * turn)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 130 and ran.stderr.endswith("a word\nlast words\n")
        assert {path.name for path in tmp_path.iterdir()} == {"plan", "file"} and left_behind(tmp_path) == []
        names = sorted(path.name for path in (tmp_path / "plan").iterdir())
        assert names == ["chunks.parquet", "manifest.json", "schedule.parquet", "steps.parquet"]
        assert len({path.read_text() for path in (tmp_path / "plan").iterdir()}) == 1
        number = (tmp_path / "file").read_text()
        assert number[: len(number) // 2] == number[len(number) // 2 :] != ""
