"""A media host on loopback, in a thread: what a job's URLs are fetched from."""

import http.server
import threading
from typing import Any

from tests.sidecar.asked import FILES

PICTURE = FILES["blocks"].read_bytes()


class MediaHost(http.server.ThreadingHTTPServer):
    """`/picture.png` is one, `/status/N` answers so, `/slow` waits until `release` is set, then it is the picture."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.release = threading.Event()
        self.asked = threading.Semaphore(0)  # one for each request of /slow
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def __enter__(self) -> "MediaHost":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.release.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MediaHost

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.server.asked.release()
            self.server.release.wait(30)
        status = int(self.path.rpartition("/")[2]) if self.path.startswith("/status/") else 200
        self.send_response(status)
        self.send_header("Content-Length", str(len(PICTURE)))
        self.end_headers()
        self.wfile.write(PICTURE)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
