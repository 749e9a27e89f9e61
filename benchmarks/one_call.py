"""The methods of `generate` on 40 extractions and 40 choices: right answers, tokens and seconds.

    python benchmarks/one_call.py --seeds 3     # SmolLM2, 40 minutes of one core
    python benchmarks/one_call.py --lm embedded --seeds 3
    python benchmarks/one_call.py --only choices

SmolLM2 extracts records with a free string without a bound, and the prompt has no example. The embedded model completes
stories: it repeats the name of a child, and the pet, of which six are listed. docs/generate.md has the results.
"""

import argparse
import math
import time
import warnings
from typing import Literal

import numpy as np
from pydantic import BaseModel

from llmppl import CachedTransformer, generate
from llmppl.constraints import Regex

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
METHODS = "auto", "greedy", "beam", "best_of", "importance", "steer"
DRAWN = "auto", "best_of", "importance", "steer"
CHILDREN = "Lily Tom Mia Sam Anna Ben Lucy Max Jane Tim Sue Jack Amy Bob Sara Leo Mary John Emma Fred".split()
ANIMALS = "cat", "dog", "bird", "rabbit", "fish", "horse"


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


def names(lm):
    """Return 40 stories of the embedded model with the name that comes next."""
    places = ("park", "The {} said: My name is"), ("shop", "A kind man asked the {}: Are you")
    cases = [(CHILDREN[i % 20], ("girl", "boy")[i % 2], *places[i // 20]) for i in range(40)]
    prompts = [f"There was a {kind} named {name}. {name} lost a ball in the {place}. {end.format(kind)}"
               for name, kind, place, end in cases]  # fmt: skip
    return prompts, [f" {name}" for name, *_ in cases], Regex(" [A-Z][a-z]{1,8}")


def pets(lm):
    """Return 40 stories of the embedded model with the pet that comes next, and the list of pets."""
    cases = [(CHILDREN[i % 20], ANIMALS[i % 6], ("park", "lake", "shop")[i // 14]) for i in range(40)]
    prompts = [f"{name} had a pet {pet}. One day, {name} took the {pet} to the {place}. They played all day. Then "
               f"they went home. {name} said to the" for name, pet, place in cases]  # fmt: skip
    return prompts, [f" {pet}" for _, pet, _ in cases], [f" {pet}" for pet in ANIMALS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = {task.__name__: task for task in (records, choices, names, pets)}
    parser.add_argument("--only", choices=tasks)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--number", type=int, default=40, help="prompts of each task")
    parser.add_argument("--seeds", type=int, default=1, help="of the methods that draw")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [given.only] if given.only else ["names", "pets"] if given.lm == "embedded" else ["records", "choices"]
    source = {"engine": "numpy"} if given.lm == "embedded" else {"name": given.lm}
    print("| task | method | right, % | over auto | tokens | CPU s |\n|---|---|---|---|---|---|")
    for task in chosen:
        auto = None
        for method in METHODS:
            runs, tokens, start = [], 0, time.process_time()
            for seed in range(given.seeds if method in DRAWN else 1):
                lm = CachedTransformer.from_pretrained(**source)        # with an empty cache
                prompts, right, constraint = tasks[task](lm)
                step = max(len(prompts) // given.number, 1)
                prompts, right = prompts[::step], right[::step]
                options = {"max_tokens": 60} if task == "records" else {}
                answers = generate(lm, prompts, constraint, method=method, seed=seed, progress=False, **options)
                found = [None if each.error else each.value for each in answers]
                runs.append([value == truth for value, truth in zip(found, right, strict=True)])
                tokens += sum(each.tokens for each in answers)
            hits = np.mean(runs, axis=0)                                # of each prompt, over the seeds
            auto = hits if auto is None else auto
            number, over = len(runs) * hits.size, hits - auto
            ahead = f"{100 * over.mean():+.1f} ± {100 * over.std() / math.sqrt(hits.size):.1f}"
            name = f"auto ({answers[0].method})" if method == "auto" else method
            share = f"{100 * hits.mean():.1f} ± {100 * hits.std() / math.sqrt(hits.size):.1f}"
            cost = f"{tokens / number:.0f} | {(time.process_time() - start) / number:.2f}"
            print(f"| {task} | {name} | {share} | {ahead if method != 'auto' else ''} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
