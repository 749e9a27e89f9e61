"""JSON that ends: how many of 8 particles end within 40 tokens, with a record that is closed and one that is open.

    python benchmarks/json_schemas.py                   # the embedded model
    python benchmarks/json_schemas.py --lm smollm2
"""

from __future__ import annotations

import argparse
from collections import Counter

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, smc_standard

PROPERTIES = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["dog", "cat", "bird"]}}
OPEN = {"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES}
RECORDS = {"closed": OPEN | {"additionalProperties": False}, "open": OPEN}


def count_alive(name: str | None, runs: int) -> None:
    lm = CachedTransformer.from_pretrained(*[name] * (name is not None))
    ask = "Describe a pet as JSON with its name, its age and its kind (dog, cat or bird)."
    prompt = "Once upon a time there was a little dog. The dog as JSON: " if name is None else lm.chat(ask)
    for what, schema in RECORDS.items():
        alive, texts = [], Counter[str]()
        for seed in range(runs):
            program = ConstrainedText(lm, prompt, JsonSchema(schema), max_tokens=40)
            particles = smc_standard(program, 8, seed=seed, progress=False)
            ended = [str(each) for each in particles if each.log_weight > float("-inf")]
            alive.append(len(ended))
            texts.update(ended)
        print(f"{what}: of 8 particles alive {alive}")
        for text, _ in texts.most_common(3):
            print(f"    {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", help="the language model; the embedded one if left out")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    count_alive(args.lm, args.runs)


if __name__ == "__main__":
    main()
