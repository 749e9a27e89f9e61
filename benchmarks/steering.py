"""Cost of steering: SMC with a masked proposal, compared with plain generation of the same length.

A setting is a model, N particles, a prompt and a number of steps; models and task are in `subjects.py`. The baselines
are three calls of `model.generate` of the same length without the constraint. One samples N continuations, and runs the
prompt N times. One does so from the keys and values of one pass over the prompt, with that pass counted. One has N
beams. The methods of a setting take turns in one process, `--repeats` times. Seconds are medians. A ratio is the median
over the turns of CPU time / CPU time of the baseline in the same turn. Our runs start with an empty cache.

    python benchmarks/steering.py --quick               # one small setting, about ten seconds
    python benchmarks/steering.py --model gpt2 --particles 10 --prompt 40
    python benchmarks/steering.py                       # everything: hours
    python benchmarks/steering.py --rss                 # memory kept after 300 steps of 32 particles

`goals.py` prints the same with goals. With `--others`, llamppl and genlm-control run the same task once per setting
(`pip install 'llmppl-smc[bench]'`).
"""

from __future__ import annotations

import argparse
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

import peers
import torch
import transformers
from subjects import SUBJECTS, Subject, Task, context_of
from tables import machine, table
from transformers import GenerationConfig

from llmppl import CachedTransformer, ConstrainedText, smc_standard, smc_steer
from llmppl.lm.engines.hf import CACHE

try:
    import psutil
except ImportError:
    psutil = None
K = 3
BUDGETS = {"gpt2": 1 << 30, "embedded": 64 << 20}       # cache_bytes of --rss: less than the run could fill
NOTE = """masked proposal (half of the vocabulary), cold cache. total s: wall time; cpu s: CPU time; model s: its part
in the model's forward passes; outside: the rest, in ms per step; x: cpu s over cpu s of generate (sampling, sampling
with the prompt run once, beams); peak MB: growth of resident memory at its peak"""


@dataclass
class Run:
    """Measurements of one run. `cpu` and its parts are CPU time of all threads."""

    wall: float = 0.0
    cpu: float = 0.0
    first: float = 0.0                                  # until the second forward pass starts
    model: float = 0.0                                  # in the model's forward passes, of any caller
    passes: int = 0
    rows: int = 0                                       # summed over all passes
    passed: int = 0                                     # tokens that went through the model, padding included
    cache: int | None = None                            # ours: the peak number of bytes in the cache
    tokens: int | None = None                           # ours: without padding

    def outside(self, task: Task) -> float:
        """Return the seconds per step outside the model."""
        return (self.cpu - self.model) / task.steps

    def round(self, task: Task) -> float:
        """Return the seconds of a round; the first round, which reads the prompt, is excluded."""
        return (self.cpu - self.first) / (task.steps - 1)


@dataclass
class Method:
    """Method to do the task: `prepare(task)` returns the function to time, which may fill in its Run."""

    name: str
    prepare: Callable[[Task], Callable[[Run], None]]
    other: bool = False                                 # another library
    runs: list[Run] = field(default_factory=list)
    memory: float | None = None                         # peak of resident memory minus the amount before, in bytes


# ---- the methods


def inference(program: ConstrainedText, N: int, K: int | None, **how: Any) -> Any:
    """Run steering with K, or the particle filter if K is None."""
    how = how or {"seed": 0}
    return smc_standard(program, N, **how) if K is None else smc_steer(program, N, K, **how)


def ours(K: int | None, cache_bytes: int) -> Callable[[Task], Callable[[Run], None]]:
    def prepare(task: Task) -> Callable[[Run], None]:
        lm = CachedTransformer(task.subject.model, task.subject.vocab, cache_bytes=cache_bytes)
        context = context_of(lm, task.ids)
        program = ConstrainedText(lm, context, mask=lambda text: task.mask, max_tokens=task.steps)

        def call(run: Run) -> None:
            posterior = inference(program, task.N, K)
            run.cache, run.tokens = lm.store.peak_bytes, lm.stats.tokens
            assert len(posterior) and all(particle.num_tokens == task.steps for particle in posterior)

        return call

    return prepare


