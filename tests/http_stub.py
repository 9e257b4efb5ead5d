"""A real HTTP server on a free port for handlers that a test writes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """Answers without printing; a page may wait for `self.server.released`, which is set when the test ends."""

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(handler: type[Quiet], port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """The server, with `url` and `released`; stopped at the end."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.released, server.url = threading.Event(), f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
