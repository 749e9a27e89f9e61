"""Benefit of steering: four tasks with known answers, a small instruct model, and eleven ways to use it.

The tasks are in `task_instances.py`; the model is SmolLM2 (135M parameters). A JSONL file keeps the drawn texts line by
line, and the tables are printed from it, so a run can be stopped and resumed:

    python benchmarks/tasks.py                              # two hours of one core; --resume continues a stopped run
    python benchmarks/tasks.py --report                     # the tables of the stored results
    python benchmarks/tasks.py --instances 5 --seeds 1      # a test that it works

`--report --summary benchmarks/results/quality.json` writes the means that `tools/pictures.py` draws.

A *set* is the result of one program: N texts with their log-probabilities and log-weights. One set serves several
methods. From the same draws under masks, local masking takes one text, a vote the most frequent answer, best-of-N the
likeliest text, and importance sampling the answer with the largest weight. The runs alternate over tasks and sets, all
of one seed first. Fourteen instances share their batches (`repeat`), with a cache that holds only their prompts.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
import transformers
from tables import machine
from task_control import with_genlm_control
from task_instances import Fluency, Task, concept_sets, extraction, keywords, pattern, text_to_sql
from task_report import CONTROL, report

from llmppl import EOS, CachedTransformer, ConstrainedText, Rule, importance_sampling, repeat, smc_standard, smc_steer
from llmppl.constraints import index_of
from llmppl.inference import Particles

TOGETHER = 14                                           # number of instances that share their batches
COLD = Rule(temperature=0.5)
K = 3


class Writer(ConstrainedText):
    """Text of an instance. `how` names the proposal of a token:

    masked   the tokens that keep the text admitted; a text that fails `Task.admits` at its end is no answer
    steered  the same, but a text that fails `Task.admits` dies
    free     all tokens
    greedy   the most probable token that keeps the text admitted; `most` the most probable of all
    tested   all tokens, each tested when it is drawn (AWRS); the end of the text is also tested by `Task.admits`
    """

    def __init__(self, context: Any, task: Task, index: Any, how: str, rule: Rule, end: str = "eos") -> None:
        bound = how not in ("free", "most")
        super().__init__(
            context.lm, context, index if bound else None, max_tokens=task.max_tokens, end=end, rule=rule
        )
        self.admits, self.how, self.log_prob = task.admits, how, 0.0

    def step(self) -> None:
        p = self.target(self.next_token(self.context))
        proposal: Any = p
        for mask in [*self._guide.masks(self.state, self.num_tokens), *self.own_masks(p.support).values()]:
            proposal = proposal.masked(mask)
        if self.how == "tested":
            proposal = p.where(functools.partial(self.fits, mask))
        elif self.how in ("greedy", "most"):
            proposal = proposal.top_k(1)
        token = self.sample(p, proposal=None if proposal is p else proposal)
        self.log_prob += p.log_prob(token)
        if self.append(token):
            self.context += token
            if self.index is not None:
                self.state = self.index.advance(self.state, token)
                if self.is_over():
                    self.finish()
        if self.finished and self.how in ("steered", "tested"):
            self.condition(self.admits(str(self.s)))

    def fits(self, mask: Any, token: Any) -> bool:
        return bool(mask[token]) and (token != EOS or self.admits(str(self.s)))


@dataclass(frozen=True)
class Set:
    """Program with its algorithm: N samples, or N particles steered or filtered."""

    how: str
    run: Callable[..., Particles[Any]]
    N: int
    rule: Rule = Rule()

    def __call__(self, model: Writer, rng: np.random.Generator) -> Particles[Any]:
        options = {"K": K} if self.run is smc_steer else {}
        return self.run(model, self.N, rng=rng, progress=False, **options)


SETS = {
    "greedy, free": Set("most", importance_sampling, 1),
    "greedy, masked": Set("greedy", importance_sampling, 1),
    "free": Set("free", importance_sampling, 10),
    "masked": Set("masked", importance_sampling, 20),
    "masked, colder": Set("masked", importance_sampling, 20, COLD),
    "steering, N=5": Set("steered", smc_steer, 5),
    "steering, N=10": Set("steered", smc_steer, 10),
    "steering, N=10, colder": Set("steered", smc_steer, 10, COLD),
    "AWRS": Set("tested", smc_standard, 10),
}


@dataclass
class Bench:
    """Model, tasks, and result file."""

    lm: CachedTransformer
    tasks: list[Task]
    results: Path
    end: str                                            # the way a text ends, as in ConstrainedText

    def __post_init__(self) -> None:
        self.indices: dict[int, Any] = {}               # by the identity of the language

    def index(self, language: Any) -> Any:
        if id(language) not in self.indices:
            self.indices[id(language)] = index_of(language, self.lm.vocab)
        return self.indices[id(language)]

    def run(self, num_instances: int | None, seeds: int) -> None:
        done = {(each["task"], each["seed"], each["set"], each["instance"]) for each in read(self.results)}
        for seed, start, task, name in turns(self.tasks, num_instances, seeds):
            numbers = range(start, min(start + TOGETHER, len(task.instances), num_instances or math.inf))
            if name.startswith("greedy") and seed:
                continue                                # greedy texts do not depend on the seed
            if all((task.name, seed, name, number) in done for number in numbers):
                continue
            self.keep(list(self.together(task, seed, name, numbers)))

    def together(self, task: Task, seed: int, name: str, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield a line of results for each of the instances."""
        lm = CachedTransformer(self.lm.model, self.lm.vocab)
        instances = [task.instances[number] for number in numbers]
        contexts = [lm.at(int(i) for i in self.lm.chat(instance.messages).tokens) for instance in instances]
        for context in contexts:
            context.log_probs()
        indices = [self.index(instance.language) for instance in instances]
        method, before = SETS[name], lm.stats.tokens
        writers = iter(
            Writer(context, task, index, method.how, method.rule, self.end)
            for context, index in zip(contexts, indices, strict=True)
        )
        rng = np.random.default_rng([seed, numbers[0], *name.encode(), *task.name.encode()])
        began = time.process_time()
        runs = repeat(lambda rng: method(next(writers), rng), len(instances), rng=rng, progress=False).runs
        seconds = (time.process_time() - began) / len(instances)
        tokens = (lm.stats.tokens - before) / len(instances)
        for number, instance, context, run in zip(numbers, instances, contexts, runs, strict=True):
            yield {
                "task": task.name, "seed": seed, "set": name, "instance": number, "log_ml": float(run.log_ml),
                "tokens": tokens, "seconds": seconds, "log_probs": [p.log_prob for p in run],
                "distinct": num_prefixes([p.context.tokens[len(context) :] for p in run]),
                **task.judge(instance, [str(p.s) for p in run], [p.log_weight for p in run]),
            }  # fmt: skip

    def run_control(self, num_instances: int) -> None:
        """Run the first instances of each task with the AWRS of another library."""
        done = {(each["task"], each["instance"]) for each in read(self.results) if each["set"] == CONTROL}
        for number in range(num_instances):
            for task in self.tasks:
                if (task.name, number) not in done:
                    index = self.index(task.instances[number].language)
                    line = with_genlm_control(self.lm, task, number, index, SETS["AWRS"].N)
                    self.keep([{"task": task.name, "seed": 0, "set": CONTROL, "instance": number, **line}])

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        with open(self.results, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def num_prefixes(texts: list[Sequence[int]]) -> list[int]:
    """Count the contexts beyond the prompt that the first text, the first two texts, ... ran through the model."""
    met: set[tuple[int, ...]] = set()
    counts = []
    for text in texts:
        met |= {tuple(map(int, text[:n])) for n in range(1, len(text) + 1)}
        counts.append(len(met))
    return counts


def turns(tasks: list[Task], num_instances: int | None, seeds: int) -> Iterator[tuple[int, int, Task, str]]:
    """Yield (seed, first instance, task, set) in the order of the runs; every beginning of them is a fair sample."""
    longest = max(len(task.instances) for task in tasks)
    for seed in range(seeds):
        for start in range(0, min(longest, num_instances or longest), TOGETHER):
            for task in tasks:
                for name in SETS:
                    if start < len(task.instances):
                        yield seed, start, task, name


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="smollm2", help="a model with a chat template (SmolLM2, 135M)")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (bfloat16: half the time of float32)")
    parser.add_argument("--instances", type=int, help="number of instances per task (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="TASK", help="extraction, pattern, keywords, sql")
    parser.add_argument("--end", default="eos", choices=("eos", "boundary"), help="way a text ends (eos)")
    parser.add_argument("--commongen", type=Path, help="folder with CommonGen's dev_concepts.jsonl, to use its sets")
    parser.add_argument("--control", type=int, default=5, help="instances per task with genlm-control, if installed")
    parser.add_argument("--results", type=Path, default=Path("out/tasks.jsonl"))
    parser.add_argument("--resume", action="store_true", help="continue the existing result file")
    parser.add_argument("--summary", type=Path, help="JSON file for the means over the tasks")
    parser.add_argument("--report", action="store_true", help="print the tables of the existing result file")
    options = parser.parse_args()
    if not options.report:
        if options.results.exists() and not options.resume:
            parser.error(f"{options.results} exists: --resume continues it, --report prints its tables")
        options.results.parent.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        note = f"{options.dtype}, CPU time, one thread"
        print(machine("llmppl", "torch", "transformers", "numpy", note=note), flush=True)
        lm = CachedTransformer.from_pretrained(options.lm, dtype=options.dtype)
        sets = concept_sets(options.commongen)
        tasks = [extraction(), pattern(), keywords(Fluency(CachedTransformer.from_pretrained()), sets), text_to_sql()]
        tasks = [task for task in tasks if task.name in (options.only or task.name)]
        bench = Bench(lm, tasks, options.results, options.end)
        if peers.genlm_control is not None:
            bench.run_control(options.control)
        bench.run(options.instances, options.seeds)
    summary = report(read(options.results))
    if options.summary:
        options.summary.write_text("[\n" + ",\n".join(map(json.dumps, summary)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
