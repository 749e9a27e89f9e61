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
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, SupportsFloat, TypeVar

import numpy as np

from llmppl.constraints.vocabulary import Text
from llmppl.distributions import Impossible, Proposal
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.models.choices import NOTHING, CallSite, Noted, Sampled, Steps, call_site, told
from llmppl.models.copies import Kept, blame, deep_copy, shared_names, survey
from llmppl.models.guards import (
    Dead,
    drawable,
    free_names,
    in_its_time,
    log_of,
    observed,
    plain_result,
    plain_step,
    read_only,
    taken,
    truth,
)
from llmppl.models.spans import Extent, Span, Until, extend
from llmppl.models.streams import ParticleStream
from llmppl.support.arguments import shown
from llmppl.support.runtime import ContextTooLong, running

if TYPE_CHECKING:
    from llmppl.lm import Context

T = TypeVar("T")
Next_co = TypeVar("Next_co", bound=Proposal, covariant=True)


class HasNextToken(Protocol[Next_co]):
    """What a program asks of a context."""

    def next_token(self) -> Next_co:
        """The distribution of the next token."""


class Model:
    """Base class of programs: write `step`, which draws and weighs until `finish()`; `models.guards` has the verbs.

    Attributes
    ----------
    s : str
        The text so far; what `__init__` leaves is the initial state s_0. Adding tokens keeps their bytes.
    log_weight : float, read-only, as are the following up to `choices`
        Log of the weight, any twist of the last step included.
    log_twist : float
        The twist of the last step.
    finished, cut : bool
        Whether the particle has ended, and whether it was `max_steps` or the model's length that ended it.
    attribution : dict of str to float
        For each statement that weighed the particle, the log-weight it has added so far, e.g.
        {"observe (story.py, line 41)": -7.2}. A statement is a verb and the line that called it; ready-made programs
        say what it is. Twists are not in it, nor what inference does to weights, nor a death. It is replaced, never
        changed.
    death : str or None
        The statement that gave it weight zero, and where it stands.
    chooser : Sampled, or another of `models.choices`
        The object that makes its choices.
    choices : tuple of tuple
        What it chose in each step: `Choice`s, and the state of `rng` where a step took it. See `models.choices`.
    rng : np.random.Generator
        The particle's own stream; `sample` draws from it, and a step that needs other randomness may. It can be kept,
        and given to another model, as in `self.inner.rng = self.rng`.
    shared : tuple of str
        Written in a class: the names of attributes that copies share, since no step changes what is in them (a cache
        may grow); those of its bases are shared, too.

    A model can be stepped by hand: `model.step()` runs one step, and after a zero weight just returns.
    """

    s: str = Text()
    finished: bool = False
    shared: tuple[str, ...] = ()
    log_weight: float = read_only("log_weight", "self.score(log_w) adds to it")
    log_twist: float = read_only("log_twist", "self.twist(log_w) adds to it")
    cut: bool = read_only("cut", "self.finish() ends the particle")
    attribution: dict[str, float] = read_only("attribution", "self.score(log_w) adds to it")
    death: str | None = read_only("death", "self.condition(False) gives the particle weight zero")
    chooser: Sampled | None = read_only("chooser", "another model draws from the stream: self.inner.rng = self.rng")
    _log_weight_: float = 0.0                           # names with a last _ are inference's
    _log_twist_: float = 0.0
    _cut_: bool = False
    _limit_: str = ""                                   # what a particle that was cut by the model's length asked for
    _attribution_: dict[str, float] = {}                # noqa: RUF012
    _death_: str | None = None
    _chooser_: Sampled | None = None
    _noted_: Noted = NOTHING
    _stepping_: bool = False
    _kept_: Kept | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        free_names(cls, Model)
        shared_names(cls)
        wrap_step(cls)

    def step(self) -> None:
        """Draw and weigh once; the user's to write."""
        raise NotImplementedError(f"{type(self).__name__} has no step(): write `def step(self)` in the class")

    @property
    def rng(self) -> np.random.Generator:
        chooser = self._chooser_
        return ParticleStream(self) if chooser is None or self._stepping_ else chooser.rng

    @rng.setter
    def rng(self, rng: np.random.Generator) -> None:
        if self._stepping_:
            raise RuntimeError(f"{type(self).__name__}.rng was assigned in its step, which draws from its own")
        if not isinstance(rng, ParticleStream) or rng.particle is not self:
            self._chooser_ = Sampled(rng, by_hand=True)

    @property
    def choices(self) -> Steps:
        return self._noted_.steps()

    @choices.setter
    def choices(self, value: object) -> NoReturn:
        raise AttributeError(taken(self, "choices", "self.options, say, is free"))

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
        value: T = self._draw_("sample", dist, proposal)
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
        in_its_time(self, "extend")
        return extend(self, context, Extent(context, until, max_tokens, constraint, complete), rule)

    def observe(self, dist: Proposal, value: Any) -> None:
        """Weigh by the probability of `value` under `dist`, as `sample(dist, proposal=Delta(value))` would."""
        in_its_time(self, "observe")
        observed(dist, value)
        if self._chooser_ is not None and not self._chooser_.weighs:
            return
        log_p = dist.log_measure(value)
        if log_p == -math.inf:
            self._die_("observe", f"observe: {dist.brief} gives {shown(value)} probability 0")
        else:
            self._weigh_("observe", log_p)

    def condition(self, holds: bool | np.bool_) -> None:
        """Demand that `holds`; where it does not, the particle ends here with weight zero.

        It is True or False, or one bool of numpy, or 0 or 1; anything else is a TypeError.
        """
        if not truth(holds):
            self._die_("condition", "condition is false")

    def score(self, log_w: SupportsFloat) -> None:
        """Multiply the weight by exp(`log_w`); -inf ends the particle, NaN and +inf are a ValueError."""
        log_w = log_of("score", log_w)
        if log_w == -math.inf:
            self._die_("score", "score(-inf)")
        else:
            self._weigh_("score", log_w)

    def twist(self, log_w: SupportsFloat) -> None:
        """Guide which particles survive this step by exp(`log_w`), without changing the target.

        It is added when the step ends and taken back before the next one begins, when the particle finishes and when
        `max_steps` cuts it; several in a step add up. Infinite or NaN is a ValueError: a dead end is
        `condition(False)`. Outside of a step it is a RuntimeError.

        It is compared with 0, what a finished particle has, so it should estimate the log of the weight that is still
        to come. One that is larger by a constant starves finished particles: with 600 for every particle that goes on,
        where half end at each step, the mean of Z-hat over 2,000 runs is 0.442 for Z = 1.
        """
        log_w = log_of("twist", log_w)
        if not math.isfinite(log_w):
            raise ValueError(f"twist({log_w}): a twist is finite; what must not happen is condition(False)")
        in_its_time(self, "twist")
        self._log_twist_ += log_w

    def transformer(self, context: HasNextToken[Next_co]) -> Next_co:
        """The distribution of the next token after `context`. One forward pass computes all asked for by then."""
        if not hasattr(context, "next_token"):
            raise TypeError(f"transformer wants a Context, lm.context(text), not {context!r}")
        return context.next_token()

    def finish(self) -> None:
        """End the particle, with the weight that it has without a twist."""
        self.finished = True
        if not self._stepping_:                         # else the step takes it back
            untwist(self)

    # ---- seams

    def copy(self) -> Self:
        """An independent copy, as the runtime makes of a particle that is continued more than once.

        Attributes are deep-copied, except those that the class lists in `shared`, and what is immutable or shared by
        design: language models, contexts, tokens, vocabularies, distributions, functions, modules, networks of torch
        and their tokenizers, and arrays that nobody can write to. The random stream is not copied but replaced. A
        TypeError names an attribute that cannot be copied, or would be wrong in a copy; see `llmppl.models.copies`.
        `copy.copy` and `copy.deepcopy` make the same copy.
        """
        return self.__deepcopy__({})

    def __copy__(self) -> Self:
        if type(self).copy is Model.copy:
            return self.copy()
        new = object.__new__(type(self))                # a copy() of its own shares what it likes
        vars(new).update({**vars(self), "_stepping_": False, "_chooser_": None})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        kept = survey(self) if self._kept_ is None else self._kept_
        try:
            new: Self = deep_copy(self, kept, memo)
        except Exception as error:
            blame(self, kept, error)
            raise
        new._kept_, new._stepping_ = kept, False
        return new

    def _spawn_(self, chooser: Sampled) -> Self:
        """A copy whose choices `chooser` makes."""
        particle = self.copy()
        if particle is self:
            raise TypeError(f"{type(self).__name__}.copy() returned the model itself; it must return a new one")
        particle._chooser_, particle._stepping_ = chooser, False
        return particle

    def _own_chooser_(self) -> Sampled:
        if running():                                   # a model that is part of another, say
            raise RuntimeError(
                f"this {type(self).__name__} is none of the particles that are run, and has no random stream: give "
                "it that of the particle, as in self.inner.rng = self.rng"
            )
        self._chooser_ = Sampled(np.random.default_rng(), by_hand=True)
        return self._chooser_

    def _draw_(
        self, verb: str, dist: Proposal, proposal: Proposal | None, why: Callable[[], str] | None = None
    ) -> Any:
        """`sample`, as a part of the statement `verb`; `why` tells why there was nothing to draw."""
        return _drawn(self, verb, dist, proposal, why)

    def _weigh_(self, verb: str, log_w: float) -> None:
        """Multiply the weight by exp(`log_w`), and write it down for the statement."""
        if not math.isfinite(log_w):
            raise ValueError(f"{verb}({log_w}): a log weight is finite, or -inf for what must not happen")
        self._log_weight_ += log_w
        statement = self._statement_(verb, call_site())
        told = self._attribution_
        self._attribution_ = {**told, statement: told.get(statement, 0.0) + log_w}

    def _die_(self, verb: str, reason: str) -> None:
        """Give the particle weight zero and leave its step."""
        if self._log_weight_ > -math.inf:               # else a step goes on that a bare `except:` held up
            self._death_ = self._cause_(verb, reason, call_site())
        self._log_weight_, self._log_twist_, self.finished = -math.inf, 0.0, True
        if self._stepping_:
            raise Dead

    def _cause_(self, verb: str, reason: str, site: CallSite) -> str:
        """What `death` is to say: a `reason` of the statement `verb`, which stands at `site`."""
        return f"{reason} {told(site)}"

    def _statement_(self, verb: str, site: CallSite) -> str:
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


