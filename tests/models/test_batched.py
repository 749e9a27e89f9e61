"""Batched functions: the results equal those without batches, and the calls are counted."""

import math
import pickle
import sys

import numpy as np
import pytest
from helpers.fire import Interrupt, impatience, in_threads
from helpers.samplers import every_sampler
from helpers.tiny import add_up, log_prob_by_hand, log_probs_by_hand, spelled, texts_of, tiny_lm

from llmppl import (
    Bernoulli,
    ConstrainedText,
    Model,
    Uniform,
    batched,
    beam_search,
    enumerate_exact,
    importance_sampling,
    run_many,
    smc_steer,
)
from llmppl.models import Batched

A, END = 0, 5


def judge(most=None):
    """Return a critic that likes the letter b, and the list of its calls."""
    calls = []

    @batched(max_batch=most)
    def likes_b(texts):
        calls.append(list(texts))
        return [text.count("b") / 2 for text in texts]

    return likes_b, calls


class Judged(Model):
    """Program of up to two tokens after "a", guided by a critic and weighed by it at the end."""

    def __init__(self, critic, prompt="a"):
        super().__init__()
        self.critic, self.context, self.num = critic, tiny_lm().context(prompt), 0

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.s += token
        self.context += token
        self.num += 1
        if token.is_eos or self.num == 2:
            self.score(self.critic(self.s))
            self.finish()
        else:
            self.twist(self.critic(self.s))


def truth():
    pairs = []
    for ids in texts_of(6, 2):
        text = spelled(ids)
        pairs.append((text, log_prob_by_hand(tiny_lm(), [A], ids) + text.count("b") / 2))
    return add_up(pairs)


def test_a_batched_critic_gives_the_same_weights_as_a_plain_one():
    weights, exact = truth(), enumerate_exact(Judged(judge()[0]))
    Z = sum(weights.values())
    assert exact.log_ml == pytest.approx(math.log(Z), abs=1e-9)
    for text, weight in weights.items():
        share = exact.expect(lambda particle, text=text: str(particle) == text)
        assert share == pytest.approx(weight / Z, abs=1e-9)


@every_sampler
def test_a_round_is_one_call_and_no_text_is_repeated(run):
    critic, calls = judge()
    posterior = run(Judged(critic), seed=0)
    assert len(calls) == posterior.stats.calls <= 2     # for each of two steps
    texts = [text for call in calls for text in call]
    assert len(texts) == len(set(texts)) == posterior.stats.arguments > 2
    again = run(Judged(critic), seed=0)
    assert len(calls) == posterior.stats.calls and again.stats.calls == again.stats.arguments == 0


def test_runs_share_cached_answers_and_beams_batch_their_calls():
    critic, calls = judge()
    enumerate_exact(Judged(critic))
    assert len(calls) == 2 and sum(map(len, calls)) == len(truth())
    beam_search(Judged(critic), 5, 5)
    assert len(calls) == 2


def test_a_critic_joins_a_round_of_the_language_model():
    critic, calls = judge()

    class Mixed(Model):
        def step(self):
            kind = self.sample(Uniform(0, 5))
            log_p = critic("b" * kind) if kind % 2 else tiny_lm().context("a").next_token().log_prob(kind)
            self.score(log_p)
            self.finish()

    exact = enumerate_exact(Mixed())
    rows = np.exp(log_probs_by_hand(tiny_lm(), [A]))
    expected = sum(math.exp(kind / 2) if kind % 2 else rows[kind] for kind in range(6)) / 6
    assert exact.log_ml == pytest.approx(math.log(expected), abs=1e-9)
    assert calls == [["b", "bbb", "bbbbb"]]


class Fits(Model):
    """Program of two tokens after "a", each tested by `fits(text)`."""

    def __init__(self, fits):
        super().__init__()
        self.fits, self.context, self.num = fits, tiny_lm().context("a"), 0

    def step(self):
        p = self.transformer(self.context)
        token = self.sample(p, proposal=p.where(lambda token: self.fits(self.s + token)))
        self.s += token
        self.context += token
        self.num += 1
        if token.is_eos or self.num == 2:
            self.finish()