def generate(how: str) -> Callable[[Task], Callable[[Run], None]]:
    """Prepare `model.generate`: "sampling", "prompt once" or "beams"."""

    def prepare(task: Task) -> Callable[[Run], None]:
        model, eos = task.subject.model, list(task.subject.vocab.eos_ids)
        rows = task.N if how == "prompt once" else 1
        ids = torch.tensor([task.ids]).expand(rows, -1)
        config = GenerationConfig(
            max_new_tokens=task.steps, min_new_tokens=task.steps, top_k=0, pad_token_id=eos[0], eos_token_id=eos,
            num_beams=task.N if how == "beams" else 1, do_sample=how != "beams",
            num_return_sequences=task.N if how == "sampling" else 1,
        )  # fmt: skip

        def call(run: Run) -> None:
            more: dict[str, Any] = {}
            with torch.inference_mode():
                if how == "prompt once":
                    more[CACHE] = model(ids[:1, :-1], use_cache=True, logits_to_keep=1)[CACHE]
                    more[CACHE].batch_repeat_interleave(task.N)
                texts = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **more)
            assert texts.shape == (1 if how == "beams" else task.N, task.prompt + task.steps)

        return call

    return prepare


def theirs(prepare: Callable[[Task], Callable[[], None]]) -> Callable[[Task], Callable[[Run], None]]:
    def of_run(task: Task) -> Callable[[Run], None]:
        call = prepare(task)
        return lambda run: call()

    return of_run


# ---- measuring


@contextmanager
def forwards(model: Any, run: Run) -> Iterator[None]:
    """Count the CPU time, the rows and the tokens of the model's forward passes."""
    begun = started = time.process_time()

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        ids = args[0] if args else kwargs["input_ids"]
        run.passes, run.rows, run.passed = run.passes + 1, run.rows + len(ids), run.passed + ids.numel()
        started = time.process_time()
        if run.passes == 2:
            run.first = started - begun

    def after(*_: Any) -> None:
        run.model += time.process_time() - started

    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def resident() -> int | None:
    """Return the resident memory of this process in bytes, after returning free memory; None without psutil."""
    if psutil is None:
        return None
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


@contextmanager
def peak(found: list[float]) -> Iterator[None]:
    """Append the peak growth of resident memory, polled every few milliseconds."""
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


def take_turns(task: Task, methods: list[Method], repeats: int) -> None:
    for _ in range(repeats):
        for method in methods:
            method.runs.append(once(method, task))


def measure(task: Task, methods: list[Method], repeats: int) -> None:
    """Fill in `methods`: an untimed first run for the memory, then `repeats` timed runs in turns.

    Methods of other libraries run once, for both: they can take minutes.
    """
    own = [method for method in methods if not method.other]
    for method in own:
        found: list[float] = []
        call = method.prepare(task)
        with peak(found):
            call(Run())
        del call
        method.memory = found[0] if found else None
    take_turns(task, own, repeats)
    for method in [method for method in methods if method.other]:
        found = []
        try:
            with peak(found):
                method.runs.append(once(method, task))
        except Exception as error:                      # perhaps the library does not support the task
            methods.remove(method)
            print(f"({method.name} skipped: {type(error).__name__}: {error})")
        method.memory = found[0] if found else None


def median(method: Method, what: Callable[[Run], float]) -> float:
    return statistics.median(map(what, method.runs))


def ratio(method: Method, baseline: Method) -> float:
    """Return the median over the turns of the ratio of CPU times."""
    pairs = zip(method.runs, baseline.runs, strict=not method.other)
    return statistics.median(run.cpu / base.cpu for run, base in pairs)


