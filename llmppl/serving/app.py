"""HTTP server with the endpoints of OpenAI for chat, completions and decisions, over a `Service`.

Each choice has its `weight`, the posterior probability, and `ended`, the reason why it ended.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from importlib import import_module
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from llmppl.lm import Context
from llmppl.serving.answers import Answer, answers, legacy_logprobs, logprobs
from llmppl.serving.bodies import Chat, Completion, Limits, check_length
from llmppl.serving.decisions import OPENAI, SCHEMAS, SYSTEM_ONE, DecisionJob, Route
from llmppl.serving.intake import BodyTimer, Lanes
from llmppl.serving.service import Call, Service, ServiceFull
from llmppl.serving.tools import read_call
from llmppl.tasks.answers import Generation

POLL = 0.25  # seconds between two looks whether a client is still there
STATUSES = {
    ServiceFull: 429,
    TimeoutError: 408,
    ValueError: 400,
    TypeError: 400,
    RecursionError: 400,
}


class _Job:
    """A request that has been checked: the calls of each prompt, and the form of the response."""

    def __init__(
        self, service: Service, name: str, limits: Limits, body: Chat | Completion
    ) -> None:
        self.body, self.name, self.lm = body, name, service.lm
        self.id, self.created = (
            f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}",
            int(time.time()),
        )
        check_model(body.model, name)
        constraint = body.target()
        runs = body.runs(self.lm, limits, constraint)
        self.prompts = body.prompts(self.lm)
        if not 1 <= len(self.prompts) <= limits.prompts:
            raise ValueError(
                f"{len(self.prompts)} prompts: this server takes 1 to {limits.prompts}"
            )
        if body.stream and (body.n, len(self.prompts)) != (1, 1):
            raise ValueError("a stream has one prompt and n=1")
        self.calls: list[Call[Generation]] = []
        try:
            for prompt in self.prompts:
                for each in runs:
                    self.calls.append(service.generate(prompt, constraint, **each))
        except BaseException:
            self.cancel()
            raise

    @property
    def chat(self) -> bool:
        return isinstance(self.body, Chat)

    def cancel(self) -> None:
        for call in self.calls:
            call.cancel()

    def _choice(
        self, index: int, answer: Answer, prompt: Context, generation: Generation
    ) -> dict[str, Any]:
        """Return a choice of the response."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        choice |= {"weight": answer.weight, "ended": answer.ended}
        body = self.body
        if body.num_top is not None:
            entries = logprobs(generation, prompt, answer, body.num_top)
            choice["logprobs"] = (
                {"content": entries, "refusal": None} if self.chat else legacy_logprobs(entries)
            )
        if not isinstance(body, Chat):
            return {**choice, "text": answer.text}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        called = answer.finish_reason == "stop" and read_call(answer.text, [*body.functions()])
        if called:
            message |= {"content": None, "tool_calls": [called]}
            choice["finish_reason"] = "tool_calls"
        return {**choice, "message": message}

    def _frame(self, **fields: Any) -> dict[str, Any]:
        """Return an object of the response."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            **fields,
        }

    def response(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the response to all prompts."""
        runs = len(generations) // len(self.prompts)
        choices = list[dict[str, Any]]()
        num_tokens = 0
        for i, prompt in enumerate(self.prompts):
            first, *more = generations[i * runs : (i + 1) * runs]
            for answer in answers(first, more, self.body.n):
                choices.append(self._choice(len(choices), answer, prompt, first))
                num_tokens += answer.num_tokens(prompt)
        return self._frame(
            choices=choices, usage=self._usage(num_tokens), llmppl=[*map(_cost, generations)]
        )

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream: pieces of settled text, or the call of a function, and the end."""
        try:
            async for event in self._events():
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(_error_body(*_explained(error)))}\n\n"
        finally:
            self.cancel()  # the client may have left

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        [call], body = self.calls, self.body
        functions = isinstance(body, Chat) and body.functions()

        def event(
            delta: dict[str, Any], finish_reason: str | None = None, **more: Any
        ) -> dict[str, Any]:
            choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None, **more}
            choice |= {"delta": delta} if self.chat else {"text": delta.get("content", "")}
            return self._frame(choices=[choice])

        if self.chat:
            yield event({"role": "assistant", "content": None if functions else ""})
        text = ""
        sent = 0
        async for piece in call:
            text += piece
            if (
                not functions or text.lstrip()[:1] not in "{<"
            ):  # a call comes at the end, as a whole
                yield event({"content": text[sent:]})
                sent = len(text)
        generation = await call
        [answer] = answers(generation, [], 1)
        [prompt] = self.prompts
        choice = await asyncio.to_thread(self._choice, 0, answer, prompt, generation)
        if made := choice.get("message", {}).get("tool_calls"):
            yield event({"tool_calls": [{"index": 0, **each} for each in made]})
        elif sent < len(text):
            yield event({"content": text[sent:]})
        last = {name: choice[name] for name in ("weight", "ended", "logprobs")}
        yield event({}, choice["finish_reason"], **last)
        if body.stream_options.get("include_usage"):
            usage = self._usage(answer.num_tokens(prompt))
            yield self._frame(choices=[], usage=usage, llmppl=[_cost(generation)])


def check_model(asked: Any, name: str) -> None:
    """Raise an HTTPException if a request is for another model."""
    if asked not in (None, name):
        raise HTTPException(404, f"this server runs the model {name!r}, not {asked!r}")


def _cost(generation: Generation) -> dict[str, Any]:
    """Return the method of a run and its work. `tokens` counts those that the model ran, for all particles."""
    return {name: getattr(generation, name) for name in ("method", "call", "tokens", "seconds")}


def _explained(error: BaseException) -> tuple[int, str, str | None]:
    """Return the status, the message and the wrong field of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail), None
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][1:]))
        message = first["msg"].removeprefix("Value error, ")
        return 400, f"{field}: {message}" if field else message, field or None
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status, str(error), None
    return 500, f"{type(error).__name__}: {error}", None


