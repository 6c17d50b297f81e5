"""Where a front door under test writes its records: a list."""

from __future__ import annotations

import threading
import time

from coppice.request_log.record import RequestRecord, decoded, encoded

WAIT_S = 60


class FakeLog:
    def __init__(self) -> None:
        self._found: list[RequestRecord] = []
        self._lock = threading.Lock()

    def write(self, record: RequestRecord) -> None:
        again = decoded(encoded(record))
        assert again == record, "what is written is what is read"
        with self._lock:
            self._found.append(record)

    def of(self, request_id: str, count: int = 1) -> list[RequestRecord]:
        """Those of one `X-Request-Id`, once there are so many."""
        until_s = time.monotonic() + WAIT_S
        while True:
            with self._lock:
                found = [record for record in self._found if record.id == request_id]
            if len(found) >= count or time.monotonic() > until_s:
                return found
            time.sleep(0.005)
