"""Cost of a step on a GPU: Llama-shaped models with random weights, standard SMC and steering, beside transformers.

    python benchmarks/gpu.py --out FILE                 # at most 8 minutes on one H100 or H200
    python benchmarks/gpu.py --dry-run --out FILE       # the same code with tiny shapes, on a CPU
    python benchmarks/gpu.py --table FILE               # the tables of README and docs, from a file

Nothing is downloaded: the weights are random, in bfloat16, and the tokens are made up. The package needs no
installation, since the script finds it in its own copy of the tree; greenlet, lark and pydantic must be installed.

A *cell* is a model, a method, N particles, a length of the prompt, and with or without a JSON schema. One warm run
comes first; the measured run starts with an empty cache. Its first step, which reads the prompt, is reported apart. The
columns are the median milliseconds of a step, the share of the time outside the language model, rows of the model and
bytes to the host in a step, and the peak of the memory of the device. `generate` is the method of that name of
transformers, which samples N texts of the same length and keeps the keys and values of each prompt. In three steps of
the cells with N = 32, torch's profiler counts the kernels and the time in which the device computes; the rest of a step
is Python's. Cells run in the order of their importance. After
`--minutes` the rest is left out, and the file lists it. The file is written after every cell.

Before the cells, `exactness` compares the engine on the device with plain forward passes (`check_engine`), and a run of
SMC with exact enumeration. If vLLM is installed, its engine runs the smallest model.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from subjects import Subject, context_of, made_up
from tables import machine, table
from transformers import LlamaConfig, LlamaForCausalLM

from llmppl import (
    CachedTransformer,
    Categorical,
    ConstrainedText,
    JsonSchema,
    Model,
    enumerate_exact,
    smc_standard,
    smc_steer,
)
from llmppl.testing import check_engine

K = 3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "pet": {"enum": ["dog", "cat"]}},
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
SHAPES = {                                              # vocabulary, width, inner width, layers, heads, key heads
    "135M": (49_152, 576, 1_536, 30, 9, 3),
    "1B": (128_256, 2_048, 8_192, 16, 32, 8),
    "8B": (128_256, 4_096, 14_336, 32, 32, 8),
}
TINY = {"tiny": (600, 32, 64, 2, 4, 2)}
PROFILED = 32                                           # N of the cells whose kernels are counted


@dataclass(frozen=True)
class Cell:
    """One measurement to make."""

    model: str
    method: str                                         # "generate", "standard" or "steer"
    N: int
    prompt: int                                         # tokens
    schema: bool


@dataclass
class Size:
    """Sizes of a run of this benchmark."""

    shapes: dict[str, tuple[int, ...]]
    particles: tuple[int, ...]
    prompts: tuple[int, ...]
    steps: int
    runs: int                                           # of the check of exactness


FULL = Size(SHAPES, (8, 32, 128, 256), (100, 2_000), 24, 200)
DRY = Size(TINY, (2, 3), (5, 9), 4, 40)


def cells(size: Size) -> Iterator[Cell]:
    """Yield the cells of all models, the important ones first: short prompts, few particles, no schema."""
    for prompt in size.prompts:
        for schema in (False, True):
            for N in size.particles:
                for model in size.shapes:
                    for method in ("generate", "standard", "steer"):
                        if method != "generate" or not schema:
                            yield Cell(model, method, N, prompt, schema)


def subject(name: str, shape: tuple[int, ...], longest: int, device: str, dtype: torch.dtype) -> Subject:
    """Return a Llama of the shape with random weights, made on the device."""
    V, width, inner, layers, heads, key_heads = shape
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4_096,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return made_up(name, model, longest)


# ---- the methods


def generate(given: Subject, lm: CachedTransformer, cell: Cell, steps: int) -> dict[str, Any]:
    """Sample N texts by `generate` of transformers."""
    ids = torch.tensor([given.ids[: cell.prompt]] * cell.N, device=given.model.device)
    times = [time.perf_counter()]

    def note(_: Any, logits: Any) -> Any:
        synchronise(given.model.device)
        times.append(time.perf_counter())
        return logits

    given.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=steps,
        min_new_tokens=steps,
        logits_processor=[note],
        pad_token_id=0,
    )
    taken = milliseconds(times)
    return {"first_ms": taken[0], "step_ms": statistics.median(taken[1:])}


def particles(given: Subject, lm: CachedTransformer, cell: Cell, steps: int) -> dict[str, Any]:
    """Run standard SMC or steering, with an empty cache."""
    context = context_of(lm, given.ids[: cell.prompt])
    if cell.schema:
        program = ConstrainedText(lm, context, JsonSchema(SCHEMA), max_tokens=400)
    else:
        program = ConstrainedText(lm, context, mask=lambda text: lm.vocab.not_eos, max_tokens=400)
    times = [time.perf_counter()]

    def note(step: Any) -> None:
        times.append(time.perf_counter())

    options: dict[str, Any] = {"seed": 0, "max_steps": steps, "on_step": note, "progress": False}
    if cell.method == "standard":
        posterior = smc_standard(program, cell.N, **options)
    else:
        posterior = smc_steer(program, cell.N, K, **options)
    stats = posterior.stats
    taken = milliseconds(times)
    return {
        "first_ms": taken[0],
        "step_ms": statistics.median(taken[1:]),
        "python_share": 1 - stats.seconds_lm / stats.seconds,
        "masks_share": stats.seconds_masks / stats.seconds,
        "rows_a_step": stats.rows / len(taken),
        "bytes_to_host_a_step": stats.bytes_to_host / len(taken),
    }


def milliseconds(times: list[float]) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(times)]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(given: Subject, lm: CachedTransformer, cell: Cell, steps: int) -> dict[str, Any]:
    """Return the measurements of a cell, or its error where the device has too little memory."""
    method = generate if cell.method == "generate" else particles
    on_gpu = given.model.device.type == "cuda"
    try:
        lm.clear()
        method(given, lm, cell, 2)                      # warm: kernels are chosen, memory is allocated
        lm.clear()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found = method(given, lm, cell, steps)
        if on_gpu:
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if cell.N == PROFILED:
                lm.clear()
                found |= profiled(lambda: method(given, lm, cell, 3), 3)
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    return found


def profiled(run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Return the kernels that a step of a run launches, and the milliseconds that the device computes."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    launches = 0
    microseconds = 0.0
    for event in profile.key_averages():
        microseconds += event.self_device_time_total
        if "LaunchKernel" in event.key:
            launches += event.count
    return {"launches_a_step": launches / steps, "device_ms_a_step": microseconds / 1000 / steps}


# ---- exactness


class Two(Model):
    """Two tokens of the language model, the second among four, and a weight."""

    def __init__(self, lm: CachedTransformer, ids: list[int]) -> None:
        super().__init__()
        self.context = context_of(lm, ids)
        self.coin = Categorical({"x": 0.3, "y": 0.7})

    def step(self) -> None:
        letter = self.sample(self.coin)
        for token in (300, 400) if letter == "x" else (500,):
            self.observe(self.transformer(self.context), token)
            self.context += token
        self.score(len(letter))
        self.finish()


def exactness(device: str, runs: int) -> dict[str, Any]:
    """Compare the engine with plain forward passes, and Z-hat with enumeration."""
    given = subject("tiny", TINY["tiny"], 60, device, torch.float32)
    engine = CachedTransformer(given.model, given.vocab).engine
    report = check_engine(engine, ids=given.ids, size=len(given.vocab), contexts=60)
    lm = CachedTransformer(given.model, given.vocab)    # check_engine keeps the other engine
    exact = enumerate_exact(Two(lm, given.ids[:20])).log_ml
    found = [smc_standard(Two(lm, given.ids[:20]), 4, seed=seed, progress=False).log_ml for seed in range(runs)]
    ratios = np.exp(np.array(found) - exact)
    return {
        "engine": str(report),
        "log_z": exact,
        "mean_z_hat_over_z": float(ratios.mean()),
        "standard_error": float(ratios.std(ddof=1) / math.sqrt(runs)),
    }


def vllm(steps: int) -> dict[str, Any] | None:
    """Return the measurements of vLLM's engine on the embedded model; None if vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        lm = CachedTransformer.from_pretrained(engine="transformers")
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        lm = CachedTransformer.from_pretrained(folder, engine="vllm", max_model_len=512)
        times = [time.perf_counter()]
        program = ConstrainedText(lm, "Once upon a time", mask=lambda text: lm.vocab.not_eos, max_tokens=400)

        def note(step: Any) -> None:
            times.append(time.perf_counter())

        smc_standard(program, PROFILED, seed=0, max_steps=steps, on_step=note, progress=False)
        lm.engine.close()
    return {"N": PROFILED, "step_ms": statistics.median(milliseconds(times)[1:])}


