"""A stand-in for the Hugging Face Hub: a server on this machine with the routes by which datasets are fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_with(datasets: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve `datasets`, name -> path -> content; yield the address, and the paths that were fetched so far."""
    fetched: list[str] = []

    class _Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, is_head: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            name = next((name for name in datasets if f"datasets/{name}/" in path), None)
            if not path:
                return self._send(b"", {})
            if name is None:
                return self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)
            files, rest = datasets[name], path.partition(f"datasets/{name}/")[2]
            if rest.startswith("revision/"):
                return self._send_json({"id": name, "sha": _COMMIT})
            if rest.startswith("tree/"):
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": _oid(content)}
                    for file, content in files.items()
                ]
                return self._send_json(entries)
            file = rest.partition(f"resolve/{_COMMIT}/")[2]
            if file not in files:
                return self._send(b"", {"X-Error-Code": "EntryNotFound"}, status=404)
            if not is_head:
                fetched.append(file)
            headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{_oid(files[file])}"'}
            return self._send(files[file], headers, is_head=is_head)

        def _send_json(self, value: object) -> None:
            self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(
            self, content: bytes, headers: Mapping[str, str], *, status: int = 200, is_head: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
