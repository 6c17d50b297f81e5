"""Clients that connect and say nothing: `python -m tests.fakes.api.idle_clients PORT COUNT`.

Keeps COUNT connections open, opening another for each that the server closes, until it is killed. Writes a line
`OPEN REFUSED` to stdout a few times a second: connections that are open now, attempts that failed so far.
"""

from __future__ import annotations

import asyncio
import sys

SAY_EVERY_S = 0.2
AT_ONCE = 50  # that are being opened; more would only fill the listener's backlog


class Clients:
    def __init__(self, port: int) -> None:
        self._port = port
        self._opening = asyncio.Semaphore(AT_ONCE)
        self.num_open = 0
        self.num_refused = 0

    async def keep_one(self) -> None:
        while True:
            try:
                async with self._opening:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                self.num_refused += 1
                await asyncio.sleep(0.5)
                continue
            self.num_open += 1
            try:
                await reader.read()
            except OSError:
                pass
            self.num_open -= 1
            writer.close()


async def main() -> None:
    clients = Clients(int(sys.argv[1]))
    tasks = [asyncio.create_task(clients.keep_one()) for _ in range(int(sys.argv[2]))]
    while tasks:
        print(clients.num_open, clients.num_refused, flush=True)
        await asyncio.sleep(SAY_EVERY_S)


if __name__ == "__main__":
    asyncio.run(main())
