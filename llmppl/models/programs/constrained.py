"""ConstrainedText: text of the model under a constraint, and a mask for it that limits the length of words."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.constraint import Index
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import Vocabulary
from llmppl.distributions import Finite
from llmppl.lm import ENDS, CachedTransformer, Context, End, TokenDistribution
from llmppl.models.programs.program import Options, Program, as_context, with_program_options
from llmppl.models.spans import (
    NEAR,
    explain_no_token,
    explain_refusal,
    must_end_by,
    name_of_bound,
    name_of_constraint,
)
from llmppl.support import arguments
from llmppl.support.runtime import mask_timer

Mask = NDArray[np.bool_]


class ConstrainedText(Program):
    """The model's continuation of a prompt, given that it satisfies a constraint.

    Tokens are proposed from the allowed ones, with the exact importance weight. The target is the model's own
    distribution over texts, restricted to the language of the constraint. Every text that is not cut is complete.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str or Context
        The constraint does not apply to the prompt.
    constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, interegular.FSM, or callable
        A callable `constraint(text) -> bool` must hold of the text so far after every token. It is checked after the
        draw, so also give `mask` if many tokens fail.
    end : "boundary", "prefix" or "eos"
        The event that ends a text of the language, and whose probability is part of the target:

        - "boundary": EOS, or a token after which the text is neither in the language nor a prefix of it. This also
          applies at `max_tokens`.
        - "prefix": any continuation, with probability 1. If one text of the language begins with another, both count.
        - "eos": EOS.

        Without a constraint, or with a function, only EOS leaves the language, and "boundary" means "eos".
    complete : bool, optional
        If True, the text must end after at most `max_tokens` tokens (EOS not counted), and within the length that the
        model can read; else it may be cut there. The default is True for a bounded text with a constraint that is not
        a function. A token after which the text cannot end in the tokens left is then not proposed, as far as the
        constraint knows. A function does not know, nor does a JsonSchema without an `automaton`: texts that have not
        ended in time die.
    mask : callable, optional
        `mask(text) -> (V,) bool` returns the tokens that may follow the text so far; EOS is True if the text may end.
        Tokens are then proposed from the allowed ones, with the exact importance weight, so that no draw is rejected.
    **options
        The options of `Program`.
    """

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer,
        prompt: str | Context,
        constraint: Any = None,
        *,
        mask: Callable[[str], Mask] | None = None,
        end: End = "boundary",
        complete: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.end: End = arguments.one_of("end", end, ENDS)
        if mask is not None:
            arguments.function("mask", mask, "short_words(vocab, 5)")
        self.context = as_context(lm, prompt)
        self.index = index_of(constraint, lm.vocab)
        self.constraint = constraint if self.index is None else None
        if self.index is not None:
            if self.stop:
                reason = f"{name_of_constraint(self.index)} says where its texts end"
                raise ValueError(f"stop= is for a text without a constraint, or with a function: {reason}")
            _warn_of_seam(self.context, self.index)
        self.mask = mask
        self.state = None if self.index is None else self.index.start
        room = self.context.room
        self.must_end_by = must_end_by("text", complete, self.max_tokens, self.index, room)
        self.bound = name_of_bound(self.max_tokens, room)
        self.lookahead_tokens = NEAR if self.max_tokens is None else math.inf
        if self.must_end_by < self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}, and the text must end within {self.bound}")
        if self.must_end_by < math.inf:
            self.max_tokens = None
        demands = {
            name_of_constraint(self.index): self.index is not None,
            "the mask": self.mask is not None,
            f"min_tokens={self.min_tokens}": self.min_tokens,
            f"an end within {self.bound}": self.must_end_by < math.inf and self.lookahead_tokens == math.inf,
        }
        self.proposal_label = " and ".join(itertools.compress(demands, demands.values()))

    def step(self) -> None:
        dist = self.next_token(self.context)
        target = self.target(dist)
        proposal = target
        for mask in self.masks(dist.support):
            proposal = proposal.masked(mask)
        token = self.sample(target, proposal=None if proposal is target else proposal)
        if target is not dist and self.end == "prefix":     # the weights of the target do not sum to 1
            self.score(target.log_total() - dist.log_total())
        if self.append(token):
            self.context += token
            if self.index is not None:
                with mask_timer():
                    self.state = self.index.advance(self.state, token)
            if self.constraint is not None:
                self.condition(arguments.truth("constraint", self.constraint, self.s))
            if self.is_over():
                self._cut_ = False
                self.finish()
        if self.finished and not self.cut:
            self.condition(not explain_refusal(self.index, self.s))

    @property
    def parsed(self) -> Any:
        """Value of the text by `parse` of the constraint, or the text itself. ValueError if it has not ended."""
        if self.cut or not self.finished:
            how = f"was cut after {self.num_tokens} tokens; complete=True wants an end" if self.cut else "has not ended"
            raise ValueError(f"{str(self.s)[-40:]!r} is not parsed: the text {how}")
        return str(self.s) if self.index is None else self.index.parse(self.s)

    def target(self, dist: TokenDistribution) -> Finite:
        """Return the target of the next token: `dist`, and if the text may end, EOS with the probability of its end."""
        if self.end == "eos" or (self.index is None and self.end == "boundary"):
            return dist
        if self.index is None:
            return dist.with_end(dist.support.not_eos, self.end)
        return dist.with_end(self.index.mask(self.state), self.end) if self.index.accepts(self.state) else dist

    def is_over(self) -> bool:
        """Return True if the text must end here, whatever the model says. The end then has probability 1."""
        if self.end == "eos" or self.index is None or self.mask is not None or self.before_min_tokens():
            return False
        with mask_timer():
            if not self.index.accepts(self.state):
                return False
            at_limit = self.end == "prefix" and self.num_tokens == self.must_end_by
            return at_limit or len(self.index.allowed(self.state)) == len(self.index.vocab.eos_ids)

    def death_reason(self, verb: str) -> str | None:
        index, state = self.index, self.state
        if verb == "condition":
            false = f"{name_of_constraint(self.constraint)} is false of the text"
            return false if index is None else explain_refusal(index, self.s)
        if self.before_min_tokens() and index is not None and set(index.allowed(state)) <= set(index.vocab.eos_ids):
            return f"{name_of_constraint(index)} can only end before min_tokens={self.min_tokens}"
        left, masked = self.must_end_by - self.num_tokens, self.mask is not None
        return explain_no_token(index, state, left, self.bound, self.rule, masked=masked)

    def statement_label(self, verb: str) -> str:
        return self.proposal_label

    def masks(self, vocab: Vocabulary) -> Iterator[Mask]:
        """Yield masks that the next token must satisfy."""
        left = self.must_end_by - self.num_tokens
        if self.index is not None:
            with mask_timer():
                is_far = left == math.inf or left > self.lookahead_tokens
                yield self.index.mask(self.state) if is_far else self.index.mask_within(self.state, left)
        if self.mask is not None:
            with mask_timer():
                allowed = self.mask(self.s)
            yield allowed
        if self.before_min_tokens():
            yield vocab.not_eos
        if left == 0:
            yield vocab.only_eos


def _warn_of_seam(prompt: Context, index: Index) -> None:
    """Warn if the text would continue the last word of the prompt, or must repeat the end of the prompt."""
    text, name = str(prompt.text), name_of_constraint(index)
    if len(text) < 3 or not prompt.lm.vocab.tokens[prompt.tokens[-1]]:
        return                                          # a word begins after a special token, as in a chat
    if not isinstance(index, TokenIndex):
        return
    data, state = text.encode(), index.start
    first = index.next_bytes(state)
    for end, byte in enumerate(data, 1):
        if index.next_bytes(state) != bytes([byte]):
            break
        state = index.after(data[:end])
    else:
        warnings.warn(
            f"every text of {name} begins with {text[-40:]!r}, as the prompt does, which is no part of the text: leave "
            "it out of the constraint",
            stacklevel=3,
        )
        return
    word = re.split(r"[\W\d_]", text)[-1]
    if len(word) > 1 and not index.accepts(index.start) and re.fullmatch(rb"[0-9A-Za-z]+", first):
        example = word[-20:] + chr(first[0])
        warnings.warn(
            f"the texts of {name} go on inside the last word of the prompt, as in {example!r}: begin them with a "
            "blank, unless that is meant",
            stacklevel=3,
        )


def short_words(vocab: Vocabulary, max_letters: int) -> Callable[[str], Mask]:
    """Return a mask for `ConstrainedText` that allows no word of more than `max_letters` letters (Lew et al. 2023).

    A word is a run of letters. If the prompt may end inside a word, use `lambda text: mask(prompt + text)`. Tokens that
    contain part of a character are excluded, and so are special tokens other than EOS. The masks for all lengths that
    the last word can have are computed here, once.

    Returns
    -------
    function of a str that returns a (V,) bool ndarray, read-only
    """
    max_letters = arguments.count("max_letters", max_letters)
    head = np.zeros(len(vocab), dtype=np.int64)         # letters that extend the last word
    longest = np.zeros(len(vocab), dtype=np.int64)      # letters of the longest further word
    is_text = vocab.lengths > 0
    for i, data in enumerate(vocab.tokens):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            is_text[i] = False
            continue
        head[i] = _num_letters(text)
        runs = itertools.groupby(text[head[i] :], str.isalpha)
        longest[i] = max((is_word * len([*run]) for is_word, run in runs), default=0)
    fits = is_text & (longest <= max_letters)
    fits[list(vocab.eos_ids)] = True
    table = fits & (head <= np.arange(min(max_letters, int(head.max())) + 1)[:, None])      # (letters left, V)
    table.setflags(write=False)
    masks: list[Mask] = list(table)

    def mask_after(text: str) -> Mask:
        return masks[min(max_letters - _num_letters(text[: -max_letters - 1 : -1]), len(masks) - 1)]

    return mask_after


def _num_letters(text: str) -> int:
    """Return the number of letters with which `text` begins."""
    return len([*itertools.takewhile(str.isalpha, text)])
