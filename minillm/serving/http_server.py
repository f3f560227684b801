"""An endpoint that OpenAI's clients can talk to, over the engine's thread.

Routes: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.
Cost: the event loop takes about 1% of the processor time that the steps take.

A client that goes away is noticed at once, and its requests end before the next step. A full queue
answers 503 with Retry-After.
Not here: the end (`minillm.serving.graceful`); TLS and several processes, which are a proxy's.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minillm.serving.engine_thread import ClosedError, EngineThread, Job, Piece
from minillm.serving.fields import MAX_BODY, RefusedError, read_body
from minillm.serving.protocol import Ask, read_ask
from minillm.serving.replies import Reply
from minillm.serving.scheduler import QueueFull

_log = logging.getLogger("minillm.serving.requests")  # one line a request
Endpoint = Callable[[Request], Awaitable[Response]]


class _Stream(StreamingResponse):
    """Server-sent events; `close` is called however the response ends."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)  # ended where the client goes away
        finally:
            self._close()


class Endpoints:
    """The handlers, over a thread that has started. api_key: what clients must send, if any."""

    def __init__(self, thread: EngineThread, *, api_key: str | None = None):
        self._thread, self._key = thread, api_key
        self._config, self._created = thread.engine.model.config, int(time.time())
        self._running: set[int] = set()  # request ids that clients wait for
        self.closing = False

    def app(self) -> Starlette:
        """The application for an ASGI server."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers = {RefusedError: _refused, HTTPException: _not_found, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers)

    def abort_all(self) -> None:
        """End every request under way; their clients get an error."""
        self._thread.abort(list(self._running))

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint for those who know the key."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            wanted = f"Bearer {self._key}".encode()
            if self._key is not None and not hmac.compare_digest(given, wanted):
                raise RefusedError(
                    "The API key is missing or wrong; send the header Authorization: Bearer KEY.",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
            return await endpoint(request)

        return guarded

    async def _health(self, request: Request) -> Response:
        healthy = self._thread.alive and not self.closing
        return Response(status_code=200 if healthy else 503)

    async def _metrics(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._thread.metrics.text(), headers={"content-type": kind})

    @property
    def _card(self) -> dict[str, object]:
        name, length = self._config.name, self._config.max_seq_len
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "minillm",
            "root": name, "max_model_len": length,
        }  # fmt: skip

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._config.name:
            raise RefusedError(
                f"The model {name!r} is not served here; ask for {self._config.name!r}.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        return JSONResponse(self._card)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        """Check, queue, and answer at once or in a stream."""
        arrival = self._thread.engine.clock.now()  # before a step under way is waited for
        if self.closing:
            raise RefusedError("The server is shutting down; ask again later.", status=503)
        body = read_body(await _body(request))
        ask = read_ask(body, chat=chat, model=self._config.name)
        # Not in the event loop: a template or a long text takes milliseconds.
        prompts = await asyncio.to_thread(self._prompt_ids, ask)
        scores = []
        if ask.echo and ask.top_logprobs is not None:
            scores = [await self._asked(self._thread.score(p, ask.top_logprobs)) for p in prompts]
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(piece: Piece) -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop has ended, and with it whoever would listen
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        ids = await self._asked(self._thread.submit(self._job(ask, prompts, arrival), hear))
        self._running.update(ids)
        reply = Reply(ask, self._config.name, self._thread.tokenizer, prompts, scores)

        def close() -> None:
            self._running.difference_update(ids)
            self._thread.abort(ids)
            _log.info(
                "%s: %d prompts of %d tokens, %d answers, %d tokens, %.3f s",
                request.url.path, len(prompts), sum(map(len, prompts)), len(ids),
                sum(reply.n_tokens), self._thread.engine.clock.now() - arrival,
            )  # fmt: skip

        if ask.stream:
            return _Stream(_events(reply, pieces), close)
        try:
            return await _unless_gone(request, _whole(reply, pieces))
        finally:
            close()

    async def _asked(self, future: "asyncio.Future") -> object:
        """The result of a call to the engine's thread; RefusedError for what it refuses."""
        try:
            return await asyncio.wrap_future(future)
        except QueueFull as error:
            self._thread.metrics.rejected()
            raise RefusedError(str(error), status=503, code="queue_full") from None
        except ClosedError as error:
            raise RefusedError(str(error), status=503) from None
        except (ValueError, TypeError) as error:
            raise RefusedError(str(error)) from None

    def _prompt_ids(self, ask: Ask) -> list[list[int]]:
        tokenizer = self._thread.tokenizer
        try:
            if ask.messages is not None:
                return [tokenizer.chat(ask.messages)]
            return [tokenizer.encode(p) if isinstance(p, str) else p for p in ask.prompts]
        except ValueError as error:
            raise RefusedError(str(error), param="messages" if ask.chat else "prompt") from None

    def _job(self, ask: Ask, prompts: Sequence[Sequence[int]], arrival: float) -> Job:
        engine, tokenizer = self._thread.engine, self._thread.tokenizer
        places = engine.config.max_seqs + (engine.config.max_waiting or len(prompts) * ask.n)
        if len(prompts) * ask.n > places:
            raise RefusedError(
                f"{len(prompts)} prompts with n {ask.n} are {len(prompts) * ask.n} answers, and "
                f"this server holds {places} at once; ask for fewer.",
                param="n" if ask.n > 1 else "prompt",
            )  # fmt: skip
        most = ask.max_tokens
        if most is None:  # all that the positions and the blocks have room for
            slots = engine.scheduler.capacity * engine.config.block_size
            most = max(1, min(self._config.max_seq_len, slots + 1) - max(map(len, prompts)))
        stop_ids = frozenset(() if ask.ignore_eos else tokenizer.stop_ids)
        return Job(prompts, most, ask.samplings, stop_ids, ask.stop, arrival, ask.top_logprobs)


