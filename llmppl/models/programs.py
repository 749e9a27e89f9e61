"""Ready-made programs: text under a constraint, text with holes, text that follows several prompts at once.

They are ordinary Models, written as a user would write them, and meant to be read. All share what `Program` takes: a
bound on the tokens, and the temperature, top-k and top-p that turn the model's law into the one that counts as the
target. Sources: Lew et al. 2023, Sec. 2.2; Willard & Louf 2023 for the masks of `ConstrainedText`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl import arguments
from llmppl.distributions import Distribution, Finite, Geometric, product
from llmppl.languages import index_of
from llmppl.lm import CachedTransformer, Context, TokenDistribution
from llmppl.models.model import Model
from llmppl.runtime import mask_timer
from llmppl.tokens import EOS, Text, Token, Vocabulary

Mask = NDArray[np.bool_]
BLANK = "[BLANK]"


class Program(Model):
    """What the programs below share.

    Parameters
    ----------
    min_tokens, max_tokens : int
        The text has no EOS before `min_tokens` tokens (each time with the probability of that as a weight), and is cut
        off after `max_tokens`, with no weight, and marked `cut`.
    temperature, top_k, top_p
        The target's law of a token: the model's, tempered, then cut to the k likeliest, then to probability p.
    """

    def __init__(
        self,
        *,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise arguments.unknown_option(type(self).__name__, unknown, _options(type(self)))
        self.min_tokens = arguments.count("min_tokens", min_tokens, least=0)
        self.max_tokens = arguments.optional_count("max_tokens", max_tokens)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={max_tokens}, not {min_tokens}")
        self.temperature = arguments.temperature(temperature)
        self.top_k = arguments.optional_count("top_k", top_k)
        self.top_p = None if top_p is None else arguments.probability("top_p", top_p, above_0=True)
        self.num_tokens = 0

    def shape(self, law: Any) -> Any:
        """`law` tempered and cut as the target's are."""
        if self.temperature != 1.0:
            law = law.tempered(self.temperature)
        if self.top_k is not None:
            law = law.top_k(self.top_k)
        return law if self.top_p is None else law.top_p(self.top_p)

    def law(self, context: Context) -> TokenDistribution:
        """The target's law of the token after `context`."""
        law: TokenDistribution = self.shape(self.transformer(context))
        return law

    def early(self) -> bool:
        """Whether the text may not end yet."""
        return self.num_tokens < self.min_tokens

    def write(self, token: Token) -> bool:
        """Append `token` to the text; whether the text goes on after it."""
        if token == EOS:
            self.finish()
            return False
        self.s += token
        self.num_tokens += 1
        if self.num_tokens == self.max_tokens:
            self.cut = True
            self.finish()
        return True


def _options(program: type[Program]) -> set[str]:
    """The keywords that a program takes, those of the classes it is derived from included."""
    makers = [vars(cls)["__init__"] for cls in program.__mro__ if issubclass(cls, Program) and "__init__" in vars(cls)]
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    return {each.name for each in parameters if each.kind == each.KEYWORD_ONLY}


def _begin(lm: CachedTransformer, prompt: str | Context) -> Context:
    """The context that a prompt stands for."""
    return prompt if isinstance(prompt, Context) else lm.context(arguments.text("prompt", prompt))


