"""A Hugging Face Hub on this machine, for uploads: it makes repositories and keeps what is committed."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """`files`: what was committed, by repository and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.refuses_uploads = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.files.setdefault(name, {})
            self._answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif self.server.refuses_uploads:
            self._answer({"error": "the disk is full"}, 400)
        elif "/preupload/" in self.path:
            named = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in named]
            self._answer({"files": modes})
        else:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            told = {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1", "success": True}
            self._answer(told)

    def do_GET(self) -> None:
        self._answer({"error": "not there"}, 404)

    def _answer(self, document: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve one within the block."""
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
