"""Model: a probabilistic program that runs one step at a time.

A step draws values and adds weight. As a Feynman-Kac model, the draws of step t are its kernel M_t and the weights its
potential G_t. The target after t steps is  prod_s M_s G_s  up to the constant Z_t. `log_weight` is the log of the
product of the potentials, corrected for every proposal. So one program is a sampler, a density and a search space.
Source: Lew et al. 2023, Sec. 2 and 3.

A name that ends with one underscore, as `_log_weight_`, belongs to inference. A verb has an effect that depends on its
time:

| verb | in a step | before the first step, and between two | after `finish()` |
|---|---|---|---|
| `sample`, `extend` | choose | by hand; a particle of a run chooses in its steps alone | refused |
| `observe` | weighs | weighs | refused |
| `condition`, `score` | weigh | weigh | weigh |
| `twist` | guides the selection after the step | refused | in a step nothing, else refused |
| `finish` | ends the particle after the step | ends the particle and removes its twist | nothing |

If a bare `except:` catches a death, the step continues. The next verb that chooses leaves the step again.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, SupportsFloat, TypeVar

import numpy as np

from llmppl.constraints.vocabulary import Text
from llmppl.distributions import NO_RULE, DecisionRule, Finite, Impossible, Proposal
from llmppl.models.choices import (
    NOTHING,
    CallSite,
    Noted,
    ParticleStream,
    Sampled,
    Steps,
    call_site,
    describe_site,
    drawn_text,
    log_joints,
)
from llmppl.models.spans import Extent, Span, Until, extend
from llmppl.support.arguments import shown
from llmppl.support.options import Guess
from llmppl.support.runtime import ContextTooLong, running
from llmppl.support.shared import Shared

if TYPE_CHECKING:
    from llmppl.lm import Context, NextToken

T = TypeVar("T")


class Dead(BaseException):
    """Exception that leaves the step of a particle that died. No `except Exception` of a program catches it."""


def _read_only(name: str) -> Any:
    """Return a property of Model that inference sets as `_name_`."""
    return property(operator.attrgetter(f"_{name}_"))


# ---- checks of what a program passes to its verbs


def _check_result(result: Any, program: str) -> None:
    """Raise a TypeError if a step returned anything but None, as a coroutine or a generator does."""
    if result is not None:
        getattr(result, "close", int)()  # else Python also warns of a coroutine
        raise TypeError(
            f"{program}.step returned {shown(result)}; steps are plain functions here that return nothing: drop async, "
            "await and yield, since self.sample(...) returns the value itself; add text to self.s, keep other values "
            "in attributes of self, and end the program by self.finish()"
        )


def _check_time(model: Model, verb: str) -> None:
    """Raise a RuntimeError if `verb` has no meaning now; see the table of this module."""
    if model._stepping_:
        if not model.finished or verb == "twist":
            return
        if model._log_weight_ == -math.inf:
            raise Dead
    elif verb == "twist":
        raise RuntimeError(
            "twist() outside of a step: it guides the selection after a step; call it in step()"
        )
    if model.finished:
        raise RuntimeError(
            f"{verb}() after the particle has finished: return from step() after finish()"
        )
    if (
        not model._stepping_
        and verb in ("sample", "extend")
        and not getattr(model._chooser_, "by_hand", True)
    ):
        raise RuntimeError(
            f"{verb}() outside of a step: a particle of a run chooses in step() alone"
        )


def _as_bool(holds: Any) -> bool:
    """Return the argument of `condition` as a bool. TypeError unless it is True, False, 0 or 1."""
    if isinstance(holds, (int, np.bool_, np.integer)) and holds in (0, 1):
        return bool(holds)
    raise TypeError(
        f"condition wants True or False, not {shown(holds)}: compare, as in condition(n > 0) or "
        "condition(match is not None)"
    )


def _as_log_weight(verb: str, log_w: Any) -> float:
    """Return the log weight given to `verb` as a float. TypeError unless it is a number."""
    if not isinstance(log_w, (bool, np.bool_, str, bytes)):
        try:
            return float(log_w)
        except (TypeError, OverflowError, ValueError):
            pass
    raise TypeError(f"{verb} wants a log weight, one number, not {shown(log_w)}")


def _check_proposal(verb: str, value: Any) -> None:
    """Raise a TypeError if an argument of `verb` is no distribution."""
    if not isinstance(value, Proposal):
        raise TypeError(
            f"{verb} wants a Distribution or another Proposal, not {shown(value)}: give self.transformer(context) for "
            "a context, and Categorical({'a': 0.5, 'b': 0.5}) for a dict of probabilities"
        )


# ---- copies

_OWN = frozenset(("_chooser_", "_noted_", "_stepping_", "_attribution_", "_origin_"))
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    types.FunctionType,
    *weakref.ProxyTypes,
)


@functools.cache
def _is_own_copy(cls: type) -> bool:
    """Return True if instances of `cls` are immutable, so that a copy shares them."""
    return (
        cls in _ATOMS
        or issubclass(cls, type)
        or getattr(cls, "__deepcopy__", None) is Shared.__deepcopy__
    )


@functools.cache
def _kept_names(cls: type) -> frozenset[str]:
    """Return the attributes that a copy shares: those that `cls` and its bases list in `shared`, and inference's."""
    return _OWN.union(*(vars(base).get("shared", ()) for base in cls.__mro__))