async def _body(request: Request) -> bytes:
    """The body of a request, which must be JSON and not too long."""
    # A web page can send other types to any address without being asked, but not this one.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RefusedError(
            "The body's type is not JSON; send the header Content-Type: application/json.",
            status=415,
        )  # fmt: skip
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY:
                raise RefusedError(
                    f"The body is longer than {MAX_BODY:,} bytes; send less at once.", status=413
                )
    except ClientDisconnect:
        raise RefusedError("The body is not complete.") from None  # nobody reads this
    return bytes(data)


def _error_of(piece: Piece) -> RefusedError | None:
    """The error to tell for an answer that did not come to its own end."""
    if piece.finish_reason != "aborted":
        return None
    if piece.error is None:
        return RefusedError("The server is shutting down; ask again later.", status=503)
    cause = piece.error.splitlines()[0].rstrip(".")
    return RefusedError(f"The answer could not be computed ({cause}); ask again.", status=500)


async def _whole(reply: Reply, pieces: "asyncio.Queue[Piece]") -> Response:
    """All of the answer in one response."""
    heard: list[Piece] = []
    while reply.n_open:
        piece = await pieces.get()
        if error := _error_of(piece):
            raise error
        heard.append(piece)
        reply.n_open -= piece.finish_reason is not None
    return JSONResponse(reply.whole(heard))


async def _events(reply: Reply, pieces: "asyncio.Queue[Piece]") -> AsyncIterator[bytes]:
    """The answer as server-sent events, as its tokens come."""
    while reply.n_open:
        piece = await pieces.get()
        if error := _error_of(piece):
            yield _event(error.body)
            return
        for chunk in reply.chunks(piece):
            yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(body: dict) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer; or, as soon as the client has gone away, nothing that anyone reads."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=499)
    finally:
        for task in tasks:
            task.cancel()


async def _refused(request: Request, error: RefusedError) -> Response:
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _not_found(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    said = f"{request.method} {request.url.path} is not here; see /v1/models and the README."
    return JSONResponse(RefusedError(said, status=error.status_code).body, error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    """A mistake of our own."""
    refused = RefusedError("The server failed; its log says how.", status=500)
    return JSONResponse(refused.body, refused.status)
