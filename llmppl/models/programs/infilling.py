"""Infilling: the model fills the holes of a text."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal, Unpack

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text
from llmppl.distributions import Distribution, Geometric
from llmppl.distributions.rules import NO_RULE
from llmppl.lm import CachedTransformer
from llmppl.models.programs.program import Options, Program, language_model, with_program_options
from llmppl.support import arguments

BLANK = "[BLANK]"


_LABELS = {                                             # of statements, in `attribution`
    "sample": "no end in a hole", "score": "the lengths of the holes, which the target leaves open",
    "observe": "the fragments after the holes",
}  # fmt: skip


class Infilling(Program):
    """Text with holes: the fragments are given, and the model fills the holes between them.

    The first fragment is the prompt. A step fills one hole: it draws a length and tokens, and observes the next
    fragment.

    The target is the joint distribution of the tokens in all holes, each hole followed by the tokens that its fragment
    adds to the context. A string therefore counts once for every way in which it can be cut into hole tokens and
    fragments. With fragments "a" and "a", the text "aaa" has the hole "a". The text "aaaa" has the hole "aa", written
    as one token or two.

    Parameters
    ----------
    lm : CachedTransformer
    fragments : list of str, or a str with [BLANK] for each hole
    lengths : Distribution over 0, 1, 2, ...
        Distribution from which the lengths of holes, in tokens, are drawn.
    prior : bool
        If True, `lengths` is part of the target. If False, it is only the proposal: every length has the same prior
        weight (-log P(length) is added; Lew et al. 2023, Sec. 2.2).
    end : "prefix" or "eos"
        What may follow the last fragment: anything, or only EOS. EOS inside a hole always has weight zero.
    **options
        The options of `Program`; `min_tokens` and `max_tokens` bound the tokens in all holes together.
    """

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer,
        fragments: str | Sequence[str],
        *,
        lengths: Distribution | None = None,
        prior: bool = False,
        end: Literal["prefix", "eos"] = "prefix",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        if self.stop:
            raise ValueError(f"{type(self).__name__} takes no stop: a hole ends where its fragment begins")
        if isinstance(fragments, CachedTransformer) or not isinstance(fragments, Iterable):
            raise TypeError(
                f"{type(self).__name__} wants the language model, then the fragments, a str with {BLANK} for each hole "
                f"or a list of str, not {arguments.shown(fragments)}"
            )
        fragments = fragments.split(BLANK) if isinstance(fragments, str) else list(fragments)
        for fragment in fragments:
            arguments.text("each of the fragments", fragment)
        if len(fragments) < 2:
            raise ValueError(f"a text with holes has two fragments or more; put {BLANK} where a hole is: {fragments!r}")
        self.context = language_model(lm).context(fragments[0])
        _warn_of_blanks(fragments)
        self.s = Text(fragments[0])
        self.fragments = tuple(fragments[1:])
        self.lengths = Geometric(0.5) if lengths is None else lengths
        if not isinstance(self.lengths, Distribution):
            raise TypeError(f"lengths must be a Distribution over 0, 1, 2, ..., not {lengths!r}")
        self.prior = prior
        self.end: Literal["prefix", "eos"] = arguments.one_of("end", end, ("prefix", "eos"))

    def step(self) -> None:
        length = self.sample(self.lengths)
        if not isinstance(length, (int, np.integer)) or length < 0:
            raise ValueError(f"lengths must be a Distribution over 0, 1, 2, ..., but {self.lengths!r} drew {length!r}")
        if not self.prior:
            self.score(-self.lengths.log_prob(length))
        self.num_tokens += length
        self.condition(self.max_tokens is None or self.num_tokens <= self.max_tokens)
        for _ in range(length):
            dist = self.next_token(self.context)
            token = self.sample(dist, proposal=dist.masked(dist.support.not_eos))
            self.s += token
            self.context += token
        fragment, *self.fragments = self.fragments      # type: ignore[assignment]
        self.observe_fragment(fragment)
        if not self.fragments:
            self.condition(not self.before_min_tokens())
            if self.end == "eos":
                self.observe(self.next_token(self.context), EOS)
            self.finish()

    def death_reason(self, verb: str) -> str | None:
        if verb == "observe":
            return "the fragment after a hole has probability 0"
        if verb != "condition":
            return None
        if self.before_min_tokens():
            return f"the holes have fewer tokens than min_tokens={self.min_tokens}"
        return f"the holes have more tokens than max_tokens={self.max_tokens}"

    def statement_label(self, verb: str) -> str:
        return _LABELS[verb]

    def observe_fragment(self, fragment: str) -> None:
        """Observe `fragment`. Without a rule, one forward pass computes all its tokens."""
        if not fragment:
            return
        end = self.context + fragment
        tokens = end.tokens[len(self.context) :]
        if self.rule == NO_RULE:
            self.observe(self.context.next_token().string(), tokens)
        else:
            contexts = itertools.accumulate(tokens[:-1], operator.add, initial=self.context)
            for dist, token in zip(list(map(self.next_token, contexts)), tokens, strict=True):
                self.observe(dist, token)
        self.s += fragment
        self.context = end


def _warn_of_blanks(fragments: Sequence[str]) -> None:
    """Warn of a blank before a hole. Tokens bring the blank of a word, so the hole would begin inside a word."""
    before = next((fragment for fragment in fragments[:-1] if fragment.endswith(" ")), None)
    if before is not None:
        warnings.warn(
            f"{before[-40:]!r} ends with a blank before a hole, and what fills a hole brings its own, as in ' dog': "
            f"leave the blank out, {before[-40:].rstrip() + BLANK!r}",
            stacklevel=3,
        )
