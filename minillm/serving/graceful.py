"""The HTTP server's end: after SIGTERM no request is taken, and those under way may finish."""

import asyncio
from types import FrameType

import uvicorn

from minillm.serving.http_server import Endpoints

DRAIN_SECONDS = 5.0
"""What requests under way get to finish after SIGTERM; then they are aborted."""


class Server(uvicorn.Server):
    """uvicorn, which after SIGTERM lets requests finish for a while, and then ends them."""

    def __init__(self, endpoints: Endpoints):
        self._endpoints = endpoints
        super().__init__(
            uvicorn.Config(
                endpoints.app(),
                lifespan="off",
                access_log=False,
                log_level="warning",
                log_config=None,  # its lines go where the program's own go
                timeout_graceful_shutdown=int(DRAIN_SECONDS) + 5,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGTERM and SIGINT; a second SIGINT does not wait."""
        self._endpoints.closing = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list | None = None) -> None:
        """Wait for those under way, then abort what is left."""
        self._endpoints.closing = True
        late = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._endpoints.abort_all)
        await super().shutdown(sockets)
        late.cancel()
