"""Stand-ins for what operators ask: pages of text by path."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def pages(by_path: Mapping[str, str]) -> Iterator[str]:
    """URL of a server that has these; queries are left out. Any other path is a 404, in the form of a service's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = by_path.get(self.path.partition("?")[0])
            body = (found or '{"error": {"message": "nothing there", "code": "not_found"}}').encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is said."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
