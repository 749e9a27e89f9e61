"""ConstrainedText: the model's text, given that it obeys a constraint; and masks of one's own for it."""

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
from llmppl.constraints.json import JsonSchemaIndex
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import Vocabulary
from llmppl.distributions import Finite
from llmppl.lm import ENDS, CachedTransformer, Context, End, TokenDistribution
from llmppl.models.death_messages import name_of_constraint, no_token, refusal
from llmppl.models.programs.program import Options, Program, begin, with_program_options
from llmppl.models.spans import NEAR, must_end_by, name_of_bound
from llmppl.support import arguments
from llmppl.support.runtime import mask_timer

Mask = NDArray[np.bool_]


class ConstrainedText(Program):
    """The model's continuation of a prompt, given that it obeys a constraint.

    Tokens are proposed from those that fit, with the exact importance weight: the target is the model's own
    distribution over texts, restricted to the language of the constraint. It is a promise: a text ends where it is
    complete, and only there.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str or Context
        It is not part of the text that is constrained.
    constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, interegular.FSM, or callable
        A callable `constraint(text) -> bool` must hold of the text so far after every token; it is checked after the
        draw, so give `mask` as well where many tokens fail.
    end : "boundary", "prefix" or "eos"
        What comes after a text of the language of the constraint, with the probability of which it ends there:

        - "boundary": what leaves the language, EOS or a token with which the text would be no text of the language, nor
          begin one. At `max_tokens`, too.
        - "prefix": anything, with probability 1. A text may then begin another one, and both count.
        - "eos": the end of the text.

        Without a constraint, or with a function, nothing but EOS leaves, and "boundary" is "eos".
    complete : bool, optional
        Whether the text must be complete after at most `max_tokens` tokens (EOS not counted), and by the end of what
        the model can read, instead of being cut there; if it is not given, that is what a constraint means, unless it
        is a function. No token is then proposed after which it cannot be finished in the tokens left, as far as the
        constraint can tell: a function cannot, and a JsonSchema without an `automaton`, and what does not end dies.
    mask : callable, optional
        `mask(text) -> (V,) bool` are the tokens that may follow the text so far, EOS among them where it may end.
        Tokens are then proposed from the allowed ones, with the exact importance weight, so that nothing is drawn in
        vain.
    **options
        Those of `Program`.
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
        self.context = begin(lm, prompt)
        self.index = index_of(constraint, lm.vocab)
        self.constraint = constraint if self.index is None else None
        if self.index is not None:
            if self.stop:
                said = f"{name_of_constraint(self.index)} says where its texts end"
                raise ValueError(f"stop= is for a text without a constraint, or with a function: {said}")
            _warn_of_seam(self.context, self.index)
        self.mask = mask
        self.state = None if self.index is None else self.index.start
        room = self.context.room
        self.must_end_by = must_end_by("text", complete, self.max_tokens, self.index, room)
        self.bound = name_of_bound(self.max_tokens, room)
        self.looks_ahead = NEAR if self.max_tokens is None else math.inf
        if self.must_end_by < self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}, and the text must end within {self.bound}")
        if self.must_end_by < math.inf:
            self.max_tokens = None
        self.obeys = " and ".join(self._demands())

    def step(self) -> None:
        dist = self.next_token(self.context)
        target = self.target(dist)
        proposal = target
        for mask in self.masks(dist.support):
            proposal = proposal.masked(mask)
        token = self.sample(target, proposal=None if proposal is target else proposal)
        if target is not dist and self.end == "prefix":     # the weights of the target do not sum to 1
            self.score(target.log_total() - dist.log_total())
        if self.write(token):
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
            self.condition(not refusal(self.index, self.s))

    @property
    def parsed(self) -> Any:
        """The object that the text stands for, by `parse` of the constraint; the text itself if it has none.

        A ValueError if the text has not ended.
        """
        if self.cut or not self.finished:
            how = f"was cut after {self.num_tokens} tokens; complete=True wants an end" if self.cut else "has not ended"
            raise ValueError(f"{str(self.s)[-40:]!r} is not parsed: the text {how}")
        return str(self.s) if self.index is None else self.index.parse(self.s)

    def target(self, dist: TokenDistribution) -> Finite:
        """What the next token is weighed by: `dist`, and where the text may end, EOS as probable as its end."""
        if self.end == "eos" or (self.index is None and self.end == "boundary"):
            return dist
        if self.index is None:
            return dist.with_end(dist.support.not_eos, self.end)
        return dist.with_end(self.index.mask(self.state), self.end) if self.index.accepts(self.state) else dist

    def is_over(self) -> bool:
        """Whether the text has ended: nothing else can come, and that has probability 1, whatever the model says."""
        if self.end == "eos" or self.index is None or self.mask is not None or self.early():
            return False
        with mask_timer():
            if not self.index.accepts(self.state):
                return False
            at_limit = self.end == "prefix" and self.num_tokens == self.must_end_by
            return at_limit or len(self.index.allowed(self.state)) == len(self.index.vocab.eos_ids)

    def cause(self, verb: str) -> str | None:
        if verb == "condition" and self.index is not None:
            return refusal(self.index, self.s)
        if verb == "condition":
            return f"{name_of_constraint(self.constraint)} is false of the text"
        index, left = self.index, self.must_end_by - self.num_tokens
        if self.early() and index is not None and {*index.allowed(self.state).tolist()} <= {*index.vocab.eos_ids}:
            return f"{name_of_constraint(index)} can only end before min_tokens={self.min_tokens}"
        return no_token(index, self.state, left, self.bound, self.rule, self.end, masked=self.mask is not None)

    def statement(self, verb: str) -> str:
        return self.obeys

    def _demands(self) -> Iterator[str]:
        """What tokens are proposed by, in words."""
        if self.index is not None:
            yield name_of_constraint(self.index)
        if self.mask is not None:
            yield "the mask"
        if self.min_tokens:
            yield f"min_tokens={self.min_tokens}"
        if self.must_end_by < math.inf and self.looks_ahead == math.inf:
            yield f"an end within {self.bound}"

    def masks(self, vocab: Vocabulary) -> Iterator[Mask]:
        """What the next token must meet."""
        left = self.must_end_by - self.num_tokens
        if self.index is not None:
            with mask_timer():
                far = left == math.inf or left > self.looks_ahead
                yield self.index.mask(self.state) if far else self.index.mask_within(self.state, left)
        if self.mask is not None:
            with mask_timer():
                allowed = self.mask(self.s)
            yield allowed
        if self.early():
            yield vocab.not_eos
        if left == 0:
            yield vocab.only_eos


def _warn_of_seam(prompt: Context, index: Index) -> None:
    """Say so where the text would go on inside the last word of the prompt, or must say the prompt once more."""
    text, name = str(prompt.text), name_of_constraint(index)
    if len(text) < 3 or not prompt.lm.vocab.tokens[prompt.tokens[-1]]:
        return                                          # behind a special token, as in a chat, all begins anew
    if not isinstance(index, TokenIndex | JsonSchemaIndex):
        return
    word = re.split(r"[\W\d_]", text)[-1]
    state, first, read = index.start, index.next_bytes(index.start), 0
    for read, byte in enumerate(text.encode()):
        if index.next_bytes(state) != bytes([byte]):
            break
        state = index.after(text.encode()[: read + 1])
    else:
        warnings.warn(
            f"every text of {name} begins with {text[-40:]!r}, as the prompt does, which is no part of the text: leave "
            "it out of the constraint",
            stacklevel=3,
        )
        return
    if len(word) > 1 and not index.accepts(index.start) and re.fullmatch(rb"[0-9A-Za-z]+", first):
        example = word[-20:] + chr(first[0])
        warnings.warn(
            f"the texts of {name} go on inside the last word of the prompt, as in {example!r}: begin them with a "
            "blank, unless that is meant",
            stacklevel=3,
        )


def short_words(vocab: Vocabulary, max_letters: int) -> Callable[[str], Mask]:
    """A mask function for `ConstrainedText`: no word of more than `max_letters` letters (Lew et al. 2023, Sec. 2).

    A word is a run of letters; where the prompt may end inside one, use `lambda text: mask(prompt + text)`. Tokens that
    hold part of a character, and special tokens other than EOS, are left out.
    The masks for all lengths that the last word can have are computed here, once.
    """
    max_letters = arguments.count("max_letters", max_letters)
    head = np.zeros(len(vocab), dtype=np.int64)         # letters that lengthen the last word
    longest = np.zeros(len(vocab), dtype=np.int64)      # letters of the longest further word
    known = vocab.lengths > 0
    for i, data in enumerate(vocab.tokens):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            known[i] = False
            continue
        head[i] = _num_letters(text)
        runs = itertools.groupby(text[head[i] :], str.isalpha)
        longest[i] = max((is_word * len([*run]) for is_word, run in runs), default=0)
    fits = known & (longest <= max_letters)
    fits[list(vocab.eos_ids)] = True
    table = fits & (head <= np.arange(min(max_letters, int(head.max())) + 1)[:, None])      # (letters left, V)
    table.setflags(write=False)
    masks: list[Mask] = list(table)

    def mask_after(text: str) -> Mask:
        return masks[min(max_letters - _num_letters(text[: -max_letters - 1 : -1]), len(masks) - 1)]

    return mask_after


def _num_letters(text: str) -> int:
    """How many letters `text` begins with."""
    return len([*itertools.takewhile(str.isalpha, text)])
