"""Tests of checkpoints: an interrupted run that is called again ends as if uninterrupted, or names a difference."""

import contextlib
import enum
import errno
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.common import FULL, ROOT
from helpers.exactness import check
from helpers.fire import Interrupt
from helpers.programs import PROGRAMS, what_the_program_made
from helpers.tiny import cold_lm

from llmppl import (
    EOS,
    SMC,
    Bernoulli,
    CachedTransformer,
    Categorical,
    ConstrainedText,
    Model,
    Regex,
    Uniform,
    Vocabulary,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints import Text
from llmppl.inference import Distinct, DownSample
from llmppl.inference.resampling import multinomial
from llmppl.inference.resuming import checkpoint
from llmppl.inference.resuming.codec import ValueCodec
from llmppl.report import Recorder, load

ALGORITHMS = {
    "distinct": lambda model, **how: smc_steer(model, 5, 3, max_steps=9, **how),
    "merged": lambda model, **how: smc_steer(model, 5, 3, expand="merged", max_steps=9, **how),
    "copies": lambda model, **how: smc_steer(model, 5, 3, expand="copies", max_steps=9, **how),
    "standard": lambda model, **how: smc_standard(model, 8, resample=multinomial, max_steps=9, **how),
    "importance": lambda model, **how: importance_sampling(model, 8, max_steps=9, **how),
}


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """Skip fsync: tests kill the process, not the machine."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def told(particles):
    """Return all results of a run except its cost."""
    each = [(what_the_program_made(p), p.choices, p.log_weight, p.log_twist, p.finished, p.cut) for p in particles]
    steps = [{name: np.asarray(value).tolist() for name, value in vars(step).items()} for step in particles.steps]
    total = particles.log_ml, particles.log_ml_se, particles.log_ml_se_reason, particles.deaths
    return each, total, steps


def interrupt(at):
    """Return an `on_step` that raises KeyboardInterrupt at step `at`."""

    def on_step(step):
        if step.index == at:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_run_interrupted_at_any_step_ends_the_same(program, run, tmp_path):
    model = program()
    whole = run(model, seed=3)
    for every in (1, 3, None):
        path = tmp_path / f"{every}.ckpt"
        for at in range(1, len(whole.steps) + 1):
            with pytest.raises(KeyboardInterrupt):
                run(model, seed=3, checkpoint=path, every=every, on_step=interrupt(at))
            assert json.loads(path.read_bytes().splitlines()[-2])["t"] == at - 1
        assert told(run(model, seed=3, checkpoint=path, every=every)) == told(whole)
        assert told(run(model, seed=3, checkpoint=path)) == told(whole)


class Dies(Model):
    """Program in which some particles die in each step."""

    def step(self):
        value = self.sample(Uniform(0, 4))
        self.condition(value > 0)
        self.s += str(value)
        if len(self.s) == 6:
            self.finish()


def constrained(lm, **options):
    return ConstrainedText(lm, "a", Regex("(a|bc|d)*"), end="eos", complete=False, max_tokens=10, **options)


def test_a_resumed_run_computes_only_the_contexts_of_its_particles(tmp_path):
    def run(**how):
        return smc_steer(constrained(cold_lm()), 6, 3, seed=1, **how)

    whole = run()
    for stop in range(len(whole.steps)):
        path = tmp_path / f"{stop}.ckpt"
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path, on_step=interrupt(stop + 1))
        rest = run(checkpoint=path)
        assert [p.choices for p in rest] == [p.choices for p in whole]
        # Keys and values that are computed together come out with other last digits than one by one.
        np.testing.assert_allclose([rest.log_ml, rest.log_ml_se], [whole.log_ml, whole.log_ml_se], rtol=1e-12)
        np.testing.assert_allclose(rest.log_weights, whole.log_weights, rtol=1e-12)
        assert rest.stats.rounds == whole.stats.rounds - stop and rest.stats.tokens <= whole.stats.tokens
        ended = run(checkpoint=path)
        assert told(ended)[1:] == told(rest)[1:] and [str(p) for p in ended] == [str(p) for p in rest]
        assert ended.log_weights.tobytes() == rest.log_weights.tobytes()
        assert ended.stats.rows == ended.stats.tokens == 0


def test_the_file_keeps_the_random_stream_and_a_given_rng_continues(tmp_path):
    run, path = ALGORITHMS["distinct"], tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        run(PROGRAMS["Streams"](), checkpoint=path, on_step=interrupt(3))
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(path.read_bytes())
    assert told(run(PROGRAMS["Streams"](), checkpoint=path)) == told(run(PROGRAMS["Streams"](), checkpoint=copy))

    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM):
        path, rng, other = tmp_path / f"{kind.__name__}.ckpt", *(np.random.Generator(kind(7)) for _ in range(2))
        rng.random(3), other.random(3)
        whole = run(PROGRAMS["Streams"](), rng=rng)
        with pytest.raises(KeyboardInterrupt):
            run(PROGRAMS["Streams"](), rng=other, checkpoint=path, on_step=interrupt(4))
        other = np.random.Generator(kind(7))
        other.random(3)
        assert repr(told(run(PROGRAMS["Streams"](), rng=other, checkpoint=path))) == repr(told(whole))
        assert [other.random(), other.spawn(1)[0].random()] == [rng.random(), rng.spawn(1)[0].random()]


def test_the_recording_of_a_resumed_run_is_complete(tmp_path):
    path, recording = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    run = ALGORITHMS["copies"]
    with Recorder(tmp_path / "whole.jsonl") as recorder:
        assert len(run(PROGRAMS["Coins"](), seed=1, on_step=recorder).steps) == 9

    class Stops(Recorder):
        stop = 0

        def __call__(self, step):
            super().__call__(step)
            if step.index == self.stop:
                raise KeyboardInterrupt

    for stop in (2, 3, 6, 0):
        with contextlib.suppress(KeyboardInterrupt), Stops(recording) as recorder:
            recorder.stop = stop
            run(PROGRAMS["Coins"](), seed=1, on_step=recorder, checkpoint=path, every=2)
        end = "KeyboardInterrupt ended the run." if stop else "All particles finished, after 9 steps."
        assert load(recording).status().endswith(end)
    assert recording.read_text() == (tmp_path / "whole.jsonl").read_text()


class Hops(Model):
    """Program of one or two tokens a step, with rare ends. Particles reach the model's limit at different steps."""

    def __init__(self, lm):
        super().__init__()
        self.context = lm.context("a")

    def step(self):
        for _ in range(1 + self.sample(Bernoulli(0.5))):
            token = self.sample(self.transformer(self.context))
            if token == EOS:
                return self.finish()
            self.context += token
            self.s += token


@pytest.mark.filterwarnings("ignore:step .* reached the end of what the model reads")
@pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)
def test_particles_cut_at_the_length_of_the_model_stay_cut(run, tmp_path):
    lm = CachedTransformer(lambda ids: [1.0, 0.5, 0.0, -2.0], Vocabulary([b"a", b"b", b"c", b""], [3]))
    lm.engine.max_length = 7
    whole = run(Hops(lm), seed=2)
    assert len({len(p.choices) for p in whole if p._limit_}) > 1
    for at in range(2, len(whole.steps) + 1):
        with pytest.raises(KeyboardInterrupt):
            run(Hops(lm), seed=2, checkpoint=tmp_path / "run.ckpt", on_step=interrupt(at))
    for _ in range(2):
        assert told(run(Hops(lm), seed=2, checkpoint=tmp_path / "run.ckpt")) == told(whole)