# ---- the file and its tables


def run(size: Size, device: str, minutes: float, out: Path) -> dict[str, Any]:
    """Measure the cells until the time is over. Write the file after each."""
    start = time.perf_counter()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    results: dict[str, Any] = {
        "device": name,
        "machine": machine("torch", "transformers"),
        "exactness": exactness(device, size.runs),
        "vllm": vllm(size.steps),
        "cells": [],
        "left_out": [],
    }
    longest = max(size.prompts)
    made: dict[str, tuple[Subject, CachedTransformer]] = {}
    for cell in cells(size):
        if time.perf_counter() - start > 60 * minutes:
            results["left_out"].append(asdict(cell))
        else:
            if cell.model not in made:
                given = subject(cell.model, size.shapes[cell.model], longest, device, dtype)
                made[cell.model] = given, CachedTransformer(given.model, given.vocab)
            found = measure(*made[cell.model], cell, size.steps)
            results["cells"].append({**asdict(cell), **found})
            print(f"{time.perf_counter() - start:5.0f} s  {cell}  {found}", flush=True)
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


COLUMNS = {                                             # of a cell: its title, and its form
    "first_ms": ("prompt ms", ".0f"),
    "step_ms": ("step ms", ".1f"),
    "python_share": ("outside the model", ".0%"),
    "rows_a_step": ("rows", ".0f"),
    "bytes_to_host_a_step": ("bytes to host", ",.0f"),
    "launches_a_step": ("launches", ",.0f"),
    "device_ms_a_step": ("device ms", ".1f"),
    "peak_gb": ("peak GB", ".1f"),
}


