"""Model: a probabilistic program that runs one step at a time.

A step draws values and adds weight. As a Feynman-Kac model, the draws of step t are its kernel M_t and the weights its
potential G_t. The target after t steps is  prod_s M_s G_s  up to the constant Z_t. `log_weight` is the log of the
product of the potentials, corrected for every proposal. So one program is a sampler, a density and a search space.
Source: Lew et al. 2023, Sec. 2 and 3.

A name that ends with one underscore, as `_log_weight_`, belongs to inference.
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
from llmppl.models import death_messages
from llmppl.models.choices import NOTHING, CallSite, Noted, Sampled, Steps, call_site, describe_site
from llmppl.models.copies import deep_copy
from llmppl.models.guards import (
    Dead,
    as_bool,
    as_log_weight,
    check_distribution,
    check_names,
    check_proposal,
    check_step,
    check_step_result,
    check_time,
    read_only,
    read_only_error,
)
from llmppl.models.spans import Extent, Span, Until, extend
from llmppl.models.streams import ParticleStream
from llmppl.support.runtime import ContextTooLong, running

if TYPE_CHECKING:
    from llmppl.lm import Context

T = TypeVar("T")
Next_co = TypeVar("Next_co", bound=Proposal, covariant=True)


class HasNextToken(Protocol[Next_co]):
    """Context as a program uses it."""

    def next_token(self) -> Next_co:
        """Return the distribution of the next token."""


class Model:
    """Base class of programs. Write `step`, which draws and weighs until `finish()`.

    Attributes
    ----------
    s : str
        The text so far. Its value after `__init__` is the initial state s_0. Adding tokens keeps their bytes.
    log_weight : float, read-only, as are the following up to `choices`
        Log of the weight, including any twist of the last step.
    log_twist : float
        The twist of the last step.
    finished, cut : bool
        `finished` is True if the particle has ended, `cut` if `max_steps` or the model's length ended it.
    attribution : dict of str to float
        The log-weight that each statement has added so far, e.g. {"observe (story.py, line 41)": -7.2}. A statement
        is a verb and the line that called it; ready-made programs use their own words. Twists, deaths and inference's
        own changes of weights are not included. The dict is replaced, never changed.
    death : str or None
        The statement that gave the particle weight zero, and its line.
    chooser : Sampled, or another chooser of `models.choices`
        The object that makes the choices.
    choices : tuple of tuple
        The choices of each step: `Choice`s, and the state of `rng` where a step took it. See `models.choices`.
    rng : np.random.Generator
        The particle's own stream. `sample` draws from it, and so may a step. A program may keep it, or give it to
        another model, as in `self.inner.rng = self.rng`.
    shared : tuple of str
        Class attribute: the names of attributes that copies share, because no step changes their contents (a cache
        may grow). The names listed by base classes are included.

    To step a model by hand, call `model.step()`: it runs one step and returns normally after a zero weight.
    `llmppl.models.guards` has a table of the verbs and when each may be used.
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
    _log_weight_: float = 0.0
    _log_twist_: float = 0.0
    _cut_: bool = False
    _limit_: str = ""                                   # the error of the context that was too long for the model
    _attribution_: dict[str, float] = {}                # noqa: RUF012
    _death_: str | None = None
    _chooser_: Sampled | None = None
    _noted_: Noted = NOTHING
    _stepping_: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls, Model)
        wrap_step(cls)

    def step(self) -> None:
        """Draw and weigh once. Users write this method."""
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
        raise read_only_error(self, "choices", "self.options, say, is free")

    # ---- verbs

    def sample(self, dist: Proposal[T], proposal: Proposal[T] | None = None) -> T:
        """Draw a value from `dist`, or from `proposal` with the importance weight w p(x) / mu(x).

        A proposal is *properly weighted* for a measure mu: it proposes x with a weight w such that, for every f,

            E[w f(x)] = sum_x mu(x) f(x).

        A Distribution q has w = 1 and mu = q, so the weight is p(x) / q(x). `q.where(predicate)` has mu = q on the
        values that satisfy the predicate. Without `proposal`, the target is the measure of `dist` itself: the weight
        is w, which is 1 for a Distribution.

        Values outside the support of mu are removed from the target: that support is part of the model.
        If there is nothing to draw, the particle dies.

        Raises
        ------
        TypeError
            If `dist` or `proposal` is neither a Distribution nor another Proposal.
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
        """Draw a span of text after `context`, token by token. Each token is a `sample` of this step.

        The distribution is the language model's, restricted by `constraint` and `complete`. Tokens are proposed from
        the allowed ones, with the exact weight. The span ends with the first token after which `until` holds and the
        constraint accepts the text, as far as these are given. That token is kept whole: with until="\\n", a token
        "\\n\\n" ends the line, and both are in the span. EOS ends the span as well, but does not finish the particle.
        There is no `end` as in ConstrainedText: the program itself draws or observes the text after a span.

        Parameters
        ----------
        context : Context
        until : str or callable, optional
            A string that the text of the span contains, or `until(text) -> bool` of that text.
        max_tokens : int, optional
            The span is cut off after this many tokens, with no weight; one with a constraint is complete by then.
        constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, interegular.FSM, or callable
            It applies to the text of the span alone. If it has `parse`, as types have, `parsed` is the object. EOS is
            allowed only where the constraint accepts the text. A callable must hold of the text so far after every
            token. It is checked after the draw and cannot plan the end. Create the constraint outside of the step.
        complete : bool, optional
            If True, the span must end after at most `max_tokens` tokens (EOS not counted), instead of being cut there.
            A token after which the constraint cannot accept in time is not proposed, as far as the constraint knows.
            A span that has not ended by then dies. Default: True for a bounded constraint that is not a function.
        rule : Rule, or another function from a distribution to one over the same tokens
            Turns the model's next-token distribution into the target's.

        Raises
        ------
        TypeError, ValueError
            For an argument of another type or out of range, if no argument ends the span, and if none can end in time.
        """
        check_time(self, "extend")
        return extend(self, context, Extent(context, until, max_tokens, constraint, complete), rule)

    def observe(self, dist: Proposal, value: Any) -> None:
        """Weigh by the probability of `value` under `dist`, as `sample(dist, proposal=Delta(value))` would."""
        check_time(self, "observe")
        check_distribution(dist, value)
        if self._chooser_ is not None and not self._chooser_.weighs:
            return
        log_p = dist.log_measure(value)
        if log_p == -math.inf:
            self._die_("observe", death_messages.impossible_observation(dist, value))
        else:
            self._weigh_("observe", log_p)

    def condition(self, holds: bool | np.bool_) -> None:
        """Require that `holds` is true; else the particle ends here with weight zero.

        `holds` is True or False, a numpy bool, 0 or 1. Anything else is a TypeError.
        """
        if not as_bool(holds):
            self._die_("condition", death_messages.CONDITION)

    def score(self, log_w: SupportsFloat) -> None:
        """Multiply the weight by exp(`log_w`). -inf ends the particle; NaN and +inf are a ValueError."""
        log_w = as_log_weight("score", log_w)
        if log_w == -math.inf:
            self._die_("score", death_messages.SCORE)
        else:
            self._weigh_("score", log_w)

    def twist(self, log_w: SupportsFloat) -> None:
        """Multiply by exp(`log_w`) the weight that decides which particles survive this step. The target is unchanged.

        The twist is added when the step ends. It is removed before the next step begins, when the particle finishes,
        and when `max_steps` cuts it. Several twists in a step add up. An infinite or NaN twist is a ValueError: for a
        dead end use `condition(False)`. Outside of a step, `twist` raises a RuntimeError.

        A finished particle has the twist 0. So a twist should estimate the log of the weight that is still to come. A
        twist that is larger by a constant starves finished particles. For example, with a twist of 600 for every
        unfinished particle, where half end at each step, the mean of Z-hat over 2,000 runs is 0.442 for Z = 1.
        """
        log_w = as_log_weight("twist", log_w)
        if not math.isfinite(log_w):
            raise ValueError(f"twist({log_w}): a twist is finite; what must not happen is condition(False)")
        check_time(self, "twist")
        self._log_twist_ += log_w

    def transformer(self, context: HasNextToken[Next_co]) -> Next_co:
        """Return the distribution of the next token after `context`. Particles share their forward passes."""
        if not hasattr(context, "next_token"):
            raise TypeError(f"transformer wants a Context, lm.context(text), not {context!r}")
        return context.next_token()

    def finish(self) -> None:
        """End the particle. Its weight does not include the twist."""
        self.finished = True
        if not self._stepping_:                         # else the end of the step removes the twist
            untwist(self)

    # ---- seams

    def copy(self) -> Self:
        """Return an independent copy. Inference makes one for each continuation of a particle.

        Attributes are deep-copied, except those that the class lists in `shared` and those that are immutable or
        shared by design. These are language models, contexts, tokens, vocabularies, distributions, functions, modules,
        networks of torch and their tokenizers, and read-only arrays. The random stream is replaced, not copied. A
        TypeError names an attribute that cannot be copied, or would be wrong in a copy; see `llmppl.models.copies`.
        `copy.copy` and `copy.deepcopy` make the same copy.
        """
        return self.__deepcopy__({})

    def __copy__(self) -> Self:
        if type(self).copy is Model.copy:
            return self.copy()
        new = object.__new__(type(self))                # an overridden copy() decides itself what to share
        vars(new).update({**vars(self), "_stepping_": False, "_chooser_": None})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new: Self = deep_copy(self, memo)
        new._stepping_ = False
        if isinstance(self._chooser_, Sampled):
            new._chooser_ = self._chooser_.__deepcopy__(memo)
        return new

    def _spawn_(self, chooser: Sampled) -> Self:
        """Return a copy whose choices `chooser` makes."""
        particle = self.copy()
        if particle is self:
            raise TypeError(f"{type(self).__name__}.copy() returned the model itself; it must return a new one")
        particle._chooser_, particle._stepping_ = chooser, False
        return particle

    def _own_chooser_(self) -> Sampled:
        """Create the chooser of a model that is stepped by hand. RuntimeError inside a run."""
        if running():                                   # a model that is part of another, say
            raise RuntimeError(
                f"this {type(self).__name__} is none of the particles that are run, and has no random stream: give "
                "it that of the particle, as in self.inner.rng = self.rng"
            )
        self._chooser_ = Sampled(np.random.default_rng(), by_hand=True)
        return self._chooser_

    def _draw_(
        self, verb: str, dist: Proposal, proposal: Proposal | None, explain: Callable[[], str] | None = None
    ) -> Any:
        """Draw as `sample` does, as a part of the statement `verb`. `explain` returns why there is nothing to draw."""
        check_time(self, verb)
        source = dist if proposal is None else proposal
        check_proposal(verb, dist, source)
        try:
            chooser = self._chooser_ or self._own_chooser_()
            value, log_w = chooser.draw(self, source)
        except Impossible as error:
            self._die_(verb, f"{verb}: {error.brief if explain is None else explain()}")
            return None
        if not chooser.weighs:
            return value
        if math.isnan(log_w) or log_w == math.inf:
            raise ValueError(f"{source!r} proposed {value!r} with the log weight {log_w}; it is finite, or -inf for 0")
        if log_w == -math.inf:
            self._die_(verb, death_messages.zero_weight(verb, source, value))
            return None
        if proposal is not None:
            log_p, log_mu = dist.log_measure(value), proposal.log_measure(value)
            if log_mu == -math.inf:
                raise ValueError(f"{proposal!r} proposed {value!r}, where its log_measure is -inf")
            if log_p == -math.inf:
                self._die_(verb, death_messages.outside_target(verb, dist, value))
                return value
            log_w += log_p - log_mu
        if proposal is not None or log_w != 0.0:
            self._weigh_(verb, log_w)
        return value

    def _weigh_(self, verb: str, log_w: float) -> None:
        """Multiply the weight by exp(`log_w`), and attribute it to the running statement."""
        if not math.isfinite(log_w):
            raise ValueError(f"{verb}({log_w}): a log weight is finite, or -inf for what must not happen")
        self._log_weight_ += log_w
        statement = self._in_words_(verb, "", call_site())
        attribution = self._attribution_
        self._attribution_ = {**attribution, statement: attribution.get(statement, 0.0) + log_w}

    def _die_(self, verb: str, reason: str) -> None:
        """Give the particle weight zero and leave its step."""
        if self._log_weight_ > -math.inf:               # else a bare `except:` caught the first death
            self._death_ = self._in_words_(verb, reason, call_site())
        self._log_weight_, self._log_twist_, self.finished = -math.inf, 0.0, True
        if self._stepping_:
            raise Dead

    def _in_words_(self, verb: str, reason: str, site: CallSite) -> str:
        """Return the text for the statement `verb` at `site`: of a death if there is a `reason`, else a label."""
        return f"{reason or verb} {describe_site(site)}"

    def __str__(self) -> str:
        if not isinstance(self.s, str):
            raise TypeError(f"{type(self).__name__}.s must be a str, not {self.s!r}: a token is added, self.s += token")
        return self.s

    def __repr__(self) -> str:
        state = "cut" if self.cut else "finished" if self.finished else "active"
        state = "dead" if self.log_weight == -math.inf else state
        return f"<{type(self).__name__} {str(self)!r} log_weight={self.log_weight:.4g} {state}>"


def untwist(particle: Model) -> None:
    """Remove the twist of the last step from the weight."""
    particle._log_weight_ -= particle._log_twist_
    particle._log_twist_ = 0.0


def wrap_step(cls: type[Model]) -> None:
    """Wrap the step of `cls`, whether it was written in the class, inherited from a mixin, or assigned."""
    if not hasattr(cls.step, "_wrapped"):
        check_step(cls.step, cls.__name__)
        setattr(cls, "step", _wrap_step(cls.step))          # noqa: B010


def _wrap_step(step: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """Return `step` with what belongs to every step: it removes and adds twists, and catches deaths."""

    @functools.wraps(step)
    def whole(self: Model) -> Any:
        if self._stepping_:                             # super().step() is part of the step that calls it
            result = step(self)
            check_step_result(result, type(self).__name__, whole=False)
            return result
        if self.finished:
            raise RuntimeError(f"step() of a particle that has finished: {self!r}")
        untwist(self)
        self._noted_ = Noted(self._noted_)
        if self._chooser_ is not None:
            self._chooser_.begin_step()
        self._stepping_ = True
        try:
            check_step_result(step(self), type(self).__name__, whole=True)
        except Dead:
            pass
        except ContextTooLong as error:
            if not running():                           # by hand, the caller gets the error
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
