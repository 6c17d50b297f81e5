"""A TCP proxy whose connections can be cut or stalled: the network between two processes, in the hands of a test."""

from __future__ import annotations

import socket
import threading


class TcpProxy:
    """Forwards `port` to `target_port` on loopback. `cut` drops what is open; with `down` nothing new is accepted."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.down = False
        self._closing = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> int:
        """Close every connection in the middle of whatever it carries; how many there were."""
        with self._lock:
            victims, self._open = self._open, set()
        for victim in victims:
            try:
                victim.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was faster
        return len(victims) // 2

    def close(self) -> None:
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=5)

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.down:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._forward, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                sink.sendall(data)
        except OSError:
            pass  # cut
        for end in (source, sink):
            with self._lock:
                self._open.discard(end)
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by the other direction
        source.close()