def _drawn(
    model: Model, verb: str, dist: Proposal, proposal: Proposal | None, why: Callable[[], str] | None
) -> Any:
    in_its_time(model, verb)
    source = dist if proposal is None else proposal
    drawable(verb, dist, source)
    try:
        chooser = model._chooser_ or model._own_chooser_()
        value, log_w = chooser.draw(model, source)
    except Impossible as error:
        model._die_(verb, f"{verb}: {error.brief if why is None else why()}")
        return None
    if not chooser.weighs:
        return value
    if math.isnan(log_w) or log_w == math.inf:
        raise ValueError(f"{source!r} proposed {value!r} with the log weight {log_w}; it is finite, or -inf for 0")
    if log_w == -math.inf:
        model._die_(verb, f"{verb}: {source.brief} proposed {shown(value)} with weight 0")
        return None
    if proposal is not None:
        log_p, log_mu = dist.log_measure(value), proposal.log_measure(value)
        if log_mu == -math.inf:
            raise ValueError(f"{proposal!r} proposed {value!r}, where its log_measure is -inf")
        if log_p == -math.inf:
            model._die_(verb, f"{verb}: {dist.brief} gives {shown(value)}, which the proposal drew, probability 0")
            return value
        log_w += log_p - log_mu
    if proposal is not None or log_w != 0.0:
        model._weigh_(verb, log_w)
    return value