@pytest.mark.parametrize(
    "make", [Fits, lambda fits: ConstrainedText(tiny_lm(), "a", fits, max_tokens=2)], ids=["where", "constraint"]
)
def test_predicates_and_constraints_may_be_batched(make):
    def fits(text):
        return "bb" not in text and "c" not in text

    together = batched(lambda texts: [fits(text) for text in texts])
    assert enumerate_exact(make(together)).log_ml == enumerate_exact(make(fits)).log_ml < 0.0
    together = batched(lambda texts: [fits(text) for text in texts])
    one, other = smc_steer(make(together), 6, 3, seed=0), smc_steer(make(fits), 6, 3, seed=0)
    assert one.texts == other.texts and one.log_ml == other.log_ml and one.stats.calls < one.stats.arguments


# ---- what it is asked, and keeps


def test_outside_a_run_it_is_called_with_one_element():
    critic, calls = judge()
    assert critic("bb") == critic("bb") == 1.0 and calls == [["bb"]]


def test_more_than_max_batch_arguments_need_several_calls():
    critic, calls = judge(3)
    model = Judged(critic)
    exact = enumerate_exact(model)
    assert exact.log_ml == pytest.approx(math.log(sum(truth().values())), abs=1e-9)
    assert {len(call) for call in calls[:-1]} <= {3, 2} and max(map(len, calls)) == 3 and len(calls) > 5


def test_the_newest_answers_stay_cached(monkeypatch):
    monkeypatch.setattr(sys.modules[Batched.__module__], "_MAX_CACHED", 3)
    critic, calls = judge()
    for text in ("a", "b", "c", "d", "b", "a"):
        critic(text)
    assert calls == [["a"], ["b"], ["c"], ["d"], ["a"]]
    enumerate_exact(Judged(critic))                     # a round of more than are kept
    assert len(critic._answers) == 3


def test_any_hashable_argument_and_any_answer_except_None_work():
    @batched
    def about(pairs):
        return [{"sum": a + b, "list": [a]} for a, b in pairs]

    assert about((1, 2)) == {"sum": 3, "list": [1]}


@pytest.mark.parametrize("make", [np.array, lambda xs: np.array(xs, dtype=np.float32), tuple, iter])
def test_arrays_and_other_iterables_give_python_numbers(make):
    half = batched(lambda texts: make([len(text) / 2 for text in texts]))
    assert half("abc") == 1.5 and type(half("abc")) is float


def test_torch_tensors_give_numbers_and_array_rows_are_read_only():
    torch = pytest.importorskip("torch")
    weight = torch.ones(1, requires_grad=True)
    assert batched(lambda texts: weight * torch.tensor([len(text) for text in texts]))("ab") == 2.0
    row = batched(lambda texts: np.ones((len(texts), 3)))("a")
    assert row.shape == (3,)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 2.0


# ---- mistakes


def one_text(text):
    return len(text) / 2


async def coroutine(texts):
    return texts


