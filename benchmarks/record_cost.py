"""Cost of a record by each method of `generate`: right records and fields, tokens and CPU seconds a record.

    python benchmarks/record_cost.py [--records 24] [--methods greedy best_of] [--out FILE]

A record has seven fields: two free strings, two numbers, two choices and a bool. Half of the prompts are a question
to the chat model, and half come after two examples. Names, towns and goods are drawn with a fixed seed, so that no
prompt was used to choose a default. Every method begins with an empty cache. ± is the standard error over the records
of the difference from greedy decoding. `results/record_cost.json` has the figures of docs/generate.md.
"""

import argparse
import json
import time
import warnings
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field
from tables import machine

from llmppl import CachedTransformer, generate

NAMES = """Amara Bjorn Camille Dmitri Elif Farid Gudrun Hiroshi Ines Jamal Katya Lorenzo Mireille Nadia Oskar Priya
Quentin Rosa Stefan Tomoko Ulrich Vera Wanda Yusuf""".split()
TOWNS = """Aarhus Bilbao Cardiff Durban Eindhoven Florence Galway Hobart Izmir Jaipur Kampala Leipzig Montreal Nice
Odense Porto Quebec Rotterdam Santiago Tampere Utrecht Valencia Winnipeg Zagreb""".split()
GOODS = "lamp", "chair", "kettle", "carpet", "mirror", "bicycle"
COLOURS = "red", "green", "white", "black"
SENTENCES = (
    "{customer} from {town} ordered {quantity} {colour} {goods}s for {price} euros{gift}.",
    "Please send {quantity} {goods}s in {colour} to {town}; {customer} has paid {price} euros{gift}.",
    "For {price} euros, {customer} bought {quantity} {colour} {goods}s, to be delivered in {town}{gift}.",
)
GIFT = {True: ", as a gift", False: ""}
SHAPE = '{"customer": ..., "town": ..., "goods": ..., "colour": ..., "quantity": ..., "price": ..., "gift": ...}'


class Order(BaseModel):
    customer: str
    town: str
    goods: Literal["lamp", "chair", "kettle", "carpet", "mirror", "bicycle"]
    colour: Literal["red", "green", "white", "black"]
    quantity: int = Field(ge=1, le=99)
    price: int = Field(ge=1, le=9999)
    gift: bool


def orders(num):
    """Return sentences and their orders; the first two are the examples."""
    rng = np.random.default_rng(64)
    names, towns = rng.permutation(NAMES), rng.permutation(TOWNS)
    pairs = []
    for i in range(num + 2):
        order = Order(
            customer=names[i % 24],
            town=towns[i % 24],
            goods=GOODS[rng.integers(6)],
            colour=COLOURS[rng.integers(4)],
            quantity=int(rng.integers(2, 30)),
            price=int(rng.integers(20, 900)),
            gift=bool(rng.integers(2)),
        )
        values = {**order.model_dump(), "gift": GIFT[order.gift]}
        pairs.append((SENTENCES[i % 3].format(**values), order))
    return pairs


def prompts_of(lm, num):
    """Return the prompts with the right order of each."""
    examples, cases = orders(num)[:2], orders(num)[2:]
    shots = "".join(f"Sentence: {text}\nRecord: {order.model_dump_json()}\n\n" for text, order in examples)
    prompts = []
    for i, (text, _) in enumerate(cases):
        question = f"Write the order in this sentence as a record {SHAPE}.\nSentence: {text}"
        prompts.append(f"{shots}Sentence: {text}\nRecord: " if i % 2 else lm.chat(question))
    return prompts, [order for _, order in cases]


METHODS = {
    "greedy": {"method": "greedy"},
    "beam": {"method": "beam"},
    "best_of, N=5": {"method": "best_of", "N": 5},
    "best_of": {"method": "best_of"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--out", help="write the figures to this file as JSON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lm = CachedTransformer.from_pretrained(given.lm)
    prompts, right = prompts_of(lm, given.records)
    hits = {method: np.zeros((given.records, 7)) for method in given.methods}
    tokens, seconds = dict.fromkeys(given.methods, 0), dict.fromkeys(given.methods, 0.0)
    for i, (prompt, truth) in enumerate(zip(prompts, right, strict=True)):
        for method in given.methods:
            lm.clear()
            start = time.process_time()
            answer = generate(lm, prompt, Order, seed=i, **METHODS[method])
            seconds[method] += time.process_time() - start
            tokens[method] += answer.tokens
            for j, name in enumerate(Order.model_fields):
                hits[method][i, j] = getattr(answer.value, name) == getattr(truth, name)
    print(machine("torch"))
    print("| method | right records | right fields, % | over greedy | tokens | CPU s |\n|---|---|---|---|---|---|")
    rows = []
    for method in given.methods:
        fields = hits[method].mean(axis=1)
        more = fields - hits[given.methods[0]].mean(axis=1)
        row = {
            "method": method,
            "records": given.records,
            "right": int(hits[method].all(axis=1).sum()),
            "fields": round(100 * fields.mean(), 1),
            "over greedy": round(100 * more.mean(), 1),
            "error": round(100 * more.std(ddof=1) / given.records**0.5, 1),
            "tokens": round(tokens[method] / given.records),
            "seconds": round(seconds[method] / given.records, 2),
        }
        rows.append(row)
        over = f"{row['over greedy']:+} ± {row['error']}"
        print(f"| {method} | {row['right']} | {row['fields']} | {over} | {row['tokens']} | {row['seconds']} |")
    if given.out:
        with open(given.out, "w") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