def untwist(particle: Model) -> None:
    """Take the twist of the last step back."""
    particle._log_weight_ -= particle._log_twist_
    particle._log_twist_ = 0.0


def wrap_step(cls: type[Model]) -> None:
    """Put what belongs to every step around a step that was written in `cls`, came with a mixin, or was assigned."""
    if not hasattr(cls.step, "_wrapped"):
        plain_step(cls.step, cls.__name__)
        setattr(cls, "step", _wrap_step(cls.step))          # noqa: B010


def _wrap_step(step: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """`step` with the twist taken back and added, and the leaving on death."""

    @functools.wraps(step)
    def whole(self: Model) -> Any:
        if self._stepping_:                             # super().step() is part of the step that calls it
            part = step(self)
            plain_result(part, type(self).__name__, whole=False)
            return part
        if self.finished:
            raise RuntimeError(f"step() of a particle that has finished: {self!r}")
        untwist(self)
        self._noted_ = Noted(self._noted_)
        if self._chooser_ is not None:
            self._chooser_.begin_step()
        self._stepping_ = True
        try:
            plain_result(step(self), type(self).__name__, whole=True)
        except Dead:
            pass
        except ContextTooLong as error:
            if not running():                           # by hand there is nobody to tell
                raise
            self._limit_, self.finished, self._cut_ = str(error), True, True
        finally:
            self._stepping_ = False
        if self.finished:
            self._log_twist_ = 0.0
        else:
            self._log_weight_ += self._log_twist_

    setattr(whole, "_wrapped", True)                    # noqa: B010
    return whole