COLUMNS = (
    "method", "tokens", "total s", "cpu s", "model s", "outside", "x sampling", "x prompt once", "x beams", "peak MB",
    "cache MB",
)


def report(task: Task, methods: list[Method]) -> None:
    baselines = [method for method in methods if method.name.startswith("generate")]
    rows = []
    for m in methods:
        last = m.runs[-1]
        rows.append((
            m.name,
            f"{last.tokens or last.passed:,}",
            f"{median(m, lambda run: run.wall):.2f}",
            f"{median(m, lambda run: run.cpu):.2f}",
            f"{median(m, lambda run: run.model):.2f}",
            f"{1e3 * median(m, lambda run: run.outside(task)):.1f}",
            *(f"{ratio(m, baseline):.2f}" for baseline in baselines),
            "" if m.memory is None else f"{m.memory / 1e6:.0f}",
            "" if last.cache is None else f"{last.cache / 1e6:.0f}",
        ))
    table(str(task), COLUMNS, rows)


def kept(subject: Subject, cache_bytes: int | None, N: int, steps: int, prompt: int) -> None:
    """Print the memory that a long run keeps, compared with `cache_bytes`."""
    budget = cache_bytes or BUDGETS[subject.name]
    once(Method("", ours(None, budget)), Task(subject, N, 3, prompt))       # excludes torch's one-time allocations
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
        print("  resident memory: psutil is not installed (pip install 'llmppl-smc[bench]')")
    else:
        print(f"  resident memory: +{(after - before) / 1e6:.0f} MB kept after the run "
              f"({'under' if after - before <= budget else 'OVER'} cache_bytes), +{found[0] / 1e6:.0f} MB at the peak; "
              f"{before / 1e6:.0f} MB before, the model included")
    sys.stdout.flush()


def prepare_process(threads: int) -> None:
    """Set the number of threads, keep the libraries from talking, and print the machine."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", module="transformers|llamppl|genlm")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    note = f"float32, CPU time, threads: {threads}"
    print(machine("llmppl", "torch", "transformers", "numpy", note=note), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 30], metavar="N")
    parser.add_argument("--steps", type=int, nargs="+", default=[50])
    parser.add_argument("--prompt", type=int, nargs="+", default=[40, 200, 900], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method, in turns")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; CPU time counts all of them")
    parser.add_argument("--cache-bytes", type=int, help="of our runs (default: the library's)")
    parser.add_argument("--others", action="store_true", help="also llamppl and genlm-control")
    parser.add_argument("--quick", action="store_true", help="one small setting of the embedded model")
    parser.add_argument("--rss", action="store_true", help="only print memory kept after 300 steps of N=32")
    options = parser.parse_args()
    if options.quick:
        options.model, options.particles, options.steps, options.prompt = "embedded", [5], [20], [20]
    began = time.perf_counter()
    prepare_process(options.threads)
    names = list(SUBJECTS) if options.model == "all" else [options.model]
    if options.rss:
        for name in names if options.model != "all" else BUDGETS:
            kept(SUBJECTS[name](40), options.cache_bytes, 32, 300, 40)
        return
    if options.others:
        print(peers.installed())
    print(NOTE)
    budget = options.cache_bytes or 2 << 30
    for name in names:
        subject = SUBJECTS[name](max(options.prompt))
        for N, steps, prompt in itertools.product(options.particles, options.steps, options.prompt):
            methods = [
                Method("llmppl, standard", ours(None, budget)),
                Method(f"llmppl, steer K={K}", ours(K, budget)),
                *(Method(f"generate, {how}", generate(how)) for how in ("sampling", "prompt once", "beams")),
            ]
            if options.others:
                methods += [Method(name, theirs(prepare), other=True) for name, prepare in peers.others(K).items()]
            task = Task(subject, N, steps, prompt)
            measure(task, methods, options.repeats)
            report(task, methods)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