def _error_body(status: int, message: str, field: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def described_by(schema: str) -> dict[str, Any]:
    """Return the description of a body for /openapi.json."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"requestBody": {"content": content}}


def make_app(
    service: Service, *, name: str = "llmppl", key: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """Return the application: the endpoints of OpenAI, /v1/systemone and /health.

    Parameters
    ----------
    service : Service
    name : str
        Name of the model. Requests for another one are refused.
    key : str, optional
        Requests must have the header "Authorization: Bearer KEY".
    limits : Limits, optional
    """
    limits = limits or Limits()

    async def known(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise HTTPException(401, "the key is missing or wrong: Authorization: Bearer KEY")

    version = import_module("llmppl").__version__
    app = FastAPI(title="llmppl", version=version, openapi_url=None, max_body_size=limits.bytes)
    closed = APIRouter(dependencies=[Depends(known)])
    app.add_middleware(BodyTimer)
    lanes = Lanes()

    async def failed(request: Request, error: Exception) -> JSONResponse:
        explained = _explained(error)
        if "content-encoding" in request.headers:
            explained = (
                415,
                "a body must not be compressed: TypeSafeClient(compression=False) sends it as it is",
                None,
            )
        if explained[0] < 500:
            error.__traceback__ = None  # its frames hold the objects of the request, and the error
        return JSONResponse(_error_body(*explained), explained[0])

    for kind in (HTTPException, RequestValidationError, *STATUSES, Exception):
        app.add_exception_handler(kind, failed)

    def size(request: Request) -> int:
        return int(request.headers.get("content-length", limits.bytes))

    async def answer(request: Request, body: Chat | Completion) -> Any:
        check_length(service.lm, body.length)
        make = partial(
            _Job, service, name, limits, body
        )  # in another thread, so that other requests go on
        constrained = body.constraint or (
            isinstance(body, Chat) and (body.tools or body.response_format)
        )
        job = await (lanes.run(make, size(request)) if constrained else asyncio.to_thread(make))
        if body.stream:
            return StreamingResponse(job.events(), media_type="text/event-stream")
        return await finished(request, job)

    async def decide(request: Request, route: Route, body: dict[str, Any]) -> JSONResponse:
        check_model(body.get("model"), name)
        make = partial(DecisionJob, service, limits, route, body)
        return await finished(request, await lanes.run(make, size(request)))

    async def finished(request: Request, job: _Job | DecisionJob) -> JSONResponse:
        """Return the response of a job after its calls. They end if the client leaves."""
        try:
            (waiting := asyncio.gather(*job.calls)).add_done_callback(
                asyncio.Future.exception
            )  # else it is logged
            while not (await asyncio.wait([waiting], timeout=POLL))[0]:
                if await request.is_disconnected():
                    raise HTTPException(499, "the client has left")
            return JSONResponse(
                await lanes.run(partial(job.response, await waiting), size(request))
            )
        finally:
            for call in job.calls:
                call.cancel()

    @closed.post("/v1/decisions", openapi_extra=described_by("Decisions"))
    async def decisions(request: Request, body: dict[str, Any]) -> Any:
        return await decide(request, OPENAI, body)

    @closed.post("/v1/systemone", openapi_extra=described_by("SystemOne"))
    async def system_one(request: Request, body: dict[str, Any]) -> Any:
        return await decide(request, SYSTEM_ONE, body)

    @closed.post("/v1/chat/completions")
    async def chat(request: Request, body: Chat) -> Any:
        return await answer(request, body)

    @closed.post("/v1/completions")
    async def complete(request: Request, body: Completion) -> Any:
        return await answer(request, body)

    @closed.get("/v1/models")
    async def models() -> Any:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "llmppl"}
        of_system_one = {"name": name, "description": "", "release_date": "1970-01-01"}
        return {"object": "list", "data": [model], "models": [of_system_one]}

    @app.get("/health")
    async def health() -> Any:
        return vars(service.stats)

    @closed.get("/openapi.json")
    async def openapi() -> Any:
        document = app.openapi()
        document["components"]["schemas"] |= SCHEMAS
        return document

    app.include_router(closed)
    return app
