"""Tests of checkpoints: an interrupted run that is called again ends as if uninterrupted, or names a difference."""

import contextlib
import functools
import itertools
import json
import resource
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
from helpers.common import repetitions, slow
from helpers.exactness import check
from helpers.programs import PROGRAMS, what_the_program_made
from helpers.tiny import cold_lm

from llmppl import (
    EOS,
    Bernoulli,
    CachedTransformer,
    Categorical,
    ConstrainedText,
    Model,
    Regex,
    Rule,
    Uniform,
    Vocabulary,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints import Text
from llmppl.inference.resampling import multinomial
from llmppl.report import Recorder, load

ALGORITHMS = {
    "distinct": lambda model, **how: smc_steer(model, 5, 3, max_steps=9, **how),
    "merged": lambda model, **how: smc_steer(model, 5, 3, expand="merged", max_steps=9, **how),
    "copies": lambda model, **how: smc_steer(model, 5, 3, expand="copies", max_steps=9, **how),
    "standard": lambda model, **how: smc_standard(model, 8, resample=multinomial, max_steps=9, **how),
    "importance": lambda model, **how: importance_sampling(model, 8, max_steps=9, **how),
}
D3 = Categorical({"x": 0.5, "y": 0.3, "z": 0.2})


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
    model, path = program(), tmp_path / "run.ckpt"
    whole = run(model, seed=3)
    for at in range(1, len(whole.steps) + 1):
        with pytest.raises(KeyboardInterrupt):
            run(model, seed=3, checkpoint=path, every=1, on_step=interrupt(at))
        assert json.loads(path.read_bytes())["t"] == at - 1
    assert told(run(model, seed=3, checkpoint=path)) == told(whole)


class Fuse:
    """Count of the steps until an interrupt, which the repr does not show."""

    left = None


FUSE = Fuse()


class Fails(Model):
    """Program that is interrupted inside of a step, after it has changed a list in place."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def step(self):
        self.drawn.append(self.sample(D3))
        FUSE.left = None if FUSE.left is None else FUSE.left - 1
        if FUSE.left == 0:
            raise KeyboardInterrupt
        self.s += self.drawn[-1] + self.sample(D3)
        if len(self.s) == 10:
            self.finish()


@pytest.mark.parametrize("run", ["distinct", "standard"])
@pytest.mark.parametrize("number", [1, 5, 9, 14, 20])
def test_a_run_interrupted_inside_a_step_ends_the_same(run, number, tmp_path, monkeypatch):
    whole, path = ALGORITHMS[run](Fails(), seed=1), tmp_path / "run.ckpt"
    monkeypatch.setattr(FUSE, "left", number)
    with pytest.raises(KeyboardInterrupt):
        ALGORITHMS[run](Fails(), seed=1, checkpoint=path, every=1)
    assert told(ALGORITHMS[run](Fails(), seed=1, checkpoint=path)) == told(whole)


class Inner(Model):
    def step(self):
        self.s += self.sample(D3)
        self.score(0.5 * (self.s[-1] == "x"))
        if len(self.s) == 2:
            self.finish()


class Nests(Model):
    """Program that runs inference on its own stream, and spawns from that."""

    def __init__(self):
        super().__init__()
        self.hidden = []

    def step(self):
        inner = smc_standard(Inner(), 3, rng=self.rng)
        self.score(inner.log_ml)
        self.hidden += [inner[int(self.rng.integers(len(inner)))].s, self.rng.spawn(1)[0].random()]
        self.s += self.sample(D3)
        if len(self.s) == 5:
            self.finish()


@pytest.mark.parametrize("run", ["distinct", "standard"])
def test_nested_inference_and_spawned_streams_are_resumed(run, tmp_path):
    whole = ALGORITHMS[run](Nests(), seed=5)
    for at in range(1, 6):
        with pytest.raises(KeyboardInterrupt):
            ALGORITHMS[run](Nests(), seed=5, checkpoint=tmp_path / "run.ckpt", every=1, on_step=interrupt(at))
    resumed = ALGORITHMS[run](Nests(), seed=5, checkpoint=tmp_path / "run.ckpt")
    assert [p.hidden for p in resumed] == [p.hidden for p in whole] and resumed.log_ml == whole.log_ml


class Drifts(Model):
    """Program that reads something beside its choices."""

    source = itertools.count()

    def step(self):
        self.s += self.sample(D3)
        if len(self.s) % 2 == 0:
            self.s += str(next(self.source))
        if len(self.s) > 5:
            self.finish()


def test_a_particle_that_is_rebuilt_differently_is_named_with_its_step(tmp_path):
    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        smc_steer(Drifts(), 3, 2, seed=0, checkpoint=path, every=1, on_step=interrupt(4))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="at step 3, particle 0 is another one when it is rebuilt from its choices"):
        smc_steer(Drifts(), 3, 2, seed=0, checkpoint=path)
    assert path.read_bytes() == before


def constrained(lm, **options):
    return ConstrainedText(lm, "a", Regex("(a|bc|d)*"), end="eos", complete=False, max_tokens=10, **options)


def test_a_resumed_run_computes_only_the_contexts_of_its_particles(tmp_path):
    def run(**how):
        return smc_steer(constrained(cold_lm()), 6, 3, seed=1, **how)

    whole = run()
    for stop in range(len(whole.steps)):
        path = tmp_path / f"{stop}.ckpt"
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path, every=1, on_step=interrupt(stop + 1))
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
        run(PROGRAMS["Streams"](), checkpoint=path, every=1, on_step=interrupt(3))
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(path.read_bytes())
    assert told(run(PROGRAMS["Streams"](), checkpoint=path)) == told(run(PROGRAMS["Streams"](), checkpoint=copy))

    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM):
        path, rng, other = tmp_path / f"{kind.__name__}.ckpt", *(np.random.Generator(kind(7)) for _ in range(2))
        rng.random(3), other.random(3)
        whole = run(PROGRAMS["Streams"](), rng=rng)
        with pytest.raises(KeyboardInterrupt):
            run(PROGRAMS["Streams"](), rng=other, checkpoint=path, every=1, on_step=interrupt(4))
        other = np.random.Generator(kind(7))
        other.random(3)
        assert repr(told(run(PROGRAMS["Streams"](), rng=other, checkpoint=path))) == repr(told(whole))
        assert [other.random(), other.spawn(1)[0].random()] == [rng.random(), rng.spawn(1)[0].random()]


def test_the_recording_of_a_resumed_run_is_complete(tmp_path):
    path, recording = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    run = ALGORITHMS["copies"]
    with Recorder(tmp_path / "whole.jsonl") as recorder:
        assert len(run(PROGRAMS["Coins"](), seed=1, on_step=recorder).steps) > 7
    whole = load(tmp_path / "whole.jsonl").status()

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
        end = "KeyboardInterrupt ended the run." if stop else whole
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
            run(Hops(lm), seed=2, checkpoint=tmp_path / "run.ckpt", every=1, on_step=interrupt(at))
    for _ in range(2):
        assert told(run(Hops(lm), seed=2, checkpoint=tmp_path / "run.ckpt")) == told(whole)


class Dies(Model):
    def step(self):
        self.s += "ab"[self.sample(Bernoulli(0.5))]
        self.condition(len(self.s) < 3)


def test_a_resumed_run_keeps_its_deaths(tmp_path):
    dead = [smc_steer(Dies(), 4, 3, seed=1, checkpoint=tmp_path / "run.ckpt") for _ in range(2)]
    assert len(dead[0]) == 0 and [death.step for death in dead[0].deaths] == [3] and told(dead[0]) == told(dead[1])


class Samples(Model):
    """Program that samples a value, and writes it in words."""

    value: object = None

    def __init__(self, values):
        super().__init__()
        self.values = values

    def step(self):
        self.value = self.sample(Uniform(0, 1)) and self.sample(Categorical([0.5, 0.5], [self.values[0], "other"]))
        self.s += "."
        if len(self.s) == 3:
            self.finish()


@pytest.mark.parametrize(
    "value", [None, 1.5, -np.inf, b"x", (1, ("a", None)), frozenset([1]), np.float32(0.5), Text(b"\xc3"), 10**30]
)
def test_values_of_all_plain_kinds_come_back(value, tmp_path):
    path = tmp_path / "run.ckpt"
    whole = smc_steer(Samples([value]), 6, 2, seed=0)
    with pytest.raises(KeyboardInterrupt):
        smc_steer(Samples([value]), 6, 2, seed=0, checkpoint=path, every=1, on_step=interrupt(2))
    again = smc_steer(Samples([value]), 6, 2, seed=0, checkpoint=path)
    assert [repr(p.choices) for p in again] == [repr(p.choices) for p in whole]
    assert [type(p.value) for p in again] == [type(p.value) for p in whole]


def test_a_value_that_cannot_be_saved_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(TypeError, match="cannot hold what Samples sampled: .*Sample what stands for it"):
        smc_steer(Samples([Path("a")]), 6, 2, seed=0, checkpoint=tmp_path / "run.ckpt", every=1)


# ---- other runs, other files


class Digits(Model):
    sides = 6

    def __init__(self, most=5):
        super().__init__()
        self.most = most

    def step(self):
        self.s += str(self.sample(Uniform(1, self.sides)))
        if len(self.s) == self.most:
            self.finish()


def digits(model=None, K=3, **how):
    return smc_steer(model or Digits(), 4, K, **{"seed": 1, **how})


@pytest.mark.parametrize(
    "call, difference",
    [
        (lambda path: digits(seed=2, checkpoint=path), "its random stream, of seed 1, is another"),
        (lambda path: digits(Digits(6), checkpoint=path), "the attribute most was 5, and is 6"),
        (lambda path: digits(K=4, checkpoint=path), "K was 3, and is 4"),
        (lambda path: digits(Dies(), checkpoint=path), "its program was Digits, and is Dies"),
        (lambda path: smc_standard(Digits(), 4, seed=1, checkpoint=path), "expand was 'Distinct', and is 'Copies'"),
        (lambda path: digits(checkpoint=path, version="2"), "its version was '', and is '2'"),
        (lambda path: digits(checkpoint=path, max_steps=2), "it has made 5 steps, more than max_steps=2"),
        (lambda path: digits(checkpoint=path, on_step=Recorder()), "it was made without the Recorder"),
    ],
)
def test_another_run_is_refused_by_name_and_the_file_stays(call, difference, tmp_path):
    path = tmp_path / "run.ckpt"
    digits(checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"is the checkpoint of another run: {difference}"):
        call(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("prompt, how, attribute", [("b", {}, "context"), ("a", {"rule": Rule(0.5)}, "rule")])
def test_another_prompt_or_temperature_is_refused(prompt, how, attribute, tmp_path):
    lm, path = cold_lm(), tmp_path / "run.ckpt"
    smc_steer(ConstrainedText(lm, "a", max_tokens=3), 4, 2, checkpoint=path)
    smc_steer(ConstrainedText(lm, "a", max_tokens=3, rule=Rule()), 4, 2, checkpoint=path)
    with pytest.raises(ValueError, match=f"is the checkpoint of another run: the attribute {attribute} was"):
        smc_steer(ConstrainedText(lm, prompt, max_tokens=3, **how), 4, 2, checkpoint=path)


OWN = """
from test_checkpoint import Digits
class Own(Digits):
    sides = {sides}
"""


def made(sides, folder, monkeypatch):
    """Return a program of a module of the user's; without a folder as a shell makes it, whose source is not known."""
    module = types.ModuleType("own" if folder else "__main__")
    if folder:
        module.__file__ = str(folder / f"own_{sides}.py")
        Path(module.__file__).write_text(OWN.format(sides=sides))
        monkeypatch.setitem(sys.modules, "own", module)
    exec(OWN.format(sides=sides), vars(module))
    return module.Own()


@pytest.mark.parametrize("is_shell", [False, True])
def test_a_changed_class_is_refused_and_can_be_forced(is_shell, tmp_path, monkeypatch):
    path, folder = tmp_path / "run.ckpt", None if is_shell else tmp_path
    whole = digits(made(6, folder, monkeypatch), checkpoint=path)
    assert told(digits(made(6, folder, monkeypatch), checkpoint=path)) == told(whole)
    new = made(7, folder, monkeypatch)
    with pytest.raises(ValueError, match="another run: the source of Own has changed.* version= .* resume=.force"):
        digits(new, checkpoint=path)
    assert told(digits(new, checkpoint=path, resume="force")) == told(whole)


def test_a_forced_checkpoint_goes_on_with_its_own_stream(tmp_path):
    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        digits(checkpoint=path, every=1, on_step=interrupt(3))
    assert told(digits(seed=2, checkpoint=path, resume="force")) == told(digits())


@pytest.mark.parametrize("resume", [False, "yes", None])
def test_a_checkpoint_is_resumed_or_forced(resume, tmp_path):
    with pytest.raises(ValueError, match='resume must be True or "force"'):
        digits(checkpoint=tmp_path / "run.ckpt", resume=resume)
    with pytest.raises(ValueError, match="version='2' is of a checkpoint: give its path"):
        digits(version="2")


@pytest.mark.parametrize("content", [b"hello", b"[]", b"{}", b'{"llmppl_checkpoint": 3}', b"\xff" * 9])
def test_a_foreign_file_is_refused_and_left_unchanged(content, tmp_path):
    path = tmp_path / "run.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="run.ckpt is no checkpoint of .*llmppl"):
        digits(checkpoint=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content, writer", [
    (b'{"llmppl_checkpoint":2,"stream":[]}\n{}\n', "llmppl 0.1"), (b'{"llmppl_checkpoint": 7, "t": 1}', "llmppl 0.2"),
    (b'{"llmppl_checkpoint": 99, "t": 1}', "a later llmppl"),
])  # fmt: skip
def test_a_checkpoint_of_another_format_names_its_writer(content, writer, tmp_path):
    (tmp_path / "run.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=f"{writer} wrote it in the format"):
        digits(checkpoint=tmp_path / "run.ckpt")


def test_a_cut_run_may_continue_with_more_steps(tmp_path):
    path = tmp_path / "run.ckpt"
    assert all(particle.cut for particle in digits(checkpoint=path, max_steps=2))
    assert told(digits(checkpoint=path)) == told(digits())


def test_two_runs_cannot_share_a_checkpoint(tmp_path):
    path, refused = tmp_path / "run.ckpt", []

    def again(step):
        with pytest.raises(BlockingIOError, match="another run is writing it"):
            digits(checkpoint=path)
        refused.append(step.index)

    digits(checkpoint=path, on_step=again)
    assert refused == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    path, most = tmp_path / "run.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most[1]))
    try:
        with pytest.raises(OSError, match="run.ckpt"):
            digits(Digits(60), checkpoint=path, every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, before)
    assert 0 < json.loads(path.read_bytes())["t"] < 60 and not list(tmp_path.glob("*.part"))
    assert told(digits(Digits(60), checkpoint=path)) == told(digits(Digits(60)))


# ---- kills


VICTIM = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
import test_checkpoint as t
from llmppl.support import files
replace, left = os.replace, int(sys.argv[2])
def counted(*paths):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
files.os.replace = counted
t.digits(t.Digits(12), checkpoint=sys.argv[1], every=1)
"""


@pytest.mark.parametrize("numbers", slow((3, 2, 5), *[(2, 3, 4)] * repetitions(5, 0)))
def test_a_run_killed_while_it_writes_ends_the_same(numbers, tmp_path):
    path, here = tmp_path / "run.ckpt", str(Path(__file__).parent)
    for number in numbers:
        victim = subprocess.run([sys.executable, "-c", VICTIM, path, str(number), here, *sys.path])
        assert victim.returncode == -signal.SIGKILL
    assert json.loads(path.read_bytes())["t"] == sum(numbers) - len(numbers) - 1
    assert told(digits(Digits(12), checkpoint=path)) == told(digits(Digits(12)))


# ---- exactness


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
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            ("twist", functools.partial(smc_steer, N=3, K=3, expand="copies")),
            ("where, of another distribution", functools.partial(smc_standard, N=4)),
            ("soft", functools.partial(importance_sampling, N=4)),
        )),
    ],
)
def test_Z_hat_through_interrupted_runs_is_right_on_average(name, algorithm):
    check(name, resumed(algorithm), seed=17)
