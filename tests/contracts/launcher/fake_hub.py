"""Servers that answer as the Hugging Face Hub and ModelScope do to their clients: commits, listings, files."""

import hashlib
import json
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

COMMIT = "c" * 40


Repos = Mapping[str, Mapping[str, bytes]]  # ``models/OWNER/NAME`` or ``datasets/OWNER/NAME`` -> files


class _Answering(BaseHTTPRequestHandler):
    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def fake_hub(repos: Repos) -> AbstractContextManager[str]:
    """Serve repositories as the Hub does; the URL."""

    class Handler(_Answering):
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
            self.answer(b"", 404, **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

    return _serving(Handler)


def fake_modelscope(repos: Repos, unfetched: Collection[str] = ()) -> AbstractContextManager[str]:
    """Serve the branch ``master`` of repositories as ModelScope does; the URL. ``unfetched`` is listed only."""

    class Handler(_Answering):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            for repo, files in repos.items() if query.get("Revision") == "master" else ():
                api = f"/api/v1/{repo}/repo"
                if asked.path in (f"{api}/files", f"{api}/tree"):
                    listed = [_entry(name, body) for name, body in files.items()]
                    return self.answer(json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())
                if asked.path == api and query.get("FilePath") in files.keys() - unfetched:
                    return self.answer(files[query["FilePath"]])
            self.answer(json.dumps({"Code": 10010205001, "Success": False, "Message": "not found"}).encode(), 404)

        do_HEAD = do_GET

    return _serving(Handler)


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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


def _entry(name: str, body: bytes) -> dict[str, object]:
    return {"Type": "blob", "Path": name, "Size": len(body), "Sha256": hashlib.sha256(body).hexdigest()}
