"""Program: what the ready-made programs share, a bound on their tokens and a decision rule."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from llmppl.constraints.vocabulary import EOS, Text, Token
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.lm import CachedTransformer, Context, TokenDistribution
from llmppl.models.choices import CallSite
from llmppl.models.model import Model
from llmppl.support import arguments
from llmppl.support.options import CONSTRAINTS, list_options, unknown_option


class Options(TypedDict, total=False):
    """The options that all programs take; `Program` describes them."""

    min_tokens: int
    max_tokens: int | None
    stop: str | Iterable[str]
    rule: DecisionRule


class Program(Model):
    """What the programs share.

    Parameters
    ----------
    min_tokens, max_tokens : int
        The text has no EOS before `min_tokens` tokens (each time with the probability of that as a weight), and is cut
        off after `max_tokens`, with no weight, and marked `cut`.
    stop : str or list of str
        What ends the text, as EOS does, as soon as the tokens spell one of these; it is left out, with what its last
        token has beyond it. So a text has the probability that the model writes it and then a stop string, its first.
        With one before `min_tokens` tokens the weight is zero.
    rule : Rule, or another function from a distribution to one over the same tokens
        What turns the model's next-token distribution into the target's, as in `rule=Rule(temperature=0.5)`.
    """

    @list_options(Options, {})
    def __init__(
        self, *, min_tokens: int = 0, max_tokens: int | None = None, stop: str | Iterable[str] = (),
        rule: DecisionRule = NO_RULE, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if unknown:
            raise _unknown(type(self), unknown)
        self.min_tokens = arguments.count("min_tokens", min_tokens, least=0)
        self.max_tokens: int | None = arguments.optional_count("max_tokens", max_tokens)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={max_tokens}, not {min_tokens}")
        self.stop = _stop_strings(stop)
        self.rule = arguments.function("rule", rule, "Rule(top_k=40)")
        self.num_tokens = 0

    def next_token(self, context: Context) -> TokenDistribution:
        """The target's distribution of the token after `context`."""
        dist: TokenDistribution = self.transformer(context)
        return dist if self.rule is NO_RULE else self.rule(dist)

    def early(self) -> bool:
        """Whether the text may not end yet."""
        return self.num_tokens < self.min_tokens

    def cause(self, verb: str) -> str | None:
        """What the program died of at its own statement `verb`, in its own words; None for those of the statement."""
        return None

    def statement(self, verb: str) -> str:
        """What the program's own statement `verb` weighs by, in its own words."""
        return verb

    def _cause_(self, verb: str, reason: str, site: CallSite) -> str:
        if verb == "stop":
            return reason
        return (self.cause(verb) or reason) if _ready_made(site) else super()._cause_(verb, reason, site)

    def _statement_(self, verb: str, site: CallSite) -> str:
        return self.statement(verb) if _ready_made(site) else super()._statement_(verb, site)

    def write(self, token: Token) -> bool:
        """Append `token` to the text; False if it ends the text and is none of it."""
        if token == EOS:
            self.finish()
            return False
        self.s += token
        self.num_tokens += 1
        data = bytes_of(self.s)
        place = _first_stop(data, self.stop, len(data) - len(token.bytes))
        if place is not None:
            self.s = Text(data[:place])
            if self.early():
                self._die_("stop", f"a stop string is written before min_tokens={self.min_tokens}")
            self.finish()
        elif self.num_tokens == self.max_tokens:
            self._cut_ = True
            self.finish()
        return True


_DEFAULTS = {name: each.default for name, each in inspect.signature(Program.__init__).parameters.items()}
with_program_options = list_options(Options, _DEFAULTS)


@functools.cache
def _ready_made(site: CallSite) -> bool:
    """Whether a statement is one of the programs of this folder."""
    return os.path.dirname(site[0].co_filename) == os.path.dirname(__file__)


def begin(lm: CachedTransformer, prompt: str | Context) -> Context:
    """The context that a prompt stands for."""
    if isinstance(prompt, CachedTransformer):
        raise TypeError(f"lm and prompt are swapped: the language model comes first, then {arguments.shown(lm)}")
    language_model(lm)
    if isinstance(prompt, Context):
        if prompt.lm.vocab != lm.vocab:
            raise ValueError(f"prompt must be a Context of {lm!r}, and it is one of {prompt.lm!r}, with other tokens")
        prompt.check_length()
        return prompt
    if isinstance(prompt, str):
        return lm.context(arguments.text("prompt", prompt))
    how = ""
    if isinstance(prompt, (list, tuple)) and prompt:
        is_chat = isinstance(prompt[0], dict)
        how = ": lm.chat(messages) makes one of messages" if is_chat else ": run_many takes many prompts, a task each"
    raise TypeError(f"prompt must be a str or a Context, not {arguments.shown(prompt)}{how}")


def language_model(lm: CachedTransformer) -> CachedTransformer:
    """`lm`, if it is one; a TypeError says how to make one of a name, or of what transformers has loaded."""
    if isinstance(lm, CachedTransformer):
        return lm
    how = f"CachedTransformer.from_pretrained({lm!r})" if isinstance(lm, str) else "CachedTransformer(model, tokenizer)"
    raise TypeError(f"lm must be a CachedTransformer, not {arguments.kind(lm)}: {how} makes one")


def _stop_strings(given: str | Iterable[str]) -> tuple[str, ...]:
    """`given` as a tuple of texts, none of them empty."""
    if given is None or not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TypeError(f"stop must be a str or a list of them, not {arguments.shown(given)}")
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not arguments.text("each of stop", text):
            raise ValueError('stop must be a text of at least one character, not ""')
    return tuple(texts)


def _first_stop(data: bytes, stops: Iterable[str], read: int) -> int | None:
    """Where the first stop string to be whole in `data` begins, of several the longest; None if there is none.

    The first `read` bytes have none.
    """
    found = []
    for stop in stops:
        text = stop.encode()
        place = data.find(text, max(0, read - len(text) + 1))
        if place >= 0:
            found.append((place + len(text), place))
    return min(found)[1] if found else None


def _unknown(program: type[Program], given: Mapping[str, object]) -> TypeError:
    """Return the error for options that a program does not take."""
    known = _options(program)
    if CONSTRAINTS.keys() & given.keys():
        known |= {"constraint"} & inspect.signature(program).parameters.keys()
    return unknown_option(program.__name__, given, known)


def _options(program: type[Program]) -> set[str]:
    """The keywords that a program takes, those of the classes it is derived from included."""
    makers = [cls.__dict__.get("__init__", Program.__init__) for cls in program.__mro__ if issubclass(cls, Program)]
    parameters = [each for maker in makers for each in inspect.signature(maker).parameters.values()]
    return {each.name for each in parameters if each.kind == each.KEYWORD_ONLY}
