"""Program: the base class of the ready-made programs. It bounds the number of tokens and applies a decision rule."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable
from typing import Any, TypedDict

from llmppl.constraints.vocabulary import EOS, Text, Token
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.lm import CachedTransformer, Context, TokenDistribution
from llmppl.models.choices import CallSite
from llmppl.models.model import Model
from llmppl.support import arguments
from llmppl.support.options import list_options, unknown_option


class Options(TypedDict, total=False):
    """Options of all programs; `Program` describes them."""

    min_tokens: int
    max_tokens: int | None
    stop: str | Iterable[str]
    rule: DecisionRule


class Program(Model):
    """Base class of the ready-made programs.

    Parameters
    ----------
    min_tokens, max_tokens : int
        Before `min_tokens` tokens, EOS is excluded, and each step is weighed by the probability that it does not come.
        After `max_tokens` tokens the text is cut off, with no weight, and marked `cut`.
    stop : str or list of str
        Strings that end the text, as EOS does, as soon as the tokens spell one of them. The stop string and the rest of
        its last token are left out. So a text has the probability that the model writes it and then a stop string, its
        first. If a stop string occurs before `min_tokens` tokens, the weight is zero.
    rule : Rule, or another function from a distribution to one over the same tokens
        Turns the model's next-token distribution into the target's, as in `rule=Rule(temperature=0.5)`.
    """

    @list_options(Options, {})
    def __init__(
        self, *, min_tokens: int = 0, max_tokens: int | None = None, stop: str | Iterable[str] = (),
        rule: DecisionRule = NO_RULE, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if unknown:
            raise unknown_option(type(self).__name__, unknown, _options(type(self)))
        self.min_tokens = arguments.count("min_tokens", min_tokens, least=0)
        self.max_tokens: int | None = arguments.optional_count("max_tokens", max_tokens)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={max_tokens}, not {min_tokens}")
        self.stop = _stop_strings(stop)
        self.rule = arguments.function("rule", rule, "Rule(top_k=40)")
        self.num_tokens = 0

    def next_token(self, context: Context) -> TokenDistribution:
        """Return the target's distribution of the token after `context`."""
        dist: TokenDistribution = self.transformer(context)
        return dist if self.rule is NO_RULE else self.rule(dist)

    def before_min_tokens(self) -> bool:
        """Return True if the text may not end yet."""
        return self.num_tokens < self.min_tokens

    def death_reason(self, verb: str) -> str | None:
        """Return why the program's own statement `verb` gave weight zero; None for the words of the statement."""
        return None

    def statement_label(self, verb: str) -> str:
        """Return the key in `attribution` of the program's own statement `verb`."""
        return verb

    def _in_words_(self, verb: str, reason: str, site: CallSite) -> str:
        if not _is_ready_made(site):
            return super()._in_words_(verb, reason, site)
        if not reason:
            return self.statement_label(verb)
        return reason if verb == "stop" else self.death_reason(verb) or reason

    def append(self, token: Token) -> bool:
        """Append `token` to the text. Return False if it is EOS, which ends the text and adds nothing."""
        if token == EOS:
            self.finish()
            return False
        self.s += token
        self.num_tokens += 1
        data = bytes_of(self.s)
        place = _first_stop(data, self.stop, len(data) - len(token.bytes))
        if place is not None:
            self.s = Text(data[:place])
            if self.before_min_tokens():
                self._die_("stop", f"a stop string is written before min_tokens={self.min_tokens}")
            self.finish()
        elif self.num_tokens == self.max_tokens:
            self._cut_ = True
            self.finish()
        return True


_DEFAULTS = {name: each.default for name, each in inspect.signature(Program.__init__).parameters.items()}
with_program_options = list_options(Options, _DEFAULTS)


@functools.cache
def _is_ready_made(site: CallSite) -> bool:
    """Return True if a statement belongs to a program of this folder."""
    return os.path.dirname(site[0].co_filename) == os.path.dirname(__file__)


def as_context(lm: CachedTransformer, prompt: str | Context) -> Context:
    """Return the context of a prompt, or raise an error that says how to make one."""
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
    """Return `lm`. TypeError unless it is a CachedTransformer; the error says how to make one."""
    if isinstance(lm, CachedTransformer):
        return lm
    how = f"CachedTransformer.from_pretrained({lm!r})" if isinstance(lm, str) else "CachedTransformer(model, tokenizer)"
    raise TypeError(f"lm must be a CachedTransformer, not {arguments.shown(lm)}: {how} makes one")


def _stop_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """Return `stop` as a tuple of texts, none of them empty."""
    if not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise TypeError(f"stop must be a str or a list of them, not {arguments.shown(stop)}")
    texts = [stop] if isinstance(stop, str) else list(stop)
    for text in texts:
        if not arguments.text("each of stop", text):
            raise ValueError('stop must be a text of at least one character, not ""')
    return tuple(texts)


def _first_stop(data: bytes, stops: Iterable[str], searched: int) -> int | None:
    """Return the start of the stop string that is completed first in `data`, the longest of several; None without one.

    The first `searched` bytes contain none.
    """
    found = []
    for stop in stops:
        text = stop.encode()
        place = data.find(text, max(0, searched - len(text) + 1))
        if place >= 0:
            found.append((place + len(text), place))
    return min(found)[1] if found else None


def _options(program: type[Program]) -> set[str]:
    """Return the keywords of a program, including those of its base classes."""
    makers = [cls.__dict__.get("__init__", Program.__init__) for cls in program.__mro__ if issubclass(cls, Program)]
    parameters = [each for maker in makers for each in inspect.signature(maker).parameters.values()]
    return {each.name for each in parameters if each.kind == each.KEYWORD_ONLY}
