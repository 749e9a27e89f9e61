"""HTTP server with the endpoints of OpenAI for chat and completions, over a `Service`.

Each choice has its `weight`, the posterior probability, and `ended`, the reason why it ended.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from llmppl.inference.exact import Beams
from llmppl.inference.particles import Particles
from llmppl.serving.bodies import Chat, Completion, Limits
from llmppl.serving.service import Call, Service, ServiceFull
from llmppl.tasks.generation import Generation

POLL = 0.25                                             # seconds between two looks whether a client is still there


# ---- answers


@dataclass
class Answer:
    """Text of a choice, with its normalised weight, and the reason why it ended."""

    text: str
    weight: float | None
    ended: str

    @property
    def finish_reason(self) -> str:
        return "length" if self.ended in ("max_tokens", "context", "timeout", "budget") else "stop"


def answers(generation: Generation, n: int) -> list[Answer]:
    """Return the answer; if n > 1, the n heaviest particles, beams or texts."""
    found = generation.posterior
    if n == 1:
        return [Answer(generation.text, generation.probability, generation.ended)]
    if isinstance(found, Particles):
        weights = found.weights.tolist()
        order = sorted(range(len(found)), key=lambda i: -weights[i])[:n]
        return [Answer(str(found[i]), weights[i], str(found[i].ended or found.limit or "context")) for i in order]
    if isinstance(found, Beams):
        return [Answer(str(beam), None, str(beam.particle.ended)) for beam in found[:n]]
    return [Answer(found.text_of(value), p, "complete") for value, p in [*found.items()][:n]]


def options_of(generation: Generation, most: int) -> list[dict[str, Any]]:
    """Return the log-probabilities of the texts of a choice, the likeliest first."""
    posterior = generation.posterior
    return [
        {"token": posterior.text_of(value), "bytes": [*posterior.text_of(value).encode()],
         "logprob": math.log(p) if p else -9999.0}
        for value, p in [*posterior.items()][:max(most, 1)]
    ]  # fmt: skip


# ---- endpoints


class _Job:
    """A request that has been checked: the call of each prompt, and the form of the response."""

    def __init__(self, service: Service, name: str, limits: Limits, body: Chat | Completion) -> None:
        self.body, self.name, self.lm = body, name, service.lm
        self.id, self.created = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time())
        if body.model not in (None, name):
            raise HTTPException(404, f"this server runs the model {name!r}, not {body.model!r}")
        if isinstance(body, Chat):
            body.max_tokens = body.max_tokens or body.max_completion_tokens
            prompts: list[Any] = [self.lm.chat(body.conversation())]
            constraint = body.target()
        else:
            listed = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            prompts = [self.lm.context(each) for each in listed]
            constraint = body.constraint and body.constraint.build()
        if not 1 <= len(prompts) <= limits.prompts:
            raise ValueError(f"{len(prompts)} prompts: this server takes 1 to {limits.prompts}")
        if body.stream and (body.n, len(prompts)) != (1, 1):
            raise ValueError("a stream has one prompt and n=1")
        options, timeout = body.options(limits, constraint), body.timeout or limits.seconds
        self.logprobs = body.logprobs not in (None, False)
        if self.logprobs and options["method"] != "exact":
            raise ValueError("logprobs are those of the texts of constraint.choice, with the method exact")
        self.prompt_tokens = sum(map(len, prompts))
        self.calls: list[Call[Generation]] = []
        try:
            for prompt in prompts:
                self.calls.append(service.generate(prompt, constraint, timeout=timeout, **options))
        except BaseException:
            self.cancel()
            raise

    @property
    def chat(self) -> bool:
        return isinstance(self.body, Chat)

    def cancel(self) -> None:
        for call in self.calls:
            call.cancel()

    def _choice(self, index: int, answer: Answer, generation: Generation) -> dict[str, Any]:
        """Return a choice of the response."""
        body = self.body
        logprobs: dict[str, Any] | None = None
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        choice |= {"weight": answer.weight, "ended": answer.ended}
        if self.logprobs:
            most = (body.top_logprobs if isinstance(body, Chat) else body.logprobs) or 0
            top = options_of(generation, most)
            chosen = next(each for each in options_of(generation, 10**9) if each["token"] == answer.text)
            logprobs = {"content": [{**chosen, "top_logprobs": top}], "refusal": None}
            if not self.chat:
                names = {each["token"]: each["logprob"] for each in top}
                logprobs = {"tokens": [answer.text], "token_logprobs": [chosen["logprob"]], "top_logprobs": [names],
                            "text_offset": [0]}  # fmt: skip
        choice["logprobs"] = logprobs
        if not isinstance(body, Chat):
            return {**choice, "text": answer.text}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if body.functions() and answer.finish_reason == "stop" and answer.text[:1] == "{":
            called = json.loads(answer.text)
            function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
            message |= {"content": None, "tool_calls": [
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}]}  # fmt: skip
            choice["finish_reason"] = "tool_calls"
        return {**choice, "message": message}

    def _frame(self, **fields: Any) -> dict[str, Any]:
        """Return an object of the response."""
        kind = ("chat.completion" if self.chat else "text_completion") + ".chunk" * (self.chat and self.body.stream)
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name, **fields}

    def response(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the response. Tokens of the completion are those that the model ran, for all particles."""
        found = [(each, generation) for generation in generations for each in answers(generation, self.body.n)]
        tokens = sum(generation.tokens for generation in generations)
        return self._frame(
            choices=[self._choice(index, *each) for index, each in enumerate(found)], usage=self._usage(tokens),
            llmppl=[{"method": each.method, "call": each.call, "seconds": each.seconds} for each in generations],
        )  # fmt: skip

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream: pieces of settled text, or the call of a function, and the end."""
        try:
            async for event in self._events():
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {json.dumps(_error_body(*_explained(error)))}\n\n"
        finally:
            self.cancel()                               # the client may have left

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        [call], body = self.calls, self.body
        functions = isinstance(body, Chat) and body.functions()

        def event(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
            choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None, **more}
            choice |= {"delta": delta} if self.chat else {"text": delta.get("content", "")}
            return self._frame(choices=[choice])

        if self.chat:
            yield event({"role": "assistant", "content": None if functions else ""})
        text = ""
        async for piece in call:
            text += piece
            if not functions or text[0] != "{":         # a call of a function comes at the end, as a whole
                yield event({"content": piece})
        generation = await call
        choice = self._choice(0, answers(generation, 1)[0], generation)
        if made := choice.get("message", {}).get("tool_calls"):
            yield event({"tool_calls": [{"index": 0, **each} for each in made]})
        yield event({}, choice["finish_reason"], weight=choice["weight"], ended=choice["ended"])
        if (body.stream_options or {}).get("include_usage"):
            yield self._frame(choices=[], usage=self._usage(generation.tokens))


def _explained(error: BaseException) -> tuple[int, str]:
    """Return the status and the message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return 400, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
    for kind, status in ((ServiceFull, 429), (TimeoutError, 408), (ValueError, 400), (TypeError, 400)):
        if isinstance(error, kind):
            return status, str(error)
    return 500, f"{type(error).__name__}: {error}"


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def make_app(
    service: Service, *, name: str = "llmppl", key: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """Return the application: /v1/chat/completions, /v1/completions, /v1/models and /health.

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

    app = FastAPI(title="llmppl", docs_url=None, redoc_url=None, dependencies=[Depends(known)],
                  max_body_size=limits.bytes)  # fmt: skip

    async def failed(request: Request, error: Exception) -> JSONResponse:
        status, message = _explained(error)
        return JSONResponse(_error_body(status, message), status)

    for kind in (HTTPException, RequestValidationError, ServiceFull, TimeoutError, ValueError, TypeError, Exception):
        app.add_exception_handler(kind, failed)

    async def answer(request: Request, body: Chat | Completion) -> Any:
        # the constraint is compiled in another thread, so that other requests go on
        job = await asyncio.to_thread(_Job, service, name, limits, body)
        if body.stream:
            return StreamingResponse(job.events(), media_type="text/event-stream")
        try:
            (waiting := asyncio.gather(*job.calls)).add_done_callback(asyncio.Future.exception)     # else it is logged
            while not (await asyncio.wait([waiting], timeout=POLL))[0]:
                if await request.is_disconnected():
                    raise HTTPException(499, "the client has left")
            return JSONResponse(job.response(await waiting))
        finally:
            job.cancel()

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: Chat) -> Any:
        return await answer(request, body)

    @app.post("/v1/completions")
    async def complete(request: Request, body: Completion) -> Any:
        return await answer(request, body)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "llmppl"}]}

    @app.get("/health")
    async def health() -> Any:
        return vars(service.stats)

    return app
