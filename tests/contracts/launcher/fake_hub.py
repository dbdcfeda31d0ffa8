"""A server that answers as the Hugging Face Hub does to its client: commits, listings, files."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


@contextmanager
def fake_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve repositories (``models/OWNER/NAME`` or ``datasets/OWNER/NAME`` -> files); the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            for repo, files in repos.items():
                own = repo.removeprefix("models/")
                if path.startswith(f"/api/{repo}/tree/"):
                    return self.answer(json.dumps([_listed(name, body) for name, body in files.items()]).encode())
                if path.startswith(f"/api/{repo}"):
                    return self.answer(json.dumps({"id": own, "sha": COMMIT, "siblings": []}).encode())
                name = path.removeprefix(f"/{own}/resolve/{COMMIT}/")
                if name in files:
                    return self.answer(files[name], ETag=f'"{_oid(files[name])}"', **{"X-Repo-Commit": COMMIT})
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def answer(self, body: bytes, **headers: str) -> None:
            self.send_response(200)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _listed(name: str, body: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}
