"""What a signal handler raises reaches the caller as itself, also where exceptions of other code are caught."""

import functools
import signal
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.tiny import tiny_model, tiny_tokenizer, tiny_vocab

from llmppl import CachedTransformer, run_many
from llmppl.distributions import Uniform
from llmppl.lm.engines import gguf
from llmppl.models.alike import same_support
from llmppl.support.locks import let_through

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there are no such signals here")


class TimeLimit(ValueError):
    """Of a type that those who compare and read files do catch."""


class Handler:
    def __call__(self, number, frame):
        raise TimeLimit

    def method(self, number, frame):
        raise TimeLimit


def function(number, frame):
    raise TimeLimit


@contextmanager
def handled(handler=function):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def alarm(*_, **__):
    signal.raise_signal(signal.SIGUSR1)


class Slow:
    """Comparing it takes as long as the time limit."""

    __hash__ = None

    def __eq__(self, other):
        alarm()
        return True

    __ne__ = __eq__


class Fails:
    def __eq__(self, other):
        raise KeyError("no such key")


@pytest.mark.parametrize("handler", [function, Handler(), Handler().method])
def test_only_exceptions_of_a_signal_handler_are_let_through(handler):
    with handled(handler):
        with pytest.raises(TimeLimit):
            try:
                alarm()
            except ValueError as error:
                let_through(error)
        try:
            raise TimeLimit
        except ValueError as error:
            let_through(error)


def test_comparing_values_hides_no_time_limit_and_no_failure():
    with handled():
        for before, now in ([Slow()], [Slow()]), ([[Slow()]], [[Slow()]]):
            with pytest.raises(TimeLimit):
                same_support(before, now)
        with pytest.raises(TimeLimit):
            Uniform([Slow(), Slow()])
    with pytest.raises(KeyError, match="no such key"):
        same_support([Fails()], [Fails()])
    arrays = [np.zeros(2)], [np.zeros(2)]
    assert same_support(*arrays)                               # it cannot be told
    assert not same_support([1], [2])


@pytest.mark.parametrize("at", range(1, 40, 4))
def test_a_time_limit_during_the_self_check_propagates(at):
    model, calls = tiny_model(), []

    def hook(*_):
        calls.append(1)
        if len(calls) == at:
            alarm()

    handle = model.model.layers[0].register_forward_pre_hook(hook)
    try:
        with handled():
            if at <= 1:
                with pytest.raises(TimeLimit):
                    CachedTransformer(model, tiny_vocab())
            else:
                try:
                    CachedTransformer(model, tiny_vocab())
                except TimeLimit:
                    assert len(calls) == at
                else:
                    assert len(calls) < at
    finally:
        handle.remove()


def test_a_time_limit_in_a_template_or_task_propagates(monkeypatch):
    lm = CachedTransformer(tiny_model(7, 0, eos=5), tiny_tokenizer(6))
    monkeypatch.setattr(lm.tokenizer, "chat_template", "{{ messages }}")
    monkeypatch.setattr(type(lm.tokenizer), "apply_chat_template", alarm)
    with handled():
        with pytest.raises(TimeLimit):
            lm.chat("Hi")
        with pytest.raises(TimeLimit):
            list(run_many(lambda task, rng: alarm(), [1, 2], seed=0))
        with pytest.raises(TimeLimit):
            try:
                alarm()
            except TimeLimit as error:
                gguf._why(error)


def test_a_partial_as_a_handler_works_as_any_other():
    with handled(functools.partial(function)), pytest.raises(TimeLimit):
        alarm()
