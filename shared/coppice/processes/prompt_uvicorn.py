"""uvicorn, which ends at once where nobody is connected."""

from __future__ import annotations

import socket

import uvicorn


class PromptServer(uvicorn.Server):
    """Without connections it does not give them a tenth of a second to begin to close."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        await self.lifespan.shutdown()
