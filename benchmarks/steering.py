"""What steering costs: SMC with a masked proposal beside plain generation of the same length.

Every setting is a model, N particles, a prompt and a number of steps. The task is text whose tokens all come from a
fixed random half of the vocabulary, end of text excluded, so that every run has the same length; tokens are proposed
from the allowed half with the exact importance weight. The baselines are `model.generate` of the same length without
the constraint: N sampled continuations, and N beams. The methods of a setting take turns, `--repeats` times; seconds
are medians, and a ratio is the median over the turns of time / time of the baseline in the same turn. Each run of ours
starts with an empty cache.

    python benchmarks/steering.py --quick               # one small setting, about ten seconds
    python benchmarks/steering.py --model gpt2 --particles 10 --steps 50 --prompt 40
    python benchmarks/steering.py                       # everything: hours on two cores
    python benchmarks/steering.py --rss                 # memory kept after 300 steps of 32 particles

`gpt2` has the shape of GPT-2 small and random weights, with a vocabulary of made-up tokens (nothing is downloaded);
`embedded` is the model that ships with the package. llamppl and genlm-control run the same task where they are
installed (`pip install 'llmppl[bench]'`).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tables import machine, release, table
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from llmppl import CachedTransformer, ConstrainedText, Vocabulary, smc_standard, smc_steer
from llmppl.lm import Context

try:
    import psutil
except ImportError:
    psutil = None
try:
    import llamppl
except ImportError:
    llamppl = None
try:
    import genlm.control as genlm_control
except ImportError:
    genlm_control = None
if llamppl is not None or genlm_control is not None:
    from genlm.backend.llm import AsyncTransformer  # both stand on it

K = 3
BUDGETS = {"gpt2": 1 << 30, "embedded": 64 << 20}       # cache_bytes of --rss: less than the run could fill
PARAGRAPH = (
    "The old house stood at the end of the road, and nobody had lived in it for many years. In the evening the wind "
    "came up from the sea and went through the empty rooms, and the people of the village said that they could hear a "
    "voice. One day a young woman came with a box of books and a dog, and she opened all the windows. "
)
NOTE = """masked proposal (half of the vocabulary), cold cache. total s: wall time; model s: of that, in forward passes;
outside %: the rest, as a share of model s; elsewhere s: the part of the rest that is outside the language model;
x sampling, x beams: total s over generate's; cpu x: cpu s over sampling's; peak MB: of resident memory, over before"""


@dataclass
class Subject:
    """A model to run, with its vocabulary, and a tokenizer for those who need one."""

    name: str
    model: Any
    vocab: Vocabulary
    tokenizer: Any
    ids: list[int]                                      # of a prompt as long as the longest that is asked for


def gpt2(longest: int) -> Subject:
    """GPT-2 small with random weights and made-up tokens: every byte, then a space and letters."""
    config = GPT2Config()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    V = config.vocab_size
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ("".join(word) for n in itertools.count(1) for word in itertools.product(letters, repeat=n))
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b" " + word.encode() for word in itertools.islice(words, V - 257)]
    vocab = Vocabulary([*tokens, b""], eos_ids=[V - 1])
    ids = np.random.default_rng(1).integers(256, V - 1, longest).tolist()
    return Subject("gpt2", model, vocab, lambda: _word_tokenizer(tokens), ids)


def _word_tokenizer(tokens: list[bytes]) -> Any:
    """A byte-level tokenizer with these tokens and no merges: it finds a word whole or spells it in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    vocab = {"".join(alphabet[byte] for byte in data): i for i, data in enumerate(tokens)}
    vocab["<|endoftext|>"] = len(tokens)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token=end, clean_up_tokenization_spaces=False
    )


