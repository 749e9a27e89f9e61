"""Model: a probabilistic program, one step at a time.

A step draws and weighs. Read as a Feynman-Kac model, the draws of step t are its kernel M_t and the weights its
potential G_t; the target after t steps is  prod_s M_s G_s  up to the constant Z_t. `log_weight` carries the log of the
product of the potentials, corrected for every proposal, so the same program is a sampler, a density and a search space.
Source: Lew et al. 2023, Sec. 2 and 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsFloat, TypeVar, cast

import numpy as np

from llmppl.arguments import shown
from llmppl.distributions import Impossible, Proposal
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.models.choices import NOTHING, CallSite, Noted, Sampled, Steps, call_site, told
from llmppl.models.copies import Kept, culprit, deep_copy, shared_names, survey
from llmppl.models.guards import drawable, log_of, observed, plain_result, plain_step, truth
from llmppl.models.spans import Extent, Span, Until, extend
from llmppl.runtime import ContextTooLong, running
from llmppl.tokens import Text

if TYPE_CHECKING:
    from llmppl.lm import Context

T = TypeVar("T")
Next_co = TypeVar("Next_co", bound=Proposal, covariant=True)


class HasNextToken(Protocol[Next_co]):
    """What a program asks of a context."""

    def next_token(self) -> Next_co:
        """The distribution of the next token."""


class _Dead(BaseException):
    """Leaves the step of a particle that died; no `except Exception` of a program holds it up."""


class Model:
    """Subclass it and write `step`, which draws and weighs until `finish()`.

    Attributes
    ----------
    s : str
        The text so far; what `__init__` leaves is the initial state s_0. Adding tokens keeps their bytes.
    log_weight : float
        Log of the weight, any twist of the last step included.
    log_twist : float
        The twist of the last step.
    finished, cut : bool
        Whether the particle has ended, and whether it was `max_steps` or the model's length that ended it.
    limit : str
        What the particle asked for in vain, if it was cut where a run reached the model's length.
    attribution : dict of str to float
        For each statement that weighed the particle, the log-weight it has added so far, e.g.
        {"observe (story.py, line 41)": -7.2}. A statement is a verb and the line that called it; ready-made programs
        say what it is. Twists are not in it, nor what inference does to weights, nor a death. It is replaced, never
        changed.
    death : str or None
        The statement that gave it weight zero, and where it stands.
    rng : np.random.Generator
        The particle's own stream; `sample` draws from it, and a step that needs other randomness may.
    choices : tuple of tuple
        What it chose in each step: `Choice`s, and the state of `rng` where a step took it. See `models.choices`.
    chooser : Sampled, or another of `models.choices`
        Who makes its choices; inference's to set.
    shared : tuple of str
        Written in a class: the names of attributes that copies share, since no step changes what is in them; those of
        its bases are shared, too.

    A model can be stepped by hand: `model.step()` runs one step, and after a zero weight just returns.
    """

    s: str = Text()
    log_weight: float = 0.0
    log_twist: float = 0.0
    finished: bool = False
    cut: bool = False
    limit: str = ""
    attribution: dict[str, float] = {}                  # noqa: RUF012
    death: str | None = None
    chooser: Sampled | None = None
    _noted: Noted = NOTHING
    _stepping: bool = False
    shared: tuple[str, ...] = ()
    _kept: Kept | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        shared_names(cls)
        wrap_step(cls)

    def step(self) -> None:
        """Draw and weigh once; the user's to write."""
        raise NotImplementedError(f"{type(self).__name__} has no step(): write `def step(self)` in the class")

    @property
    def rng(self) -> np.random.Generator:
        return cast(np.random.Generator, (self.chooser or self._own_chooser()).lend(self))

    @rng.setter
    def rng(self, rng: np.random.Generator) -> None:
        self.chooser = Sampled(rng)

    @property
    def choices(self) -> Steps:
        """What it chose, a tuple for each step, from which `llmppl.models.choices.replay` makes it again."""
        return self._noted.steps()

    # ---- verbs

    def sample(self, dist: Proposal[T], proposal: Proposal[T] | None = None) -> T:
        """Draw a value from `dist`, or from `proposal` with the importance weight w p(x) / mu(x).

        A proposal is *properly weighted* for a measure mu: it proposes x with a weight w such that, for every f,

            E[w f(x)] = sum_x mu(x) f(x).

        A Distribution q has w = 1 and mu = q, so the weight is p(x) / q(x). `q.where(predicate)` has mu = q on the
        values that satisfy the predicate. Without `proposal`, the target is the measure of `dist` itself: the weight
        is w, which is 1 for a Distribution.

        What lies outside the support of mu is removed from the target: that support is part of the model.
        Where there is nothing to draw the particle dies.

        Raises
        ------
        TypeError
            If what is drawn from, or weighed by, is neither a Distribution nor another Proposal.
        ValueError
            If a weight w is NaN or infinite, or mu is zero at a value that was proposed with a positive weight.
        """
        value: T = self._draw("sample", dist, proposal)
        return value

    def extend(
        self,
        context: Context,
        *,
        until: str | Until | None = None,
        max_tokens: int | None = None,
        constraint: Any = None,
        complete: bool | None = None,
        rule: DecisionRule = NO_RULE,
    ) -> Span:
        """Draw a span of text after `context`, token by token: each is a `sample` of this step.

        The distribution is the language model's, restricted to what `constraint` and `complete` allow; tokens are
        proposed from those that fit, with the exact weight. The span ends with the first token after which `until`
        holds and the constraint accepts its text, of those that are given. That token is kept whole: with until="\\n",
        a token "\\n\\n" ends the line, and both are in the span. EOS ends it as well, and does not finish the particle.
        It has no `end` as a ConstrainedText has: what comes after a span is the program's to draw or observe.

        Parameters
        ----------
        context : Context
        until : str or callable, optional
            A string that the text of the span contains, or `until(text) -> bool` of that text.
        max_tokens : int, optional
            The span is cut off after so many, with no weight; one with a constraint is complete by then.
        constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, interegular.FSM, or callable
            Of the text of the span alone; where it has `parse`, as types have, `parsed` is the object. EOS fits where
            it is accepted, and only there. A callable must hold of the text so far after every token; it is checked
            after the draw, and says nothing of an end. Make it where the program begins, not in the step.
        complete : bool, optional
            Whether the span must have ended after at most `max_tokens` tokens (EOS not counted), instead of being cut
            there; if it is not given, that is what a constraint means, unless it is a function. No token is then
            proposed after which the constraint, as far as it can tell, cannot accept in time; what has not ended by
            then dies.
        rule : Rule, or another function from a distribution to one over the same tokens
            What turns the model's next-token distribution into the target's.

        Raises
        ------
        TypeError, ValueError
            For an argument of another type or out of range, for none that ends the span, and where none can end in
            time.
        """
        self._require_active("extend")
        return extend(self, context, Extent(context, until, max_tokens, constraint, complete), rule)

    def observe(self, dist: Proposal, value: Any) -> None:
        """Weigh by the probability of `value` under `dist`, as `sample(dist, proposal=Delta(value))` would."""
        self._require_active("observe")
        observed(dist, value)
        if self.chooser is not None and not self.chooser.weighs:
            return
        log_p = dist.log_measure(value)
        if log_p == -math.inf:
            self._die("observe", f"observe: {dist.brief} gives {shown(value)} probability 0")
        else:
            self._weigh("observe", log_p)

    def condition(self, holds: bool | np.bool_) -> None:
        """Demand that `holds`; where it does not, the particle ends here with weight zero.

        It is True or False, or one bool of numpy, or 0 or 1; anything else is a TypeError.
        """
        if not truth(holds):
            self._die("condition", "condition is false")

    def score(self, log_w: SupportsFloat) -> None:
        """Multiply the weight by exp(`log_w`); -inf ends the particle, NaN and +inf are a ValueError."""
        log_w = log_of("score", log_w)
        if log_w == -math.inf:
            self._die("score", "score(-inf)")
        else:
            self._weigh("score", log_w)

    def twist(self, log_w: SupportsFloat) -> None:
        """Guide which particles survive this step by exp(`log_w`), without changing the target.

        It is added when the step ends and taken back before the next one begins, when the particle finishes and when
        `max_steps` cuts it; several in a step add up. Infinite or NaN is a ValueError: a dead end is
        `condition(False)`.

        It is compared with 0, what a finished particle has, so it should estimate the log of the weight that is still
        to come. One that is larger by a constant starves finished particles: with 600 for every particle that goes on,
        where half end at each step, the mean of Z-hat over 2,000 runs is 0.442 for Z = 1.
        """
        log_w = log_of("twist", log_w)
        if not math.isfinite(log_w):
            raise ValueError(f"twist({log_w}): a twist is finite; what must not happen is condition(False)")
        self.log_twist += log_w

    def transformer(self, context: HasNextToken[Next_co]) -> Next_co:
        """The distribution of the next token after `context`. One forward pass computes all asked for by then."""
        if not hasattr(context, "next_token"):
            raise TypeError(f"transformer wants a Context, lm.context(text), not {context!r}")
        return context.next_token()

    def finish(self) -> None:
        """End the particle, with the weight it has."""
        self.finished = True

    # ---- seams

    def copy(self) -> Self:
        """An independent copy, as the runtime makes of a particle that is continued more than once.

        Attributes are deep-copied, except those that the class lists in `shared`, and what is immutable or shared by
        design: language models, contexts, tokens, vocabularies, distributions, functions, modules, networks of torch
        and their tokenizers, and arrays that nobody can write to. The random stream is not copied but replaced. A
        TypeError names an attribute that cannot be copied, or would be wrong in a copy; see `llmppl.models.copies`.
        """
        kept = survey(self) if self._kept is None else self._kept
        try:
            new: Self = deep_copy(self, kept)
        except Exception as error:
            raise culprit(self, kept, error) from error
        new._kept, new._stepping = kept, False
        return new

    def spawn(self, chooser: Sampled) -> Self:
        """A copy whose choices `chooser` makes."""
        particle = self.copy()
        if particle is self:
            raise TypeError(f"{type(self).__name__}.copy() returned the model itself; it must return a new one")
        particle.chooser, particle._stepping = chooser, False
        return particle

    def _own_chooser(self) -> Sampled:
        if running():                                   # a model that is part of another, say
            raise RuntimeError(
                f"this {type(self).__name__} is none of the particles that are run, and has no random stream: give "
                "it that of the particle, as in self.inner.rng = self.rng"
            )
        self.chooser = Sampled(np.random.default_rng())
        return self.chooser

    def _require_active(self, verb: str) -> None:
        if self.finished:
            raise RuntimeError(f"{verb}() after the particle has finished: return from step() after finish()")

    def _draw(
        self, verb: str, dist: Proposal, proposal: Proposal | None, why: Callable[[], str] | None = None
    ) -> Any:
        """`sample`, as a part of the statement `verb`; `why` tells why there was nothing to draw."""
        self._require_active(verb)
        source = dist if proposal is None else proposal
        drawable(verb, dist, source)
        try:
            chooser = self.chooser or self._own_chooser()
            value, log_w = chooser.draw(self, source)
        except Impossible as error:
            self._die(verb, f"{verb}: {error.brief if why is None else why()}")
            return None
        if not chooser.weighs:
            return value
        if math.isnan(log_w) or log_w == math.inf:
            raise ValueError(f"{source!r} proposed {value!r} with the log weight {log_w}; it is finite, or -inf for 0")
        if log_w == -math.inf:
            self._die(verb, f"{verb}: {source.brief} proposed {shown(value)} with weight 0")
            return None
        if proposal is not None:
            log_p, log_mu = dist.log_measure(value), proposal.log_measure(value)
            if log_mu == -math.inf:
                raise ValueError(f"{proposal!r} proposed {value!r}, where its log_measure is -inf")
            if log_p == -math.inf:
                self._die(verb, f"{verb}: {dist.brief} gives {shown(value)}, which the proposal drew, probability 0")
                return value
            log_w += log_p - log_mu
        if proposal is not None or log_w != 0.0:
            self._weigh(verb, log_w)
        return value

    def _weigh(self, verb: str, log_w: float) -> None:
        """Multiply the weight by exp(`log_w`), and write it down for the statement."""
        if not math.isfinite(log_w):
            raise ValueError(f"{verb}({log_w}): a log weight is finite, or -inf for what must not happen")
        self.log_weight += log_w
        statement = self._statement(verb, call_site())
        self.attribution = {**self.attribution, statement: self.attribution.get(statement, 0.0) + log_w}

    def _die(self, verb: str, reason: str) -> None:
        """Give the particle weight zero and leave its step."""
        self.death = self._cause(verb, reason, call_site())
        self.log_weight, self.log_twist, self.finished = -math.inf, 0.0, True
        if self._stepping:
            raise _Dead

    def _cause(self, verb: str, reason: str, site: CallSite) -> str:
        """What `death` is to say: a `reason` of the statement `verb`, which stands at `site`."""
        return f"{reason} {told(site)}"

    def _statement(self, verb: str, site: CallSite) -> str:
        """What `attribution` is to call the statement `verb`, which stands at `site`."""
        return f"{verb} {told(site)}"

    def __str__(self) -> str:
        if not isinstance(self.s, str):
            raise TypeError(f"{type(self).__name__}.s must be a str, not {self.s!r}: a token is added, self.s += token")
        return self.s

    def __repr__(self) -> str:
        dead = self.log_weight == -math.inf
        state = "dead" if dead else "cut" if self.cut else "finished" if self.finished else "active"
        return f"<{type(self).__name__} {str(self)!r} log_weight={self.log_weight:.4g} {state}>"