def test_a_resumed_run_keeps_its_deaths(tmp_path):
    class Dies(Model):
        def step(self):
            self.s += "ab"[self.sample(Bernoulli(0.5))]
            self.condition(len(self.s) < 3)

    dead = [smc_steer(Dies(), 4, 3, seed=1, checkpoint=tmp_path / "run.ckpt") for _ in range(2)]
    assert len(dead[0]) == 0 and [death.step for death in dead[0].deaths] == [3] and told(dead[0]) == told(dead[1])


def test_each_step_is_serialised_only_once(tmp_path, monkeypatch):
    written, path = [], tmp_path / "run.ckpt"
    for name in ("encode_record", "_encode_particle"):
        old = getattr(checkpoint, name)
        monkeypatch.setattr(checkpoint, name, lambda *part, old=old, name=name: written.append(name) or old(*part))
    items = ValueCodec.encode_item
    monkeypatch.setattr(ValueCodec, "encode_item", lambda plain, item: written.append("item") or items(plain, item))
    model = ConstrainedText(table(0.3), "a", max_tokens=40, min_tokens=40)
    particles = smc_steer(model, 5, 3, seed=0, checkpoint=path, every=1)
    assert written.count("encode_record") == len(particles.steps) == 40
    assert written.count("_encode_particle") <= 41 * 5
    assert 40 <= written.count("item") <= 40 * 5        # of all that were ever kept, once
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == 1 + 41 + 2 and sum(len(line.get("choices", ())) for line in lines) == written.count("item")
    again = smc_steer(model, 5, 3, seed=0, checkpoint=tmp_path / "once.ckpt", every=1000)
    assert told(again) == told(particles)
    once = [json.loads(line) for line in (tmp_path / "once.ckpt").read_bytes().splitlines()]
    assert sum(len(line.get("choices", ())) for line in once) < 40 * 5      # what they have in common is there once