class ConstrainedText(Program):
    """The model's continuation of a prompt, given that it obeys a constraint.

    Tokens are proposed from those that fit, with the exact importance weight: the target is the model's own law of
    texts, restricted to the language of the constraint. EOS fits where the text is complete, and only there.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str or Context
        It is not part of the text that is constrained.
    constraint : Regex, Grammar, JsonSchema, an index, any recognizer, an interegular.FSM, or callable
        A callable `constraint(text) -> bool` must hold of the text so far after every token; it is checked after the
        draw, so give `mask` as well where many tokens fail.
    at_max : "cut" or "end"
        What `max_tokens` means: cut the text there, or condition on its ending (by EOS, which is not counted) until
        then. In the second case no token is proposed after which the text cannot be finished in the tokens left, as
        far as the constraint can tell: that of a JsonSchema or a function cannot, and texts that do not end die.
    mask : callable, optional
        `mask(text) -> (V,) bool` are the tokens that may follow the text so far, EOS among them where it may end.
        Tokens are then proposed from the allowed ones, with the exact importance weight, so that nothing is drawn in
        vain.
    **options
        Those of `Program`.
    """

    def __init__(
        self,
        lm: CachedTransformer,
        prompt: str | Context,
        constraint: Any = None,
        *,
        mask: Callable[[str], Mask] | None = None,
        at_max: str = "cut",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if mask is not None:
            arguments.function("mask", mask, "short_words(vocab, 5)")
        if at_max not in ("cut", "end") or (at_max == "end" and self.max_tokens is None):
            raise ValueError(f'at_max must be "cut", or "end" with max_tokens given, not {at_max!r}')
        self.context = _begin(lm, prompt)
        self.index = index_of(constraint, lm.vocab)
        self.constraint = constraint if self.index is None else None
        self.mask = mask
        self.state = None if self.index is None else self.index.start
        self.must_end_by = None
        if at_max == "end":
            most = self.must_end_by = self.max_tokens
            self.max_tokens = None
            if self.index is not None and (n := self.index.tokens_to_accept(self.state)) > (most or 0):
                shortest = "" if n == np.inf else f", the shortest takes {n} tokens"
                raise ValueError(f"{self.index!r}: no text ends within max_tokens={most}{shortest}")

    def step(self) -> None:
        law = self.law(self.context)
        proposal: Finite = law
        for mask in self.masks(law.support):
            proposal = proposal.masked(mask)
        token = self.sample(law, proposal=None if proposal is law else proposal)
        if self.write(token):
            self.context += token
            if self.index is not None:
                with mask_timer():
                    self.state = self.index.advance(self.state, token)
            if self.constraint is not None:
                self.condition(arguments.truth("constraint", self.constraint, self.s))

    def masks(self, vocab: Vocabulary) -> Iterator[Mask]:
        """What the next token must meet."""
        left = None if self.must_end_by is None else self.must_end_by - self.num_tokens
        if self.index is not None:
            with mask_timer():
                yield self.index.mask(self.state) if left is None else self.index.mask_within(self.state, left)
        if self.mask is not None:
            with mask_timer():
                allowed = self.mask(self.s)
            yield allowed
        if self.early():
            yield vocab.not_eos
        if left == 0:
            yield vocab.only_eos


class Infilling(Program):
    """Text with holes: given fragments, and between them what the model would write.

    The first fragment is the prompt. A step fills one hole: it draws a length and tokens, and observes the next
    fragment.

    The target is the joint law of the tokens in all holes, each hole followed by the tokens that `context + fragment`
    appends. A string therefore counts once for every way in which it can be cut into hole tokens and fragments: with
    fragments "a" and "a", the text "aaa" has a hole "a", and so has "aaaa" with "aa", written as one token or as two.

    Parameters
    ----------
    lm : CachedTransformer
    fragments : list of str, or a str with [BLANK] for each hole
    lengths : Distribution over 0, 1, 2, ...
        Where hole lengths are drawn from.
    prior : bool
        Whether `lengths` is part of the target. If not, it is only the proposal: every length has the same weight
        before the model is asked (-log P(length) is added; Lew et al. 2023, Sec. 2.2).
    eos : bool
        Whether the text must end after the last fragment. EOS inside a hole has weight zero in any case.
    **options
        Those of `Program`; `min_tokens` and `max_tokens` bound the tokens in all holes together.
    """

    def __init__(
        self,
        lm: CachedTransformer,
        fragments: str | Sequence[str],
        *,
        lengths: Distribution | None = None,
        prior: bool = False,
        eos: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        fragments = fragments.split(BLANK) if isinstance(fragments, str) else list(fragments)
        for fragment in fragments:
            arguments.text("each of the fragments", fragment)
        if len(fragments) < 2:
            raise ValueError(f"a text with holes has two fragments or more; put {BLANK} where a hole is: {fragments!r}")
        self.context = lm.context(fragments[0])
        self.s = Text(fragments[0])
        self.fragments = tuple(fragments[1:])
        self.lengths = Geometric(0.5) if lengths is None else lengths
        if not isinstance(self.lengths, Distribution):
            raise TypeError(f"lengths must be a Distribution over 0, 1, 2, ..., not {lengths!r}")
        self.prior, self.eos = arguments.flag("prior", prior), arguments.flag("eos", eos)

    def step(self) -> None:
        length = self.sample(self.lengths)
        if not isinstance(length, (int, np.integer)) or length < 0:
            raise ValueError(f"lengths must be a Distribution over 0, 1, 2, ..., but {self.lengths!r} drew {length!r}")
        if not self.prior:
            self.score(-self.lengths.log_prob(length))
        self.num_tokens += length
        self.condition(self.max_tokens is None or self.num_tokens <= self.max_tokens)
        for _ in range(length):
            law = self.law(self.context)
            token = self.sample(law, proposal=law.masked(law.support.not_eos))
            self.s += token
            self.context += token
        fragment, *self.fragments = self.fragments      # type: ignore[assignment]
        self.read(fragment)
        if not self.fragments:
            self.condition(not self.early())
            if self.eos:
                self.observe(self.law(self.context), EOS)
            self.finish()

    def read(self, fragment: str) -> None:
        """Observe `fragment`, all its tokens in one forward pass."""
        if not fragment:
            return
        end = self.context + fragment
        tokens = end.tokens[len(self.context) :]
        if (self.temperature, self.top_k, self.top_p) == (1.0, None, None):
            self.observe(self.context.next_token().string(), tokens)
        else:
            contexts = [self.context]
            for token in tokens[:-1]:
                contexts.append(contexts[-1] + token)
            for law, token in zip([self.law(context) for context in contexts], tokens, strict=True):
                self.observe(law, token)
        self.s += fragment
        self.context = end


class PromptIntersection(Program):
    """Text that is likely after every one of several prompts: the product of their laws.

    Parameters
    ----------
    lm : CachedTransformer, or one for each prompt
        Several models must share a tokenizer.
    prompts : sequence of str (or Context)
    proposal : "product" or "first"
        Both have the same target. "first" draws a token from the first prompt's law and observes it under the others;
        "product" draws from the normalised product of the laws, the locally optimal proposal.
    until : str or callable, optional
        Stop, with no weight, when the text ends with this string, or when `until(text)` is true (`ends_sentence`).
    **options
        Those of `Program`.
    """

    def __init__(
        self,
        lm: CachedTransformer | Sequence[CachedTransformer],
        prompts: Sequence[str | Context],
        *,
        proposal: str = "product",
        until: str | Callable[[str], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one prompt, not {prompts!r}")
        arguments.one_of("proposal", proposal, ["product", "first"])
        lms = list(lm) if isinstance(lm, Sequence) else [lm] * len(prompts)
        if len(lms) != len(prompts):
            raise ValueError(f"{len(lms)} models for {len(prompts)} prompts: give one model, or one for each prompt")
        for other in lms[1:]:
            if other.vocab != lms[0].vocab:
                raise ValueError(f"the models must share a tokenizer: {lms[0].vocab} and {other.vocab} differ")
        pairs = zip(lms, prompts, strict=True)
        self.contexts = [_begin(lm, prompt) for lm, prompt in pairs]
        self.proposal = proposal
        self.until = functools.partial(_ends_with, until) if isinstance(until, str) else until
        if self.until is not None:
            arguments.function("until", self.until, "ends_sentence")

    def step(self) -> None:
        first, *others = [self.law(context) for context in self.contexts]
        proposal: Finite = first if self.proposal == "first" else product(first, *others)
        if self.early():
            proposal = proposal.masked(first.support.not_eos)
        token = self.sample(first, proposal=None if proposal is first else proposal)
        for other in others:
            self.observe(other, token)
        if self.write(token):
            self.contexts = [context + token for context in self.contexts]
            if self.until is not None and arguments.truth("until", self.until, self.s):
                self.finish()


class Conformity(NamedTuple):
    """How far a constraint goes against the model at one token.

    `mass` is the probability p(A) of the tokens allowed; `kl` the divergence KL(p( . | A) || p) = -log p(A), in nats;
    `agrees` whether the likeliest token of all is allowed.
    """

    token: Token
    mass: float
    kl: float
    agrees: bool


def conformity(
    lm: CachedTransformer, prompt: str | Context, constraint: Any, *, max_tokens: int = 100, seed: int | None = None
) -> list[Conformity]:
    """One text drawn by local masking, and at each of its tokens how well the model conforms to the constraint.

    Source: Willard & Louf 2023, Sec. 5. The text ends at EOS, where no token fits, or after `max_tokens`.
    """
    arguments.count("max_tokens", max_tokens)
    index, rng = index_of(constraint, lm.vocab), arguments.generator(seed)
    if index is None:
        raise TypeError(f"conformity wants a constraint that has masks, not {constraint!r}")
    context, state = _begin(lm, prompt), index.start
    found: list[Conformity] = []
    for _ in range(max_tokens):
        law, mask = context.next_token(), index.mask(state)
        log_probs = law.log_probs()
        if not np.any(log_probs[mask] > -np.inf):
            break
        log_mass = float(np.logaddexp.reduce(log_probs[mask]))
        token = law.masked(mask).sample(rng)
        found.append(Conformity(token, float(np.exp(log_mass)), -log_mass, bool(mask[np.argmax(log_probs)])))
        if token == EOS:
            break
        context, state = context + token, index.advance(state, token)
    return found


def ends_sentence(text: str) -> bool:
    """Whether the text ends with a full stop, an exclamation mark or a question mark, quotes after it allowed."""
    return re.search(r"[.!?][\"'”’)]*\s*$", text) is not None


def _ends_with(end: str, text: str) -> bool:
    return text.endswith(end)


def short_words(vocab: Vocabulary, most: int) -> Callable[[str], Mask]:
    """A mask function for `ConstrainedText`: no word of more than `most` letters (Lew et al. 2023, Sec. 2).

    A word is a run of letters; where the prompt may end inside one, use `lambda text: mask(prompt + text)`. Tokens that
    hold part of a character, and special tokens other than EOS, are left out.
    The masks for all lengths that the last word can have are computed here, once.
    """
    most = arguments.count("most", most)
    head = np.zeros(len(vocab), dtype=np.int64)         # letters that lengthen the last word
    fits = np.zeros(len(vocab), dtype=np.bool_)         # every further word of the token is short
    for i, data in enumerate(vocab.tokens):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        words = "".join(c if c.isalpha() else " " for c in text).split(" ")
        head[i] = len(words[0])
        fits[i] = bool(data) and all(len(word) <= most for word in words[1:])
    fits[list(vocab.eos_ids)] = True
    masks = [fits & (head <= room) for room in range(min(most, int(head.max())) + 1)]    # by the letters left
    for mask in masks:
        mask.setflags(write=False)

    def mask_after(text: str) -> Mask:
        n = 0
        while n < min(len(text), most) and text[-1 - n].isalpha():
            n += 1
        return masks[min(most - n, len(masks) - 1)]

    return mask_after