def show(results: dict[str, Any]) -> None:
    """Print the tables of a file."""
    exact = results["exactness"]
    print(f"{results['device']}; {results['machine']}")
    print(f"mean Z-hat / Z: {exact['mean_z_hat_over_z']:.4f} +- {exact['standard_error']:.4f}")
    if results["vllm"] is not None:
        print(f"vLLM, N={results['vllm']['N']}: {results['vllm']['step_ms']:.1f} ms a step")
    rows = []
    for cell in results["cells"]:
        row = [cell["model"], cell["method"], cell["N"], cell["prompt"], "yes" if cell["schema"] else "no"]
        for key, (_, form) in COLUMNS.items():
            row.append(format(cell[key], form) if key in cell else cell.get("error", "-"))
        rows.append(row)
    titles = ["model", "method", "N", "prompt", "schema", *(title for title, _ in COLUMNS.values())]
    table("A step", titles, rows, f"{len(results['left_out'])} cells were left out")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="time after which no cell begins (default: 7)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a file, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        return show(json.loads(options.table.read_text(encoding="utf-8")))
    if options.out is None:
        parser.error("give --out FILE for the results, or --table FILE for the tables of a file")
    if options.dry_run:
        torch.set_num_threads(1)
        show(run(DRY, "cpu", options.minutes, options.out))
    elif torch.cuda.is_available():
        show(run(FULL, "cuda", options.minutes, options.out))
    else:
        parser.error("no GPU was found: --dry-run runs tiny shapes on the CPU")


if __name__ == "__main__":
    main()
