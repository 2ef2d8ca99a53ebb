"""The HTTP end of `leto_shadow.metrics`: a port that answers scrapes while the agent lives, and no longer.

Bound before anything else of the job starts (case 8: port 0 means any free one, and what was bound is told),
on the loopback interface unless the user names another. Requests run in threads of their own, few and with a
deadline, so that neither a silent client nor a flood of them can hold up the agent or pile up in it.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer"]

_REQUESTS_MAX = 8
_CLIENT_S = 5.0


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line for each scrape helps nobody."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """As the base class, without asking a name server who we are: that may take minutes."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Refuse what is too much instead of queueing it."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Listens from construction to `close`. Raises OSError if the address cannot be bound."""

    def __init__(self, registry: CollectorRegistry, address: str = "127.0.0.1", port: int = 0) -> None:
        from prometheus_client import make_wsgi_app

        kind = _Server6 if ":" in address else _Server
        self._server = make_server(address, port, make_wsgi_app(registry), kind, _Handler)
        self.address = address
        self.port = int(self._server.server_port)
        """The port that was bound."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="leto-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to scrape."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening; what is being answered is not waited for."""
        self._server.shutdown()
        self._thread.join(timeout=5.0)
        self._server.server_close()
