"""Task of `subjects.py` in the other libraries: llamppl's SMC and steering, and genlm-control's SMC.

genlm-control draws tokens directly or by adaptive weighted rejection sampling (AWRS). `pip install 'llmppl-smc[bench]'`
installs both libraries; a missing one is named and skipped. All methods have the target of ours: the last step cuts the
text. For genlm-control this is `terminate_when`, since its `max_tokens` would weigh the end of text in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from subjects import Task
from tables import release

try:
    import llamppl
except ImportError:
    llamppl = None
try:
    import genlm.control as genlm_control
except ImportError:
    genlm_control = None
if llamppl is not None or genlm_control is not None:
    from genlm.backend.llm import AsyncTransformer  # both libraries depend on it

Prepared = Callable[[], None]


def others(K: int) -> dict[str, Callable[[Task], Prepared]]:
    """Return the installed libraries' methods by name; `prepare(task)` returns the function to time."""
    found: dict[str, Callable[[Task], Prepared]] = {}
    if llamppl is not None:
        found["llamppl, standard"] = lambda task: with_llamppl(task, None)
        found[f"llamppl, steer K={K}"] = lambda task: with_llamppl(task, K)
    if genlm_control is not None:
        found["genlm-control"] = lambda task: with_genlm_control(task, awrs=False)
        found["genlm-control, AWRS"] = lambda task: with_genlm_control(task, awrs=True)
    return found


def installed() -> str:
    """Return the other libraries that run, and the way to install missing ones."""
    modules = {"llamppl": llamppl, "genlm-control": genlm_control}
    absent = " is not installed (pip install 'llmppl-smc[bench]')"
    return "; ".join(name + absent if module is None else release(name) for name, module in modules.items())


def with_llamppl(task: Task, K: int | None) -> Prepared:
    backend = AsyncTransformer(task.subject.model, task.subject.tokenizer(), batch_size=task.N * (K or 1))
    lm = llamppl.CachedCausalLM(backend)
    prompt = lm.tokenizer.decode(task.ids)
    if lm.tokenizer.encode(prompt) != task.ids:
        raise ValueError("the prompt must be the tokenizer's encoding of its text")
    allowed = set(np.flatnonzero(task.mask).tolist())

    class Program(llamppl.Model):
        def __init__(self) -> None:
            super().__init__()
            self.context = llamppl.LMContext(lm, prompt)

        def immutable_properties(self) -> set[str]:
            return {"allowed"}

        async def step(self) -> None:
            await self.observe(self.context.mask_dist(allowed), True)
            await self.sample(self.context.next_token())
            if self.context.token_count == task.steps:
                self.finish()

    def call() -> None:
        lm.cache_kv(task.ids)
        program = Program()
        asyncio.run(llamppl.smc_standard(program, task.N) if K is None else llamppl.smc_steer(program, task.N, K))

    return call


def with_genlm_control(task: Task, awrs: bool) -> Prepared:
    backend = AsyncTransformer(task.subject.model, task.subject.tokenizer(), batch_size=task.N)
    llm = genlm_control.PromptedLLM(backend, prompt_ids=task.ids)
    weights = np.where([*(task.mask[token.token_id] for token in llm.vocab), False], 0.0, -np.inf)

    class Allowed(genlm_control.Potential):
        """Potential that is 0 while every token is allowed; the text does not end by itself."""

        async def complete(self, context: list[Any]) -> float:
            return -np.inf

        async def prefix(self, context: list[Any]) -> float:
            return 0.0 if not context or task.mask[context[-1].token_id] else -np.inf

        async def logw_next(self, context: list[Any]) -> Any:
            return self.make_lazy_weights(weights)

    allowed = Allowed(llm.vocab)
    sampler = genlm_control.AWRS(llm, allowed) if awrs else genlm_control.direct_token_sampler(llm * allowed)

    def call() -> None:
        backend.cache_kv(task.ids)
        smc = genlm_control.SMC(sampler)
        asyncio.run(smc(task.N, 0.5, task.steps + 1, terminate_when=lambda text: len(text) == task.steps))

    return call
