"""Adaptive weighted rejection sampling (AWRS) of genlm-control on an instance of `tasks.py`, as one of its sets.

It has the same target and the same masks: a potential over tokens is 0 if a text can still become an admitted one, and
-inf otherwise.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import peers
from steering import Run, forwards
from task_instances import Task

from llmppl import CachedTransformer

Ids = tuple[int, ...]


class Known:
    """Masks of an instance after the tokens so far; each token must have been allowed."""

    def __init__(self, lm: CachedTransformer, task: Task, index: Any) -> None:
        self.vocab, self.task, self.index = lm.vocab, task, index
        self.states: dict[Ids, Any] = {(): index.start}

    def text(self, ids: Ids) -> str:
        return b"".join(self.vocab.tokens[i] for i in ids).decode(errors="replace")

    def mask(self, ids: Ids) -> Any:
        """Return the tokens that may follow these tokens, (V,) bool."""
        if ids not in self.states:
            self.states[ids] = self.index.advance(self.states[ids[:-1]], self.vocab[ids[-1]])
        return self.index.mask_within(self.states[ids], self.task.max_tokens - len(ids))

    def allowed(self, ids: Ids) -> bool:
        return not ids or bool(self.mask(ids[:-1])[ids[-1]])

    def whole(self, ids: Ids) -> bool:
        return bool(self.mask(ids)[self.vocab.eos_ids[0]]) and self.task.admits(self.text(ids))


def with_genlm_control(lm: CachedTransformer, task: Task, number: int, index: Any, N: int) -> dict[str, Any]:
    """Run AWRS on an instance and return a line of results."""
    control, instance, known = peers.genlm_control, task.instances[number], Known(lm, task, index)
    prompt = [int(i) for i in lm.chat(instance.messages).tokens]
    backend = peers.AsyncTransformer(lm.model, lm.tokenizer, batch_size=N)
    llm = control.PromptedLLM(backend, prompt_ids=prompt)

    class Fits(control.Potential):
        async def prefix(self, context: list[Any]) -> float:
            return 0.0 if known.allowed(tuple(token.token_id for token in context)) else -np.inf

        async def complete(self, context: list[Any]) -> float:
            return 0.0 if known.whole(tuple(token.token_id for token in context)) else -np.inf

        async def logw_eos(self, context: list[Any]) -> float:
            return await self.complete(context)

    sampler = control.AWRS(llm, Fits(llm.vocab), seed=number)
    np.random.seed(number)                              # noqa: NPY002  its resampling draws from this stream
    backend.cache_kv(prompt)
    run = Run()
    with forwards(lm.model, run):
        began = time.process_time()
        found = asyncio.run(control.SMC(sampler)(N, 0.5, task.max_tokens + 1))
        seconds = time.process_time() - began
    texts = [known.text(tuple(token.token_id for token in context[:-1])) for context in found.contexts]
    log_weights = [float(w) for w in found.log_weights]
    cost = {"tokens": run.passed, "seconds": seconds}
    return {"log_ml": float(found.log_ml), **cost, **task.judge(instance, texts, log_weights)}
