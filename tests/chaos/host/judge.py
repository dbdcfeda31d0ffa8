"""A judge outside the system that can be slow: its answers then come one byte after another."""

import http.server
import json
import threading
import time

VERDICT = json.dumps({"reason": "", "score": 10})
BODY = json.dumps({"choices": [{"index": 0, "message": {"content": VERDICT}, "finish_reason": "stop"}]}).encode()
BYTE_S = 0.5


class DrippingJudge:
    """Serves on ``host`` until it is closed."""

    def __init__(self, host: str) -> None:
        judge = self
        self._drips_until = 0.0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(BODY)))
                self.end_headers()
                sent = 0
                while time.monotonic() < judge._drips_until and sent < len(BODY) - 1:
                    self.wfile.write(BODY[sent : sent + 1])
                    sent += 1
                    time.sleep(BYTE_S)
                self.wfile.write(BODY[sent:])

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that waits no longer has hung up."""

        self._server = Server((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def drip(self, seconds: float) -> None:
        """Be slow for that long; return at its end."""
        self._drips_until = time.monotonic() + seconds
        time.sleep(seconds)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