def untwist(particle: Model) -> None:
    """Take the twist of the last step back."""
    particle.log_weight -= particle.log_twist
    particle.log_twist = 0.0


def wrap_step(cls: type[Model]) -> None:
    """Put what belongs to every step around a step that was written in `cls`, came with a mixin, or was assigned."""
    if not hasattr(cls.step, "_wrapped"):
        plain_step(cls.step, cls.__name__)
        setattr(cls, "step", _wrap_step(cls.step))          # noqa: B010


def _wrap_step(step: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """`step` with the twist taken back and added, and the leaving on death."""

    @functools.wraps(step)
    def whole(self: Model) -> Any:
        if self._stepping:                              # super().step() is part of the step that calls it
            part = step(self)
            plain_result(part, type(self).__name__, whole=False)
            return part
        if self.finished:
            raise RuntimeError(f"step() of a particle that has finished: {self!r}")
        untwist(self)
        self._noted = Noted(self._noted)
        if self.chooser is not None:
            self.chooser.begin_step()
        self._stepping = True
        try:
            plain_result(step(self), type(self).__name__, whole=True)
        except _Dead:
            pass
        except ContextTooLong as error:
            if not running():                           # by hand there is nobody to tell
                raise
            self.limit, self.finished, self.cut = str(error), True, True
        finally:
            self._stepping = False
        if self.finished:
            self.log_twist = 0.0
        else:
            self.log_weight += self.log_twist

    setattr(whole, "_wrapped", True)                    # noqa: B010
    return whole
