"""A service: CPU seconds, waits and memory for 1 to 64 callers at a time, compared with calls one after another.

    python benchmarks/serving.py                # the embedded model, five minutes
    python benchmarks/serving.py --soak 600     # and callers that leave at random for ten minutes

Each request asks for a typed record by steering (N=4, K=2). "one by one" answers the same requests in a loop, and
`run_many` in its lanes. A wait is the time between a request and its answer, when all requests come at once. The last
tables give the growth of the memory over --requests choices, and the counts of a soak with cancelled calls.
"""

import argparse
import random
import resource
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Literal

import numpy as np
from pydantic import BaseModel
from tables import machine, table

from llmppl import CachedTransformer, generate, smc_steer
from llmppl.models.programs import ConstrainedText
from llmppl.serving import Service
from llmppl.tasks import run_many

NUMBERS = 1, 8, 16, 64
WORDS = "big small old red blue happy sad little brown black white funny good bad fast slow".split()


class Pet(BaseModel):
    kind: Literal["cat", "dog", "bird", "fish"]
    age: Literal[1, 2, 3, 4, 5]
    name: Literal["Tom", "Lily", "Max", "Mia"]


def prompts(number: int) -> list[str]:
    return [f"{i}. The {WORDS[i % len(WORDS)]} pet is" for i in range(number)]


def request(lm: CachedTransformer, prompt: str, seed: int) -> object:
    return generate(lm, prompt, Pet, method="steer", N=4, K=2, seed=seed)


def one_by_one(lm: CachedTransformer, number: int) -> list[float]:
    start, waits = time.perf_counter(), []
    for i, prompt in enumerate(prompts(number)):
        request(lm, prompt, i)
        waits.append(time.perf_counter() - start)
    return waits


def in_lanes(lm: CachedTransformer, number: int) -> list[float]:
    start = time.perf_counter()

    def run(prompt: str, rng: np.random.Generator) -> object:
        return smc_steer(ConstrainedText(lm, prompt, Pet), 4, 2, rng=rng)

    return [time.perf_counter() - start for _ in run_many(run, prompts(number), seed=0, progress=False)]


def by_service(lm: CachedTransformer, number: int) -> list[float]:
    waits = []

    def ask(i: int) -> None:
        start = time.perf_counter()
        service.generate(prompts(number)[i], Pet, method="steer", N=4, K=2, seed=i).result()
        waits.append(time.perf_counter() - start)

    with Service(lm) as service, ThreadPoolExecutor(number) as threads:
        list(threads.map(ask, range(number)))
    return waits


def soak(lm: CachedTransformer, seconds: float) -> list[str]:
    """Ask from 16 threads, of which each cancels every third call at a random moment; return the counts."""
    wrong = list[object]()

    def ask(thread: int) -> None:
        rng, i = random.Random(thread), 0
        while time.monotonic() < end:
            i += 1
            call = service.generate(prompts(16)[thread], Pet, method="steer", N=4, K=2, seed=i % 5)
            if i % 3 == 0:
                time.sleep(rng.random() * 0.05)
                call.cancel()
            try:
                found = call.result(60)
                wrong.extend([found] * (str(found) != right[thread, i % 5]))
            except CancelledError:
                pass

    right = {(thread, seed): str(request(lm, prompts(16)[thread], seed)) for thread in range(16) for seed in range(5)}
    end = time.monotonic() + seconds
    with Service(lm) as service:
        threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = service.stats
    return [f"{seconds:.0f}", *map(str, (stats.done, stats.cancelled, stats.failed, stats.running, len(wrong)))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a service.")
    parser.add_argument("--lm", default=None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--soak", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(machine("llmppl", "numpy"))
    lm, rows = CachedTransformer.from_pretrained(args.lm), []
    request(lm, "warm", 0)
    for number in NUMBERS:
        found = {}
        for _ in range(args.repeats):
            for run in (one_by_one, in_lanes, by_service):
                lm.clear()
                before = time.process_time()
                waits = run(lm, number)
                found.setdefault(run, []).append((time.process_time() - before, np.median(waits), max(waits)))
        for run, each in found.items():
            cpu, median, worst = np.median(each, axis=0)
            rows.append([number, run.__name__.replace("_", " "), f"{cpu:.2f}", f"{median:.2f}", f"{worst:.2f}"])
    table("Requests at a time", ["requests", "how", "CPU s", "median wait s", "worst wait s"], rows)
    memory = []
    with Service(lm) as service:
        for part in range(5):
            for start in range(0, args.requests // 5, 50):
                calls = [service.generate(f"{part} {start + i}", ["a", "b"]) for i in range(50)]
                assert all(call.result() for call in calls)
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    table("Largest memory after each fifth of --requests choices, MB", [*"12345"], [memory])
    heads = ["seconds", "done", "cancelled", "failed", "left", "wrong"]
    table("16 threads that cancel every third call", heads, [soak(lm, args.soak)])


if __name__ == "__main__":
    main()
