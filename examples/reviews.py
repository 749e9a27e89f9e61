"""200 reviews into nested records, written to a file, with the confidence of each field, while the process is killed.

The program starts itself as a worker that calls `generate(lm, prompts, Review, to=..., resume=True)`. It kills the
worker twice, after a fifth and two fifths of the answers, and starts it again. The reviews are composed from phrases,
so the right records are known.

What to look for: no review is missing or answered twice, whatever the kills. Of 600 fields of 200 reviews on SmolLM2,
`--method greedy` has 420 right, for 19 tokens and 0.43 CPU seconds a record. `best_of`, which has confidences, has 374
right, for 91 and 1.61. The model is sure of wrong fields, too: 241 of 344 above .9 are right, and 133 of the other 256.

    python examples/reviews.py [--reviews 200] [--method best_of] [--lm smollm2] [--quick]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from llmppl import CachedTransformer, generate, load_results
from llmppl.tasks import Generation

Product = Literal["lamp", "kettle", "chair"]
PRODUCTS: list[Product] = ["lamp", "kettle", "chair"]
JUDGEMENTS = {"good": ("It works very well.", "I love it."), "bad": ("It broke at once.", "It is useless.")}
DELIVERIES = {
    (False, False): "It came in time and in one piece.",
    (True, False): "It came two weeks late, but in one piece.",
    (False, True): "It came in time, but the box was crushed.",
    (True, True): "It came late, and the box was crushed.",
}


class Delivery(BaseModel):
    late: bool
    damaged: bool


class Review(BaseModel):
    product: Product
    judgement: Literal["good", "bad"]
    delivery: Delivery


def reviews(num: int) -> tuple[list[str], list[Review]]:
    """Return prompts with two examples, and the right record of each."""
    rng, texts, right = np.random.default_rng(7), [], []
    for _ in range(num + 2):
        late, damaged = (bool(value) for value in rng.integers(2, size=2))
        record = Review(
            product=PRODUCTS[rng.integers(3)],
            judgement=("good", "bad")[rng.integers(2)],
            delivery=Delivery(late=late, damaged=damaged),
        )
        judgement = JUDGEMENTS[record.judgement][rng.integers(2)]
        texts.append(f"I bought a {record.product}. {DELIVERIES[late, damaged]} {judgement}")
        right.append(record)
    shots = ""
    for text, record in zip(texts[:2], right[:2], strict=True):
        shots += f"Review: {text}\nRecord: {record.model_dump_json()}\n\n"
    return [f"{shots}Review: {text}\nRecord: " for text in texts[2:]], right[2:]


def work(given: argparse.Namespace) -> None:
    """Answer all reviews that the file does not have."""
    warnings.simplefilter("ignore")
    lm = CachedTransformer.from_pretrained(given.lm)

    def tell(answer: Generation) -> None:
        print(answer.text, flush=True)

    prompts, _ = reviews(given.reviews)
    options = {"method": given.method, "seed": 0, "together": 4}
    generate(lm, prompts, Review, to=given.to, resume=True, on_answer=tell, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=int, default=200)
    parser.add_argument("--method", default="best_of", choices=["best_of", "greedy", "importance", "steer"])
    parser.add_argument("--lm", help="a name that from_pretrained takes; default: the embedded model")
    parser.add_argument("--to", help="file of results; default: a temporary one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="5 reviews")
    given = parser.parse_args()
    given.reviews = 5 if given.quick else given.reviews
    if given.worker:
        return work(given)
    with tempfile.TemporaryDirectory() as folder:
        given.to = given.to or os.path.join(folder, "reviews.db")
        command = [sys.executable, __file__, "--worker", "--to", given.to, "--reviews", str(given.reviews)]
        command += ["--method", given.method] + (["--lm", given.lm] if given.lm else [])
        for _ in range(2):
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert worker.stdout is not None
            for _ in range(max(given.reviews // 5, 1)):
                worker.stdout.readline()
            worker.send_signal(signal.SIGKILL)
            worker.communicate()
            print(f"killed: {len(load_results(given.to))} of {given.reviews} answers are in the file")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report(load_results(given.to, Review), reviews(given.reviews)[1])


def report(results: Any, right: list[Review]) -> None:
    """Print the number of right fields, the confidences, and the cost of a record."""
    found: list[bool] = []
    beliefs: list[float] = []
    for result, truth in zip(results, right, strict=True):
        for name in Review.model_fields:
            value = getattr(result.value, name)
            found.append(value == getattr(truth, name))
            beliefs.append(result.fields[name].get(value, 0.0) if result.fields else np.nan)
    hits, sure = np.array(found), np.array(beliefs)
    num = len(right)
    print(f"{hits.sum()} of {hits.size} fields are right")
    if not np.isnan(sure).all():
        high = sure >= 0.9
        print(f"right of those with a probability of .9: {hits[high].sum()} of {high.sum()}; of the others:"
              f" {hits[~high].sum()} of {(~high).sum()}")  # fmt: skip
    print(f"a record: {sum(each.tokens for each in results) / num:.0f} tokens,"
          f" {sum(each.cpu_seconds for each in results) / num:.2f} CPU s")  # fmt: skip


if __name__ == "__main__":
    main()
