"""Sources behind URLs are looked at before any is read, and only their beginnings are fetched for that.

The server is one of HTTP on this machine, that answers ranges to `webhdfs://` as Hadoop's does: no more is needed for
that than what the tests install.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import IntakeOptions, analyze
from chunkplan.errors import DataError
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
RECORDS = [{"text": f"number {number} of many " + "word " * 50} for number in range(12_000)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


class Server(ThreadingHTTPServer):
    """Serves `files` by name, and counts in `sent` the bytes of each that were sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    """A file, or a range of it."""

    server: Server

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        name, query = address.path.rpartition("/")[2], parse_qs(address.query)
        content = self.server.files.get(name)
        if content is None:
            self._send(404, b"{}")
        elif query.get("op") == ["GETFILESTATUS"]:
            status = {"FileStatus": {"type": "FILE", "length": len(content), "pathSuffix": name}}
            self._send(200, json.dumps(status).encode())
        else:
            start = int(query.get("offset", ["0"])[0])
            self._send(200, content[start : start + int(query["length"][0])], name)

    def _send(self, status: int, body: bytes, name: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if name is not None:
            self.server.sent[name] += len(body)

    def log_message(self, *_: object) -> None:
        """Nothing is written to the screen."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _urls(server: Server) -> list[str]:
    return [f"webhdfs://127.0.0.1:{server.server_port}/data/{name}" for name in server.files]


def test_what_is_wrong_with_one_is_reported_before_the_others_are_fetched(server: Server, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS * 3), tmp_path / "e.parquet", compression="none", row_group_size=2000)
    server.files = {
        "a.jsonl": LINES,
        "b.jsonl.gz": gzip.compress(LINES, 0),
        "c.json": json.dumps(RECORDS).encode(),
        "d.txt": LINES,
        "e.parquet": (tmp_path / "e.parquet").read_bytes(),
        "f.jsonl": b'{"foo": 1}\n' * 100_000,
        "g.jsonl": b"",
        "h.parquet": b"PAR1 and no more",
        "i.jsonl": b'{"text": 5}\n' * 100,
    }
    with pytest.raises(DataError, match="4 of 9 sources cannot be read, and nothing was tokenised") as caught:
        analyze(_urls(server), tmp_path / "out", tokenizer=TOKENIZER)
    found = [line.rpartition("/data/")[2] for line in caught.value.lines]
    for line, said in zip(
        found,
        ("f.jsonl: no schema fits", "g.jsonl: the file is empty", "h.parquet: not a parquet", "i.jsonl:1: `text` is a"),
        strict=True,
    ):
        assert line.startswith(said)
    assert min(len(content) for name, content in server.files.items() if name < "f") > 3_000_000
    assert server.sent.pop("e.parquet") < 3_000_000 < len(server.files["e.parquet"]) / 3
    assert max(server.sent.values()) < 600_000
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "pieces" in path.parts]


def test_they_are_read_as_they_are_where_all_is_well_and_left_out_where_it_is_not(
    server: Server, tmp_path: Path
) -> None:
    server.files = {
        "a.jsonl": LINES[:100_000].rpartition(b"\n")[0],
        "b.jsonl": b'{"foo": 1}\n',
        "c.jsonl": b'{"text": "a b"}',
    }
    analysis = analyze(_urls(server), tmp_path / "out", IntakeOptions(on_error="skip"), tokenizer=TOKENIZER)
    sources = analysis.manifest["sources"]
    assert [source["records"] - source["rejected"] for source in sources] == [
        server.files["a.jsonl"].count(b"\n") + 1,
        0,
        1,
    ]
    assert sources[1]["reasons"] == {"unreadable": 1}
