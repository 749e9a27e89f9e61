"""The methods of `generate` on 40 records and 40 choices: right answers, tokens and seconds.

    python benchmarks/one_call.py               # SmolLM2, 15 minutes of one core
    python benchmarks/one_call.py --only choices

The records have a free string without a bound, and the prompt has no example. docs/generate.md has the results.
"""

import argparse
import math
import time
import warnings
from typing import Literal

import numpy as np
from pydantic import BaseModel

from llmppl import CachedTransformer, generate

NAMES = """Maria John Aiko Samuel Fatima Pedro Ingrid Wei Olga Tom Nadia Karl Lucy Omar Rosa Henry Yuki Paul Amina Greta
Felix Ruth Ivan Chloe David Elena Hugo Priya Mark Sofia Liam Zoe Adam Clara Oscar Julia Noah Vera Max Ida""".split()
PETS = "cat", "dog", "horse"
SENTENCES = (
    "{name}, {age}, lives in Porto with a {pet}.", "{name} is {age} years old and has a {pet}.",
    "At {age}, {name} bought a {pet} at last.", "Every morning {name}, who is {age}, feeds the {pet}.",
    "My neighbour {name} turned {age} and got a {pet}.", "The {pet} belongs to {name}, aged {age}.",
    "{name} ({age}) walks the {pet} before school.", "I met {name}, a {age}-year-old with a {pet}.",
)  # fmt: skip
GOOD = (
    "I loved every minute.", "A joy to watch.", "The best film of the year.", "Funny and warm.", "I cried and laughed.",
    "Brilliant from start to end.", "A wonderful cast.", "I would see it again.", "Charming.", "A masterpiece.",
    "It made my day.", "Beautifully filmed.", "The story moved me.", "Great fun for all.", "Superb acting.",
    "I was delighted.", "A clever plot.", "Truly touching.", "What a lovely film.", "Perfect.",
)  # fmt: skip
BAD = (
    "I fell asleep.", "A waste of money.", "The worst film of the year.", "Dull and long.", "I left early.",
    "Terrible acting.", "Nothing happens.", "I want my time back.", "A mess.", "Boring from start to end.",
    "The plot makes no sense.", "Ugly and loud.", "Not funny at all.", "I hated it.", "Poorly filmed.",
    "A great disappointment.", "Awful.", "Avoid it.", "I was annoyed.", "Painful to watch.",
)  # fmt: skip
METHODS = "auto", "greedy", "beam", "importance", "steer"


class Person(BaseModel):
    name: str
    age: int
    pet: Literal["cat", "dog", "horse"] | None


def records(lm):
    """Return 40 prompts with the right record of each."""
    question = 'Write the record {"name": ..., "age": ..., "pet": ...} of the person in this sentence: '
    cases = [(name, 7 + 13 * i % 80, PETS[i % 3], SENTENCES[i % 8]) for i, name in enumerate(NAMES)]
    right = [Person(name=name, age=age, pet=pet) for name, age, pet, _ in cases]
    prompts = [lm.chat(question + sentence.format(name=each.name, age=each.age, pet=each.pet))
               for (*_, sentence), each in zip(cases, right, strict=True)]  # fmt: skip
    return prompts, right, Person


def choices(lm):
    """Return 40 prompts with the right sentiment of each."""
    shots = "Review: A joy to the end.\nSentiment: positive\n\nReview: A boring film.\nSentiment: negative\n\n"
    prompts = [f"{shots}Review: {review}\nSentiment:" for review in GOOD + BAD]
    return prompts, [True] * 20 + [False] * 20, {True: " positive", False: " negative"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["records", "choices"])
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--number", type=int, default=40, help="prompts of each task")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| task | method | right, % | over auto | tokens | CPU s |\n|---|---|---|---|---|---|")
    for task in (records, choices):
        if given.only not in (None, task.__name__):
            continue
        auto = None
        for method in METHODS:
            lm = CachedTransformer.from_pretrained(given.lm)            # with an empty cache
            prompts, right, constraint = task(lm)
            step = max(len(prompts) // given.number, 1)
            prompts, right, start = prompts[::step], right[::step], time.process_time()
            options = {"max_tokens": 60} if task is records else {}
            answers = generate(lm, prompts, constraint, method=method, seed=0, **options)
            found = [None if each.error else each.value for each in answers]
            hits = np.array([value == truth for value, truth in zip(found, right, strict=True)])
            auto = hits if auto is None else auto
            n, over = hits.size, hits.astype(float) - auto
            ahead = f"{100 * over.mean():+.1f} ± {100 * over.std() / math.sqrt(n):.1f}" if method != "auto" else ""
            name = method if method != "auto" else f"auto ({answers[0].method})"
            error = 100 * hits.std() / math.sqrt(n)
            cost = f"{sum(each.tokens for each in answers) / n:.0f} | {(time.process_time() - start) / n:.2f}"
            share = f"{100 * hits.mean():.1f} ± {error:.1f}"
            print(f"| {task.__name__} | {name} | {share} | {ahead} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