# ---- the model


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
    log_joint : float
        Log of the joint probability: that of every choice under its distribution, plus what `observe` and `score` add.
        Twists, proposals, selections and `power` have no part in it. It is computed by a replay of the choices.
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
        may grow), beside those of base classes.

    To step a model by hand, call `model.step()`: it runs one step and returns normally after a zero weight.

    Examples
    --------
    >>> class Vowels(Model):
    ...     def __init__(self, lm):
    ...         super().__init__()
    ...         self.context = lm.context("Once")
    ...     def step(self):
    ...         token = self.sample(self.transformer(self.context))
    ...         self.condition(str(token)[-1:] in "aeiou")
    ...         self.s += token
    ...         self.context += token
    >>> smc_steer(Vowels(lm), N=3, K=2, seed=0, max_steps=3).best.s
    ' there were two'
    """

    s: str = Text()
    finished: bool = False
    shared: tuple[str, ...] = ()
    log_weight: float = _read_only("log_weight")
    log_twist: float = _read_only("log_twist")
    cut: bool = _read_only("cut")
    attribution: dict[str, float] = _read_only("attribution")
    death: str | None = _read_only("death")
    chooser: Sampled | None = _read_only("chooser")
    _log_weight_: float = 0.0
    _log_twist_: float = 0.0
    _origin_: Any = None  # the program of the run
    _power_: float = 1.0  # of the joint probability in the target
    _cut_: bool = False
    _limit_: str = ""  # the error of the context that was too long for the model
    _attribution_: dict[str, float] = {}  # noqa: RUF012
    _death_: str | None = None
    _chooser_: Sampled | None = None
    _noted_: Noted = NOTHING
    _before_: str = ""  # the text before the last step
    _stepping_: bool = False
    if not TYPE_CHECKING:  # subclasses may have such an attribute, of any type
        text = Guess("no text: it is s, or str(particle)")
    _late_: Any = (
        200,
        "call self.finish(), or bound the run by max_steps=",
    )  # steps without an end, advice

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if isinstance(vars(Model).get(name), property):
                raise TypeError(
                    f"{cls.__name__}.{name}: this name is inference's; my_{name}, say, is free"
                )
        if isinstance(cls.shared, str):
            raise TypeError(
                f'{cls.__name__}.shared is a text: list the names, as in shared = ("{cls.shared}",)'
            )
        wrap_step(cls)

    def step(self) -> None:
        """Draw and weigh once. Users write this method."""
        raise NotImplementedError(
            f"{type(self).__name__} has no step(): write `def step(self)` in the class"
        )

    @property
    def rng(self) -> np.random.Generator:
        chooser = self._chooser_
        return ParticleStream(self) if chooser is None or self._stepping_ else chooser.rng

    @rng.setter
    def rng(self, rng: np.random.Generator) -> None:
        if self._stepping_:
            raise RuntimeError(
                f"{type(self).__name__}.rng was assigned in its step, which draws from its own"
            )
        if not isinstance(rng, ParticleStream) or rng.particle is not self:
            self._chooser_ = Sampled(rng, by_hand=True)

    @property
    def choices(self) -> Steps:
        return self._noted_.steps()

    @property
    def log_joint(self) -> float:
        return log_joints([self])[0]

    # ---- verbs

    def sample(self, dist: Proposal[T], proposal: Proposal[T] | None = None) -> T:
        """Draw a value from `dist`, or from `proposal` with the importance weight w p(x) / mu(x).

        A proposal is *properly weighted* for a measure mu: it proposes x with a weight w such that, for every f,

            E[w f(x)] = sum_x mu(x) f(x).

        A Distribution q has w = 1 and mu = q, so the weight is p(x) / q(x). `q.where(predicate)` has mu = q on the
        values that satisfy the predicate. Without `proposal`, the target is the measure of `dist` itself.

        Values outside the support of mu are removed from the target: that support is part of the model.
        If there is nothing to draw, the particle dies. A weight w that is NaN or infinite is a ValueError.
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
        There is no `end` as in ConstrainedText: the program itself draws or observes the text after a span. If no
        argument ends the span, or none can in time, that is a ValueError.

        Parameters
        ----------
        context : Context
        until : str or callable, optional
            A string that the text of the span contains, or `until(text) -> bool` of that text.
        max_tokens : int, optional
            The span is cut off after this many tokens, with no weight.
        constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, or callable
            It applies to the text of the span alone. If it has `parse`, as types have, `parsed` is the object. EOS is
            allowed only where the constraint accepts the text. A callable must hold of the text so far after every
            token. It is checked after the draw and cannot plan the end. Create the constraint outside of the step.
        complete : bool, optional
            If True, a span that has not ended after `max_tokens` tokens (EOS not counted) dies, and masks leave room
            for its end; else it is cut there. Default: True for a bounded constraint that is not a function.
        rule : Rule, or another function from a distribution to one over the same tokens
            Turns the model's next-token distribution into the target's.
        """
        _check_time(self, "extend")
        return extend(self, context, Extent(context, until, max_tokens, constraint, complete), rule)

    def observe(self, dist: Proposal, value: Any) -> None:
        """Weigh by the probability of `value` under `dist`, as `sample(dist, proposal=Delta(value))` would."""
        _check_time(self, "observe")
        _check_proposal("observe", dist)
        if self._chooser_ is not None and not self._chooser_.weighs:
            return
        log_p = dist.log_measure(value)
        if log_p == -math.inf:
            self._die_("observe", f"observe: {dist!r} gives {shown(value)} probability 0")
        else:
            self._weigh_("observe", self._power_ * log_p)

    def condition(self, holds: bool | np.bool_) -> None:
        """Require that `holds`, a bool, 0 or 1, is true; else the particle ends here with weight zero."""
        if not _as_bool(holds):
            self._die_("condition", "condition is false")

    def score(self, log_w: SupportsFloat) -> None:
        """Multiply the weight by exp(`log_w`). -inf ends the particle; NaN and +inf are a ValueError."""
        log_w = _as_log_weight("score", log_w)
        if log_w == -math.inf:
            self._die_("score", "score(-inf)")
        else:
            self._weigh_("score", self._power_ * log_w)

    def twist(self, log_w: SupportsFloat) -> None:
        """Multiply by exp(`log_w`) the weight that decides which particles survive this step. The target is unchanged.

        The twist is added when the step ends. It is removed before the next step begins, when the particle finishes,
        and when `max_steps` cuts it. Several twists in a step add up. An infinite or NaN twist is a ValueError: for a
        dead end use `condition(False)`.

        A twist should estimate the log of the weight that is still to come, since that of a finished particle is 0. A
        twist that is larger by a constant starves finished particles.
        """
        log_w = _as_log_weight("twist", log_w)
        if not math.isfinite(log_w):
            raise ValueError(
                f"twist({log_w}): a twist is finite; for a dead end use condition(False)"
            )
        _check_time(self, "twist")
        self._log_twist_ += log_w

    def transformer(self, context: Context) -> NextToken:
        """Return the distribution of the next token after `context`. Particles share their forward passes."""
        if not hasattr(context, "next_token"):
            raise TypeError(f"transformer wants a Context, lm.context(text), not {context!r}")
        return context.next_token()

    def finish(self) -> None:
        """End the particle. Its weight does not include the twist."""
        self.finished = True
        if not self._stepping_:  # else the end of the step removes the twist
            untwist(self)

    # ---- seams

    def copy(self) -> Self:
        """Return an independent copy, as `copy.copy` and `copy.deepcopy` do, for a continuation of a particle.

        Attributes are deep-copied, except those that the class lists in `shared` and those that are immutable: language
        models, contexts, tokens, vocabularies, distributions and functions. The random stream is replaced, not copied.
        """
        return self.__deepcopy__({})

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        cls: Any = type(self)
        new: Self = object.__new__(cls)
        memo[id(self)] = new
        kept = _kept_names(cls)
        attributes = vars(new)
        for name, value in vars(self).items():
            kind: Any = type(value)
            if name in kept or _is_own_copy(kind):
                attributes[name] = value
            elif kind in (list, set) and all(map(_is_own_copy, map(type, value))):
                attributes[name] = memo.setdefault(id(value), value.copy())
            else:
                try:
                    attributes[name] = copy.deepcopy(value, memo)
                except (TypeError, ValueError) as error:  # of a generator, a file, a memoryview
                    raise TypeError(
                        f"{cls.__name__}.{name} cannot be copied with its particle ({error}): keep its data, such as a "
                        "list and a position, or a file name, and make it from them where it is used"
                    ) from error
        chooser = self._chooser_
        new._stepping_ = False
        new._chooser_ = (
            chooser.__deepcopy__(memo) if chooser is not None and chooser.by_hand else None
        )
        return new

    def _spawn_(self, chooser: Sampled) -> Self:
        """Return a copy whose choices `chooser` makes."""
        particle = self.copy()
        particle._chooser_ = chooser
        return particle

    def _own_chooser_(self) -> Sampled:
        """Create the chooser of a model that is stepped by hand. RuntimeError inside a run."""
        if running():  # a model that is part of another, say
            raise RuntimeError(
                f"this {type(self).__name__} is none of the particles that are run, and has no random stream: give "
                "it that of the particle, as in self.inner.rng = self.rng"
            )
        self._chooser_ = Sampled(np.random.default_rng(), by_hand=True)
        return self._chooser_

    def _draw_(
        self,
        verb: str,
        dist: Proposal,
        proposal: Proposal | None,
        explain: Callable[[], str] | None = None,
    ) -> Any:
        """Draw as `sample` does, as a part of the statement `verb`. `explain` returns why there is nothing to draw."""
        _check_time(self, verb)
        _check_proposal(verb, dist)
        if proposal is not None:
            _check_proposal(verb, proposal)
        source = dist if proposal is None else proposal
        power = self._power_
        if power != 1.0 and isinstance(source, Finite):
            source = source.tempered(1 / power)
        try:
            chooser = self._chooser_ or self._own_chooser_()
            value, log_w = chooser.draw(self, source)
        except Impossible as error:
            self._die_(verb, f"{verb}: {error}" if explain is None else explain())
            return None
        if not chooser.weighs:
            return value
        if math.isnan(log_w) or log_w == math.inf:
            raise ValueError(
                f"{source!r} proposed {value!r} with the log weight {log_w}; it is finite, or -inf for 0"
            )
        if log_w == -math.inf:
            self._die_(verb, f"{verb}: {source!r} proposed {shown(value)} with weight 0")
            return None
        if source is not dist or power != 1.0:
            log_p = dist.log_measure(value)
            log_mu = source.log_measure(value)
            if log_mu == -math.inf:
                raise ValueError(f"{source!r} proposed {value!r}, where its log_measure is -inf")
            if log_p == -math.inf:
                self._die_(
                    verb,
                    f"{verb}: {dist!r} gives {shown(value)}, which the proposal drew, probability 0",
                )
                return value
            log_w += power * log_p - log_mu
        if proposal is not None or log_w != 0.0:
            self._weigh_(verb, log_w)
        return value

    def _weigh_(self, verb: str, log_w: float) -> None:
        """Multiply the weight by exp(`log_w`), and attribute it to the running statement."""
        if not math.isfinite(log_w):
            raise ValueError(
                f"{verb}({log_w}): a log weight is finite, or -inf for an impossible event"
            )
        self._log_weight_ += log_w
        statement = self._in_words_(verb, "", call_site())
        attribution = self._attribution_
        self._attribution_ = {**attribution, statement: attribution.get(statement, 0.0) + log_w}

    def _die_(self, verb: str, reason: str) -> None:
        """Give the particle weight zero and leave its step."""
        if self._log_weight_ > -math.inf:  # else a bare `except:` caught the first death
            self._death_ = self._in_words_(verb, reason, call_site())
        self._log_weight_ = -math.inf
        self._log_twist_ = 0.0
        self.finished = True
        if self._stepping_:
            raise Dead

    def _in_words_(self, verb: str, reason: str, site: CallSite) -> str:
        """Return the text for the statement `verb` at `site`: of a death if there is a `reason`, else a label."""
        return f"{reason or verb} {describe_site(site)}"

    _drawn_text_ = property(drawn_text)

    def __str__(self) -> str:
        if not isinstance(self.s, str):
            raise TypeError(
                f"{type(self).__name__}.s must be a str, not {self.s!r}: a token is added, self.s += token"
            )
        return self.s

    def __repr__(self) -> str:
        state = "active"
        if self.finished:
            state = "cut" if self.cut else "finished"
        if self.log_weight == -math.inf:
            state = "dead"
        return f"<{type(self).__name__} {str(self)!r} log_weight={self.log_weight:.4g} {state}>"


def untwist(particle: Model) -> None:
    """Remove the twist of the last step from the weight."""
    particle._log_weight_ -= particle._log_twist_
    particle._log_twist_ = 0.0


def wrap_step(cls: type[Model]) -> None:
    """Add to the step of `cls` what belongs to every step: it removes and adds twists, and catches deaths.

    The step may be written in the class, inherited from a mixin, or assigned.
    """
    step = cls.step
    if hasattr(step, "_wrapped"):
        return

    @functools.wraps(step)
    def whole(self: Model) -> None:
        if self._stepping_:  # super().step() is part of the step that calls it
            return _check_result(step(self), type(self).__name__)
        if self.finished:
            raise RuntimeError(f"step() of a particle that has finished: {self!r}")
        untwist(self)
        self._noted_ = Noted(self._noted_)
        self._before_ = self.s
        self._stepping_ = True
        try:
            _check_result(step(self), type(self).__name__)
        except Dead:
            pass
        except ContextTooLong as error:
            if not running():  # by hand, the caller gets the error
                raise
            self._limit_ = str(error)
            self.finished = True
            self._cut_ = True
        finally:
            self._stepping_ = False
        if self.finished:
            self._log_twist_ = 0.0
        else:
            self._log_weight_ += self._log_twist_

    setattr(whole, "_wrapped", True)  # noqa: B010
    setattr(cls, "step", whole)  # noqa: B010