MISTAKES = {
    "one text": (one_text, r"one_text returned 0.5 for a list of 1: a batched function takes a list"),
    "nothing": (lambda texts: None, "returned None for a list of 1: a batched function takes a list"),
    "a text": (lambda texts: "g", "returned 'g' for a list of 1"),
    "a dict": (lambda texts: dict.fromkeys(texts, 1.0), r"returned \{'a': 1.0\} for a list of 1"),
    "a scalar": (lambda texts: np.float64(1.0), r"returned np.float64\(1.0\) for a list of 1"),
    "a coroutine": (coroutine, r"coroutine returned <coroutine .* for a list of 1"),
    "too few": (lambda texts: [], r"returned \[\] for a list of 1"),
    "too many": (lambda texts: [1.0, 2.0], r"returned \[1.0, 2.0\] for a list of 1"),
    "NaN": (lambda texts: [math.nan], "answered nan for 'a'"),
    "NaN in a row": (lambda texts: np.full((1, 2), np.nan), r"answered array\(\[nan, nan\]\) for 'a'"),
    "None for one": (lambda texts: [None], "answered None for 'a'"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("function, message", MISTAKES.values(), ids=MISTAKES)
def test_an_invalid_answer_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        batched(function)("a")


class Critic:
    def score(self, texts):
        return [1.0 for _ in texts]

    def __call__(self, texts, *, truncate=True):
        return [2.0 for _ in texts]


@pytest.mark.parametrize(
    "function, message",
    [
        (Critic, "batched: function must be a function, as def sentiment"),
        ([1], r"batched: function must be a function, as def sentiment\(texts\): return \[...\] is, not \[1\]"),
        (lambda *, texts: texts, r"batched: function must take 1 argument, as def sentiment.* is wrong: too many"),
        (Critic.score, "Critic.score is wrong: missing a required argument: 'texts'"),
    ],
)
def test_a_function_that_takes_no_list_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        batched(function)


def test_methods_and_callable_objects_are_functions():
    assert batched(Critic().score)("a") == 1.0 and batched(Critic())("a") == 2.0
    assert str(batched(Critic().score)) == "Critic.score" and repr(judge(3)[0]) == "batched(likes_b, max_batch=3)"
    with pytest.raises(ValueError, match="max_batch must be at least 1, not 0"):
        batched(Critic(), max_batch=0)


def test_an_exception_shows_the_calling_line_and_the_batch_size():
    asked = []

    @batched
    def fails(texts):
        asked.extend(texts)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        importance_sampling(Judged(fails), 3, seed=0)
    texts = list(dict.fromkeys(asked))
    note = f"in fails, called with a list of {len(texts)}: {texts}"
    assert error.value.__notes__ == [note, "in particle 0 at step 1"]
    assert "critic(self.s)" in "".join(map(str, error.traceback))


# ---- many runs, threads, interrupts


def test_tasks_share_calls_and_one_that_fails_stops_no_other():
    calls = []

    @batched
    def picky(texts):
        calls.append(len(texts))
        if any(text.startswith("c") for text in texts):
            raise ValueError("no c")
        return [float(len(text)) for text in texts]

    class Told(Model):
        def __init__(self, task):
            super().__init__()
            self.task = task

        def step(self):
            self.s = self.task + "HT"[self.sample(Bernoulli(0.5))]
            self.score(picky(self.s))
            self.finish()

    results = run_many(lambda task, rng: smc_steer(Told(task), 2, rng=rng), [*"abcd"], seed=0)
    found = {each.task: each for each in results}
    assert {task: each.error is None for task, each in found.items()} == {"a": True, "b": True, "c": False, "d": True}
    assert "in picky, called with a list of 2: ['cH', 'cT']" in found["c"].error
    assert calls[0] == 8 and sum(calls) <= 8 * 4        # halves of it again, down to the one that fails
    assert found["a"].particles.log_ml == pytest.approx(2.0)


def test_threads_call_the_function_in_turn_and_count_their_own_calls():
    inside, worst, asked = [], [], []

    @batched
    def busy(numbers):
        inside.append(0)
        worst.append(len(inside))
        answers = [number * 2 for number in numbers]
        asked.extend(numbers)
        inside.pop()
        return answers

    def work():
        before = busy.done().arguments                  # of a thread that has ended, if this one has its identifier
        found = [busy(number) for number in range(300)]
        return found, busy.done().arguments - before

    with impatience():
        results = in_threads([work] * 4)
    assert all(found == list(range(0, 600, 2)) for found, _ in results)
    assert max(worst) == 1 and sorted(asked) == list(range(300))
    assert busy.done().arguments == 0 and sum(own for _, own in results) == 300


def test_after_an_interrupt_at_any_line_its_answers_are_right():
    files = {sys.modules[Batched.__module__].__file__}
    texts = ["a", "b", "bb"]

    def ask(critic):
        return [critic(text) for text in [*texts, *texts]]

    critic, _ = judge()
    with Interrupt(files) as watch:
        ask(critic)
    assert len(watch.seen) > 20
    for place, times in watch.seen.items():
        for nth in {1, times}:
            critic, _ = judge()
            with Interrupt(files, place, nth) as interrupted:
                with pytest.raises(KeyboardInterrupt):
                    ask(critic)
            assert interrupted.left == 0
            with impatience():
                assert in_threads([lambda critic=critic: ask(critic)] * 2) == [[0.0, 0.5, 1.0] * 2] * 2


# ---- leaving the process


@batched
def shout(texts):
    return [len(text) for text in texts]


def test_a_pickle_refers_to_its_name_or_contains_the_function(monkeypatch):
    assert pickle.loads(pickle.dumps(shout)) is shout
    shout("abc")
    critic = pickle.loads(pickle.dumps(batched(Critic().score, max_batch=7)))
    assert critic("a") == 1.0 and critic.max_batch == 7 and isinstance(critic, Batched)
    monkeypatch.setattr(shout, "__module__", "__main__")
    assert shout.__reduce__() == (Batched, (shout.function, None))
