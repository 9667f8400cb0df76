"""Little data that unpacks to much: read in bounded memory, whatever is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from chunkplan import analyze
from chunkplan.errors import DataError

MIB = 1 << 20

#: Analyzes a file in one process, leaves out what is rejected, and prints what came of it and the most memory it took
#: (`ru_maxrss` would also count what its parent had).
ANALYZE = """
import json, re, sys
from pathlib import Path
from chunkplan import analyze
from chunkplan.config.intake import IntakeOptions
file, folder = sys.argv[1:]
analysis = analyze(file, folder + "/analysis", IntakeOptions(on_error="skip"), cache=folder + "/cache", workers=1)
most = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
print(json.dumps([analysis.num_sequences, analysis.manifest["rejected"], most]))
"""


def one_line(num_mib: int) -> Iterator[bytes]:
    yield b'{"text": "'
    for _ in range(num_mib):
        yield b"a" * MIB
    yield b'"}\n'


def empty_lines(num_mib: int) -> Iterator[bytes]:
    for _ in range(num_mib // 8):  # each line takes a moment
        yield b"\n" * MIB


def one_array(num_mib: int) -> Iterator[bytes]:
    yield b'{"text": '
    for _ in range(num_mib):
        yield b"[" * MIB
    yield b"\n"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("codec", "suffix", "content", "rejected"),
    [
        ("zstd", "zst", one_line, {"too-large": 1}),
        ("gzip", "gz", one_line, {"too-large": 1}),
        ("bz2", "bz2", one_line, {"too-large": 1}),
        ("zstd", "zst", one_array, {"too-large": 1}),
        ("zstd", "zst", empty_lines, {}),
    ],
    ids=["zstd", "gzip", "bz2", "brackets", "empty lines"],
)
def test_what_unpacks_to_a_gibibyte_takes_little_memory(
    tmp_path: Path, codec: str, suffix: str, content: Callable[[int], Iterator[bytes]], rejected: dict[str, int]
) -> None:
    path = tmp_path / f"data.jsonl.{suffix}"
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), codec) as file:
        for data in content(1024):
            file.write(data)
        file.write(b'{"text": "small"}\n')
    assert path.stat().st_size < 8 * MIB
    ended = subprocess.run([sys.executable, "-c", ANALYZE, path, tmp_path], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    num_sequences, reasons, most = json.loads(ended.stdout)
    assert (num_sequences, reasons) == (1, rejected)
    assert most < 512 * MIB


def test_a_window_that_takes_gigabytes_is_refused(tmp_path: Path) -> None:
    """A frame of Zstandard (RFC 8878) with a window of 2 GiB and one raw block."""
    line = b'{"text": "small"}\n'
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    for exponent, is_read in ((10, True), (21, False)):  # 1 MiB, 2 GiB
        path = tmp_path / f"{exponent}.jsonl.zst"
        path.write_bytes(bytes.fromhex("28b52ffd00") + bytes([exponent << 3]) + block)
        if is_read:
            assert analyze(path, tmp_path / "analysis", cache=tmp_path / "cache").num_sequences == 1
        else:
            with pytest.raises(DataError, match="damaged, or not zstd"):
                analyze(path, tmp_path / "analysis", cache=tmp_path / "cache")