# ---- interrupted anywhere


NAMES = "inference/smc.py", "inference/expansion.py", "inference/resuming/checkpoint.py", "support/files.py"
FILES = {str(ROOT / "llmppl" / name) for name in NAMES}


def test_an_interrupt_at_any_line_of_the_loop_loses_nothing(tmp_path):
    def run(**how):
        return ALGORITHMS["distinct"](PROGRAMS["Coins"](), seed=1, **how)

    whole = run()
    with Interrupt(FILES) as watch:
        run(checkpoint=tmp_path / "watched.ckpt", every=2)
    places = sorted(watch.seen)
    for i, place in enumerate(places[:: 1 if FULL else 10]):
        path, nth = tmp_path / f"{i}.ckpt", 1 + i % watch.seen[place]
        with Interrupt(FILES, place, nth) as interrupted:
            run(checkpoint=path, every=2)
        assert interrupted.left == 0
        assert told(run(checkpoint=path)) == told(whole)
    assert len(places) > 200 and not list(tmp_path.glob("*.part"))


VICTIM = """
import json, os, random, signal, sys, time

import numpy as np

from llmppl import CachedTransformer, ConstrainedText, Regex, Vocabulary, smc_steer

path, times, transformer, every = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "transformer", eval(sys.argv[4])
if transformer:
    import torch
    from helpers.tiny import cold_lm

    torch.set_num_threads(1)


def logits(ids):
    return np.sin(np.arange(1, 7) * (1 + sum(ids)) + len(ids))


def run(delay, **how):
    lm = cold_lm() if transformer else CachedTransformer(logits, Vocabulary([b"a", b"b", b"c", b" ", b"d", b""], [5]))
    bounds = {"min_tokens": 15, "max_tokens": 25, "complete": False}
    program = ConstrainedText(lm, "a", Regex("(a|bc|d)*"), end="eos", **bounds)
    particles = smc_steer(program, 4, 3, seed=5, on_step=lambda step: time.sleep(delay), progress=False, **how)
    each = [(str(p), list(map(int, p.context.tokens)), p.log_weight, p.finished, p.cut) for p in particles]
    steps = [float(x) for step in particles.steps for x in (step.ess, step.log_ml, *step.candidate_log_weights)]
    return [each, particles.log_ml, particles.log_ml_se, steps, repr(particles.deaths)]


def killed(delay):
    pid = os.fork()
    if not pid:
        try:
            run(delay, checkpoint=path, every=every)
        finally:
            os._exit(0)
    time.sleep(random.uniform(0.0, 0.4 * seconds))
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


whole, start = run(0.0), time.perf_counter()
run(0.01)
seconds, kills, at = time.perf_counter() - start, 0, set()
while kills < times or (len(at) < (3 if every else 1) and kills < 200):         # wherever a busy machine is then
    if killed(0.01):
        kills += 1
        if os.path.exists(path):
            with open(path) as file:
                at.add(json.loads(file.readlines()[-2])["t"])
    else:
        os.unlink(path)
print(json.dumps([whole, run(0.0, checkpoint=path), sorted(at)]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it kills its children")
@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize("lm", ["function", "transformer"])
def test_a_run_killed_twenty_times_ends_the_same(lm, every, tmp_path):
    times, environment = "20", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", VICTIM, str(tmp_path / "run.ckpt"), times, lm, str(every)]
    ran = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    whole, again, at = json.loads(ran.stdout)
    assert len(at) >= (3 if every else 1)               # steps at which it was found; by default it writes each second
    if lm == "function":
        assert again == whole
    else:                                               # rounding: keys and values are computed together
        assert [each[:2] for each in again[0]] == [each[:2] for each in whole[0]] and again[4] == whole[4]
        np.testing.assert_allclose([each[2] for each in again[0]], [each[2] for each in whole[0]], rtol=1e-12)
        np.testing.assert_allclose([*again[1:3], *again[3]], [*whole[1:3], *whole[3]], rtol=1e-12)


def resumed(algorithm):
    """Run `algorithm`, interrupt it twice after some steps, and call it once more."""

    def run(model, rng):
        with tempfile.TemporaryDirectory() as folder:
            seeded = functools.partial(algorithm, seed=int(rng.integers(1 << 32)), checkpoint=Path(folder, "run.ckpt"))
            for stop in sorted(rng.integers(1, 5, size=2).tolist()):
                with contextlib.suppress(KeyboardInterrupt):
                    seeded(model, every=1, on_step=interrupt(stop))
            return seeded(model)

    return run


@pytest.mark.parametrize(
    "name, algorithm",
    [
        ("regex that must end", functools.partial(smc_steer, N=4, K=2)),
        ("twist", functools.partial(smc_steer, N=3, K=3, expand="copies")),
        ("where, of another distribution", functools.partial(smc_standard, N=4)),
        ("soft", functools.partial(importance_sampling, N=4)),
    ],
)
def test_Z_hat_through_interrupted_runs_is_right_on_average(name, algorithm):
    check(name, resumed(algorithm), seed=17)


# ---- refused, by what differs


def table(scale, V=4):
    """Return a language model of V tokens, of which the last is eos."""

    def logits(ids):
        return np.cos(np.arange(V) * scale * (1 + len(ids)))

    return CachedTransformer(logits, Vocabulary([b"a", b"b", b"c", b"d"][: V - 1] + [b""], [V - 1]))


class Writes(Model):
    best = "a"

    def __init__(self, lm, prompt="a", bonus=0.5, likes=str.isalpha):
        super().__init__()
        self.context, self.bonus, self.likes = lm.context(prompt), bonus, likes

    def step(self):
        token = self.sample(self.transformer(self.context))
        if token == EOS or len(self.s) == 6:
            return self.finish()
        self.s += token
        self.context += token
        self.score(self.bonus * (str(token) == self.best))
        self.condition(self.likes(self.s))


def changed(step=None, **attributes):
    """Return a program of the same name with another class."""
    cls = type("Writes", (Writes,), {"__qualname__": "Writes", **attributes})
    if step is not None:
        cls.step = step
    return cls


def other_step(self):
    Writes.step(self)
    self.score(0.0)


def steer(program, N=4, K=3, seed=1, **how):
    return functools.partial(smc_steer, program, N, K, seed=seed, **how)


LM = table(1.0)
MADE = steer(Writes(LM))
STANDARD = functools.partial(smc_standard, Writes(LM), 4, seed=1)
OTHERS = {
    "another class": (
        MADE, steer(type("Drafts", (Writes,), {})(LM)),
        "its program is Writes, and this is Drafts",
    ),
    "another prompt": (
        MADE, steer(Writes(LM, "b")),
        r"the attribute context was Context\('a'\), and is Context\('b'\)",
    ),
    "another number": (
        MADE, steer(Writes(LM, bonus=0.25)),
        r"the attribute bonus was 0\.5, and is 0\.25",
    ),
    "another function": (
        MADE, steer(Writes(LM, likes=str.islower)),
        "the attribute likes was <method 'isalpha' of 'str' objects>, and is <method 'islower'",
    ),
    "another attribute of the class": (
        MADE, steer(changed(best="b")(LM)), "Writes.best was 'a', and is 'b'",
    ),
    "another step": (
        MADE, steer(changed(other_step)(LM)), "the class Writes is another <class 'test_checkpoint.Writes'>",
    ),
    "another model": (
        MADE, steer(Writes(table(1.5))),
        "its language model is .*, and this is .*, of other weights",
    ),
    "another vocabulary": (
        MADE, steer(Writes(table(1.0, 5))),
        r"its language model is .*Vocabulary\(4 tokens.*, and this is .*\(5 tokens.*, of another vocabulary",
    ),
    "another N": (MADE, steer(Writes(LM), N=5), "expand.N was 4, and is 5"),
    "another K": (MADE, steer(Writes(LM), K=2), "expand.K was 3, and is 2"),
    "another expand": (
        MADE, steer(Writes(LM), expand="copies"), "expand was Distinct, and is Copies"
    ),
    "another algorithm": (MADE, STANDARD, "expand was Distinct, and is Copies"),
    "another threshold": (
        STANDARD, functools.partial(STANDARD, ess_threshold=0.9), r"select.ess_threshold was 0\.5, and is 0\.9"
    ),
    "another scheme": (
        STANDARD, functools.partial(STANDARD, resample=multinomial),
        "select.scheme was <function systematic>, and is <function multinomial>",
    ),
    "another seed": (MADE, steer(Writes(LM), seed=2), "its seed is 1, and this is 2"),
    "another stream": (
        MADE, steer(Writes(LM), seed=None, rng=np.random.default_rng(1).spawn(1)[0]),
        "the random stream that it began with is another",
    ),
    "fewer steps": (MADE, functools.partial(MADE, max_steps=1), "it has made 2 steps, more than max_steps=1"),
    "a recorder": (
        MADE, functools.partial(MADE, on_step=Recorder(os.devnull)), "it was made without the Recorder",
    ),
    "a run that has begun": (
        MADE, lambda **how: begun().run(**how), "it is at step 2, and this run has made 1 steps: a run goes on from",
    ),
}  # fmt: skip


def begun():
    run = SMC(Writes(LM), Distinct(4, 3), DownSample(4), seed=1)
    next(run)
    return run


def test_a_torn_or_damaged_checkpoint_is_refused_and_left_unchanged(tmp_path):
    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        MADE(checkpoint=path, on_step=interrupt(3))
    whole = path.read_bytes()
    rng, lines = np.random.default_rng(0), whole.splitlines(keepends=True)
    torn = [whole[:at] for at in rng.integers(len(lines[0]), len(whole), size=20).tolist()]
    places = rng.integers(100, len(whole), 20).tolist()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    swapped = [b"".join([lines[0], lines[2], lines[1], *lines[3:]]), b"".join([lines[0], *lines[2:]]), whole + b"\n"]
    for data in torn + flipped + swapped:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="run.ckpt is (torn or damaged|no checkpoint).* It is left as it is; "):
            MADE(checkpoint=path)
        assert path.read_bytes() == data
    others = [b"", b"\n", b"[1]", b'{"llmppl_trace": 1}\n', b"\xff\xfe", b"[" * 100_000]
    for data in [*others, whole[: len(lines[0]) // 2]]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"run.ckpt is no checkpoint of llmppl\. It is left as it is; give an"):
            MADE(checkpoint=path)
        assert path.read_bytes() == data
    path.write_bytes(whole.replace(b'"llmppl_checkpoint":2', b'"llmppl_checkpoint":1'))
    with pytest.raises(ValueError, match="run.ckpt has the format 1, and this llmppl reads the format 2"):
        MADE(checkpoint=path)
    path.write_bytes(whole)
    assert told(MADE(checkpoint=path)) == told(MADE())


def test_a_cut_run_may_continue_with_more_steps(tmp_path):
    path = tmp_path / "run.ckpt"
    for most in (1, 3, None):
        assert told(MADE(checkpoint=path, max_steps=most)) == told(MADE(max_steps=most))


# ---- what cannot be written


class Odd(Model):
    def __init__(self, values):
        super().__init__()
        self.values = values

    def step(self):
        value = self.sample(Categorical(dict.fromkeys(self.values, 1 / len(self.values))))
        self.s += str(len(self.s))
        self.last = value
        if len(self.s) == 4:
            self.finish()


class Colour(enum.Enum):
    RED, BLUE = 1, 2


def test_values_of_all_plain_kinds_come_back_as_they_were(tmp_path):
    vocab = Vocabulary([b"a", b"\xc3", b""], [2])
    values = [
        None, True, 3, -(2**70), 0.1, math.inf, -math.inf, "\udc80é", b"\x00\xff", Text(b"\xc3"), vocab[1], vocab[2],
        EOS, np.float64(0.1), np.int32(7), np.bool_(True), np.array([[1.5, -0.0]]), np.array(["x"]), (1, ("a", b"b")),
        (), [1, [2]], {1, 2}, frozenset({"a"}), {"a": [1], "token": (3,)}, {1: "b", (2, 3): None}, {}, 1e-320,
        np.array([], np.int8),
    ]  # fmt: skip
    plain = ValueCodec([vocab])
    for value in values:
        written = json.loads(json.dumps(plain.encode(value), allow_nan=False))
        again = plain.decode(written)
        assert type(again) is type(value) and repr(again) == repr(value), value
    assert math.isnan(plain.decode(plain.encode(math.nan)))
    assert plain.decode(plain.encode(vocab[1])) is vocab[1]
    values = [(1, "a"), b"b", None, 2.5]
    with pytest.raises(KeyboardInterrupt):
        smc_steer(Odd(values), 4, 3, seed=0, checkpoint=tmp_path / "run.ckpt", on_step=interrupt(3))
    again = smc_steer(Odd(values), 4, 3, seed=0, checkpoint=tmp_path / "run.ckpt")
    assert told(again) == told(smc_steer(Odd(values), 4, 3, seed=0))


def test_a_value_that_cannot_be_saved_is_a_TypeError_with_a_remedy(tmp_path):
    path, cannot = tmp_path / "run.ckpt", r"run\.ckpt cannot hold what Odd sampled: <Colour.* a Colour\. Sample what"
    with pytest.raises(TypeError, match=cannot) as error:
        smc_steer(Odd([Colour.RED, Colour.BLUE]), 4, 3, seed=0, checkpoint=path, every=1)
    assert "its name or its place in a list; what can be held are None, bools, numbers, texts, by" in str(error.value)
    assert len(error.value.particles) == 2 and all(p.cut and len(p.s) == 1 for p in error.value.particles)
    assert smc_steer(Odd(["RED", "BLUE"]), 4, 3, seed=0, checkpoint=tmp_path / "other.ckpt", every=1)


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"

    def full(file):
        if len(os.listdir(tmp_path)) == 2 and json.loads(path.read_bytes().splitlines()[-2])["t"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*run.ckpt'") as error:
        MADE(checkpoint=path, every=1)
    monkeypatch.undo()
    assert [str(p) for p in error.value.particles] == [str(p) for p in MADE(max_steps=3)]
    assert all(p.cut or len(p.s) < 3 for p in error.value.particles)
    assert "run.ckpt is that of step 2: a later one could not be written: " in error.value.__notes__[0]
    assert [*tmp_path.iterdir()] == [path]
    assert told(MADE(checkpoint=path)) == told(MADE())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_disk_that_is_already_full_is_reported_before_the_run(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '[^']*run.ckpt'$"):
        MADE(checkpoint=tmp_path / "run.ckpt", on_step=lambda step: pytest.fail("it has begun"))
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_reported_before_the_run(tmp_path):
    never = {"on_step": lambda step: pytest.fail("it has begun")}
    with pytest.raises(FileNotFoundError, match="there is no folder '.*none'; make it first"):
        MADE(checkpoint=tmp_path / "none" / "run.ckpt", **never)
    with pytest.raises(IsADirectoryError):
        MADE(checkpoint=tmp_path, **never)
    with pytest.raises(NotADirectoryError):
        MADE(checkpoint=Path(__file__) / "run.ckpt", **never)
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        MADE(checkpoint=3, **never)
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        MADE(checkpoint=tmp_path / "run.ckpt", every=0, **never)
    with pytest.raises(ValueError, match='every=2 is of a checkpoint: give its path, as in checkpoint="run.ckpt"'):
        MADE(every=2, **never)
    assert [*tmp_path.iterdir()] == []


def test_a_program_that_fails_leaves_a_checkpoint_of_the_last_whole_step(tmp_path):
    """A run can be repeated after an outside failure, such as that of a service."""
    service = tmp_path / "service"

    class Calls(Odd):
        def step(self):
            super().step()
            if len(self.s) == 3 and not service.exists():
                raise ConnectionError("no answer")

    path = tmp_path / "run.ckpt"
    with pytest.raises(ConnectionError) as error:
        smc_steer(Calls("abc"), 4, 3, seed=0, checkpoint=path)
    assert [len(p.s) for p in error.value.particles] == [2] * 4
    service.touch()
    assert told(smc_steer(Calls("abc"), 4, 3, seed=0, checkpoint=path)) == told(smc_steer(Calls("abc"), 4, 3, seed=0))