def embedded(longest: int) -> Subject:
    """The model of the package, with a prompt of English."""
    lm = CachedTransformer.from_pretrained()
    ids = lm.tokenizer.encode(PARAGRAPH * (1 + longest // 50))[:longest]
    return Subject("embedded", lm.model, lm.vocab, lambda: lm.tokenizer, ids)


SUBJECTS: dict[str, Callable[[int], Subject]] = {"gpt2": gpt2, "embedded": embedded}


@dataclass
class Task:
    """One setting."""

    subject: Subject
    N: int
    steps: int
    prompt: int

    def __post_init__(self) -> None:
        vocab = self.subject.vocab
        self.ids = self.subject.ids[: self.prompt]
        self.mask: NDArray[np.bool_] = np.random.default_rng(2).random(len(vocab)) < 0.5
        self.mask[list(vocab.special_ids)] = False      # the ends of text are among them

    def __str__(self) -> str:
        return f"{self.subject.name}, N={self.N}, {self.steps} steps, a prompt of {self.prompt} tokens"


@dataclass
class Run:
    """What one run took. `model` is the time in the model's forward passes, whoever calls them."""

    wall: float = 0.0
    cpu: float = 0.0
    model: float = 0.0
    passed: int = 0                                     # tokens that went through the model, padding included
    elsewhere: float | None = None                      # ours: outside the language model
    cache: int | None = None                            # ours: the most bytes that the cache held
    tokens: int | None = None                           # ours: without padding


@dataclass
class Method:
    """A way to do the task: `prepare(task)` returns the function to time, which may fill in its Run."""

    name: str
    prepare: Callable[[Task], Callable[[Run], None]]
    other: bool = False                                 # another library
    runs: list[Run] = field(default_factory=list)
    memory: float | None = None                         # bytes of resident memory, peak over what was there


# ---- the methods


def context_of(lm: CachedTransformer, ids: list[int]) -> Context:
    context = lm.context(lm.vocab.tokens[ids[0]].decode("latin-1"))
    assert [int(i) for i in context.tokens] == ids[:1]
    for i in ids[1:]:
        context = context + lm.vocab[i]
    return context


def ours(K: int | None, cache_bytes: int) -> Callable[[Task], Callable[[Run], None]]:
    def prepare(task: Task) -> Callable[[Run], None]:
        lm = CachedTransformer(task.subject.model, task.subject.vocab, cache_bytes=cache_bytes)
        context = context_of(lm, task.ids)
        program = ConstrainedText(lm, context, mask=lambda text: task.mask, max_tokens=task.steps)

        def call(run: Run) -> None:
            posterior = smc_standard(program, task.N, seed=0) if K is None else smc_steer(program, task.N, K, seed=0)
            run.elsewhere = posterior.stats.seconds_other + posterior.stats.seconds_masks
            run.cache, run.tokens = lm.store.peak_bytes, lm.stats.tokens
            assert len(posterior) and all(particle.num_tokens == task.steps for particle in posterior)

        return call

    return prepare


def generate(beams: bool) -> Callable[[Task], Callable[[Run], None]]:
    def prepare(task: Task) -> Callable[[Run], None]:
        ids = torch.tensor([task.ids])
        how = {"num_beams": task.N} if beams else {"do_sample": True, "num_return_sequences": task.N}
        eos = list(task.subject.vocab.eos_ids)
        config = GenerationConfig(
            max_new_tokens=task.steps, min_new_tokens=task.steps, top_k=0, pad_token_id=eos[0], eos_token_id=eos, **how
        )

        def call(run: Run) -> None:
            with torch.inference_mode():
                task.subject.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

        return call

    return prepare


def with_llamppl(K: int | None) -> Callable[[Task], Callable[[Run], None]]:
    def prepare(task: Task) -> Callable[[Run], None]:
        backend = AsyncTransformer(task.subject.model, task.subject.tokenizer(), batch_size=task.N * (K or 1))
        lm = llamppl.CachedCausalLM(backend)
        prompt = _same_prompt(lm.tokenizer, task)
        allowed = set(np.flatnonzero(task.mask).tolist())

        class Program(llamppl.Model):
            def __init__(self) -> None:
                super().__init__()
                self.context = llamppl.LMContext(lm, prompt)

            def immutable_properties(self) -> set[str]:
                return {"allowed"}

            async def step(self) -> None:
                await self.observe(self.context.mask_dist(allowed), True)
                await self.sample(self.context.next_token())
                if self.context.token_count == task.steps:
                    self.finish()

        def call(run: Run) -> None:
            lm.cache_kv(task.ids)
            program = Program()
            asyncio.run(
                llamppl.smc_standard(program, task.N) if K is None else llamppl.smc_steer(program, task.N, K)
            )

        return call

    return prepare


def with_genlm_control() -> Callable[[Task], Callable[[Run], None]]:
    def prepare(task: Task) -> Callable[[Run], None]:
        backend = AsyncTransformer(task.subject.model, task.subject.tokenizer(), batch_size=task.N)
        llm = genlm_control.PromptedLLM(backend, prompt_ids=task.ids)
        allowed = [*(task.mask[token.token_id] for token in llm.vocab), False]
        go_on = np.where(allowed, 0.0, -np.inf)

        class Allowed(genlm_control.Potential):
            """0 where every token is allowed; the text may end when it is long enough."""

            async def complete(self, context: list[Any]) -> float:
                return 0.0

            async def prefix(self, context: list[Any]) -> float:
                return 0.0

            async def logw_next(self, context: list[Any]) -> Any:
                weights = go_on.copy()
                weights[-1] = 0.0 if len(context) >= task.steps else -np.inf
                return self.make_lazy_weights(weights)

        sampler = genlm_control.direct_token_sampler(llm * Allowed(llm.vocab))

        def call(run: Run) -> None:
            backend.cache_kv(task.ids)
            smc = genlm_control.SMC(sampler)
            asyncio.run(smc(n_particles=task.N, ess_threshold=0.5, max_tokens=task.steps + 1))

        return call

    return prepare


def _same_prompt(tokenizer: Any, task: Task) -> str:
    prompt = tokenizer.decode(task.ids)
    if tokenizer.encode(prompt) != task.ids:
        raise ValueError("its prompt must be a text, and the tokenizer reads this text as other tokens")
    return prompt                                       # type: ignore[no-any-return]


# ---- measuring


@contextmanager
def forwards(model: Any, run: Run) -> Iterator[None]:
    """Count the time and the tokens of the model's forward passes."""
    started = 0.0

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        run.passed += (args[0] if args else kwargs["input_ids"]).numel()
        started = time.perf_counter()

    def after(*_: Any) -> None:
        run.model += time.perf_counter() - started

    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def resident() -> int | None:
    """Bytes of resident memory of this process, what can be given back given back before; None without psutil."""
    if psutil is None:
        return None
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


@contextmanager
def peak(found: list[float]) -> Iterator[None]:
    """Append how much resident memory grew at its peak, looked at every few milliseconds."""
    before = resident()
    if before is None:
        yield
        return
    process, most, done = psutil.Process(), before, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        found.append(most - before)


def once(method: Method, task: Task) -> Run:
    run = Run()
    call = method.prepare(task)
    gc.collect()
    with forwards(task.subject.model, run):
        wall, cpu = time.perf_counter(), time.process_time()
        call(run)
        run.wall, run.cpu = time.perf_counter() - wall, time.process_time() - cpu
    return run


def measure(task: Task, methods: list[Method], repeats: int) -> None:
    """Fill in `methods`: a first run for the memory, which is not timed, then `repeats` timed ones in turns.

    Those of other libraries run once, for both: they can take minutes.
    """
    for method in methods:
        if not method.other:
            found: list[float] = []
            call = method.prepare(task)
            with peak(found):
                call(Run())
            del call
            method.memory = found[0] if found else None
    for _ in range(repeats):
        for method in methods:
            if not method.other:
                method.runs.append(once(method, task))
    for method in [method for method in methods if method.other]:
        found = []
        try:
            with peak(found):
                method.runs.append(once(method, task))
        except Exception as error:                      # on a task that it was perhaps not made for
            methods.remove(method)
            print(f"({method.name} left out: {type(error).__name__}: {error})")
        method.memory = found[0] if found else None


def median(method: Method, what: str) -> float:
    return statistics.median(getattr(run, what) for run in method.runs)


def ratio(method: Method, baseline: Method, what: str = "wall") -> float:
    pairs = zip(method.runs, baseline.runs, strict=not method.other)
    return statistics.median(getattr(run, what) / getattr(base, what) for run, base in pairs)


COLUMNS = (
    "method", "tokens", "total s", "cpu s", "model s", "outside %", "elsewhere s", "x sampling", "cpu x", "x beams",
    "peak MB", "cache MB",
)


def report(task: Task, methods: list[Method]) -> None:
    sampling, beams = (next(m for m in methods if m.name == name) for name in ("generate, sampling", "generate, beams"))
    rows = []
    for m in methods:
        last = m.runs[-1]
        outside = statistics.median((run.wall - run.model) / run.model for run in m.runs)
        rows.append((
            m.name,
            f"{last.tokens or last.passed:,}",
            f"{median(m, 'wall'):.2f}",
            f"{median(m, 'cpu'):.2f}",
            f"{median(m, 'model'):.2f}",
            f"{100 * outside:.0f}",
            "" if last.elsewhere is None else f"{median(m, 'elsewhere'):.2f}",
            f"{ratio(m, sampling):.2f}",
            f"{ratio(m, sampling, 'cpu'):.2f}",
            f"{ratio(m, beams):.2f}",
            "" if m.memory is None else f"{m.memory / 1e6:.0f}",
            "" if last.cache is None else f"{last.cache / 1e6:.0f}",
        ))
    table(str(task), COLUMNS, rows)


def others() -> str:
    """Which of the other libraries run, and how to get the ones that do not."""
    modules = {"llamppl": llamppl, "genlm-control": genlm_control}
    absent = " is not installed (pip install 'llmppl[bench]')"
    return "; ".join(name + absent if module is None else release(name) for name, module in modules.items())


def kept(subject: Subject, cache_bytes: int | None, N: int, steps: int, prompt: int) -> None:
    """Print what a long run leaves behind, against `cache_bytes`."""
    budget = cache_bytes or BUDGETS[subject.name]
    once(Method("", ours(None, budget)), Task(subject, N, 3, prompt))       # torch allocates some things once
    task = Task(subject, N, steps, prompt)
    lm = CachedTransformer(subject.model, subject.vocab, cache_bytes=budget)
    program = ConstrainedText(lm, context_of(lm, task.ids), mask=lambda text: task.mask, max_tokens=steps)
    found: list[float] = []
    before = resident()
    with peak(found):
        posterior = smc_standard(program, N, seed=0)
    after = resident()
    print(f"\nmemory: {task}, cache_bytes {budget / 1e6:.0f} MB, standard SMC")
    print(f"  {posterior.stats}")
    store = lm.store
    print(f"  the cache's own count: {store.bytes / 1e6:.0f} MB kept, {store.peak_bytes / 1e6:.0f} MB at the peak; "
          f"{store.slots_used} slots of {store.slot_cost} bytes, {store.rows_used} distributions")
    if before is None or after is None:
        print("  resident memory: psutil is not installed (pip install 'llmppl[bench]')")
    else:
        print(f"  resident memory: +{(after - before) / 1e6:.0f} MB kept after the run "
              f"({'under' if after - before <= budget else 'OVER'} cache_bytes), +{found[0] / 1e6:.0f} MB at the peak; "
              f"{before / 1e6:.0f} MB before, the model included")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 32], metavar="N")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--prompt", type=int, nargs="+", default=[40, 400], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method, in turns")
    parser.add_argument("--threads", type=int, help="torch's threads; 1 is steadier on a machine that others use")
    parser.add_argument("--cache-bytes", type=int, help="of our runs; the library's default if left out")
    parser.add_argument("--without-others", action="store_true", help="leave llamppl and genlm-control out")
    parser.add_argument("--quick", action="store_true", help="one small setting of the embedded model")
    parser.add_argument("--rss", action="store_true", help="only print memory kept after 300 steps of N=32")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.model, options.particles, options.steps, options.prompt = "embedded", [5], [20], [20]
    warnings.filterwarnings("ignore", module="transformers|llamppl|genlm")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(machine("torch", "transformers", "numpy", note=f"{torch.get_num_threads()} threads, float32 on the CPU"))
    names = list(SUBJECTS) if options.model == "all" else [options.model]
    if options.rss:
        for name in names:
            kept(SUBJECTS[name](40), options.cache_bytes, 32, 300, 40)
        return
    print("left out: llamppl, genlm-control" if options.without_others else others())
    print(NOTE)
    budget = options.cache_bytes or 2 << 30
    for name in names:
        subject = SUBJECTS[name](max(options.prompt))
        for N, steps, prompt in itertools.product(options.particles, options.steps, options.prompt):
            methods = [
                Method("llmppl, standard", ours(None, budget)),
                Method(f"llmppl, steer K={K}", ours(K, budget)),
                Method("generate, sampling", generate(False)),
                Method("generate, beams", generate(True)),
            ]
            if llamppl is not None and not options.without_others:
                methods.append(Method("llamppl, standard", with_llamppl(None), other=True))
                methods.append(Method(f"llamppl, steer K={K}", with_llamppl(K), other=True))
            if genlm_control is not None and not options.without_others:
                methods.append(Method("genlm-control", with_genlm_control(), other=True))
            task = Task(subject, N, steps, prompt)
            measure(task, methods, options.repeats)
            report(task, methods)


if __name__ == "__main__":
    main()
