"""PromptIntersection: text that is likely after each of several prompts."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Literal, Unpack

from llmppl.distributions import Finite, product
from llmppl.lm import CachedTransformer, Context
from llmppl.models.programs.program import Options, Program, as_context, with_program_options
from llmppl.models.spans import Until
from llmppl.support import arguments


class PromptIntersection(Program):
    """Text that is likely after every one of several prompts: the product of the distributions after each.

    Parameters
    ----------
    lm : CachedTransformer, or one for each prompt
        Several models must share a tokenizer.
    prompts : sequence of str (or Context)
    proposal : "product" or "first"
        Both have the same target. "first" draws a token after the first prompt and observes it after the others.
        "product" draws from the normalised product of the distributions, the locally optimal proposal.
    until : str or callable, optional
        Stop, with no weight, when the text ends with this string, or when `until(text)` is true (`ends_sentence`).
    **options
        The options of `Program`.
    """

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer | Sequence[CachedTransformer],
        prompts: Sequence[str | Context],
        *,
        proposal: Literal["product", "first"] = "product",
        until: str | Until | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        if isinstance(prompts, CachedTransformer):
            raise TypeError("lm and prompts are swapped: the language model comes first, then the list of prompts")
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one prompt, not {prompts!r}")
        arguments.one_of("proposal", proposal, ["product", "first"])
        lms = list(lm) if isinstance(lm, Sequence) else [lm] * len(prompts)
        if len(lms) != len(prompts):
            raise ValueError(f"{len(lms)} models for {len(prompts)} prompts: give one model, or one for each prompt")
        other = next((each for each in lms if each.vocab != lms[0].vocab), None)
        if other is not None:
            raise ValueError(f"the models must share a tokenizer: {lms[0].vocab} and {other.vocab} differ")
        self.contexts = list(map(as_context, lms, prompts))
        self.proposal = proposal
        self.until = functools.partial(_ends_with, until) if isinstance(until, str) else until
        if self.until is not None:
            arguments.function("until", self.until, "ends_sentence")

    def step(self) -> None:
        first, *others = map(self.next_token, self.contexts)
        proposal: Finite = first if self.proposal == "first" else product(first, *others)
        if self.before_min_tokens():
            proposal = proposal.masked(first.support.not_eos)
        token = self.sample(first, proposal=None if proposal is first else proposal)
        for other in others:
            self.observe(other, token)
        if self.append(token):
            self.contexts = [context + token for context in self.contexts]
            if self.until is not None and arguments.truth("until", self.until, self.s):
                self.finish()

    def death_reason(self, verb: str) -> str | None:
        if verb == "observe":
            return "the token that was drawn after the first prompt has probability 0 after another"
        return "no token has positive probability after all prompts"

    def statement_label(self, verb: str) -> str:
        return "the first prompt, over the proposal" if verb == "sample" else "the other prompts"


def ends_sentence(text: str) -> bool:
    """Return True if the text ends with a full stop, exclamation mark or question mark, and any quotes after it."""
    return re.search(r"[.!?][\"'”’)]*\s*$", text) is not None


def _ends_with(end: str, text: str) -> bool:
    return text.endswith(end)
