"""JSON records: objects that a schema admits, with fields that a language model fills.

The schema defines the fields; the model fills them. Every text ends by `max_tokens`, because the automaton of the
schema knows the distance to its end.

What to look for: every text is JSON and an instance of the schema. A record costs the embedded model hundreds of nats
(log Z-hat), because it has never seen JSON. Its records therefore have the right form, but at most a name or a dog from
the prompt. Tom and his dog also appear with the next three seeds. Lily does not, and no record says that she is three
and likes cake.

    Once upon a time, there was a little girl named Lily. She was three years old and liked cake.
      log Z-hat -290.2, 12 particles
      Sue, 2, likes dogs: 'I am a lawyer mao!'
      Sue, 2, likes dogs: 'I am a lawyer mao.'
      Sue, 2, likes dogs: 'I am a lawyer map.'
      {"name":"Sue","age":2,"likes":"dogs","said":"I am a lawyer map."}

    Tom was a boy who had a big dog. He was happy.
      log Z-hat -289.6, 12 particles
      Tom, 2, likes dogs: 'I am a most argui!'
      Tom, 2, likes dogs: 'I am a most argui.'
      Tom, 2, likes dogs: 'I am a most arguk!'
      {"name":"Tom","age":2,"likes":"dogs","said":"I am a most arguy!"}
"""

import argparse
import json

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, smc_steer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tim", "Lily", "Tom", "Sue"]},
        "age": {"type": "integer", "minimum": 2, "maximum": 9},
        "likes": {"enum": ["dogs", "cats", "cake", "books"]},
        "said": {"type": "string", "pattern": "^I (am|like|want) [a-z ]{3,12}[.!]$"},
    },
    "required": ["name", "age", "likes", "said"],
    "additionalProperties": False,
}
PROMPTS = [
    "Once upon a time, there was a little girl named Lily. She was three years old and liked cake.\n",
    "Tom was a boy who had a big dog. He was happy.\n",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    N, K = (3, 2) if args.quick else (12, 4)

    try:
        schema = JsonSchema(SCHEMA, whitespace=False)
    except ImportError as error:
        return print(error)
    lm = CachedTransformer.from_pretrained(args.lm)
    for prompt in PROMPTS:
        program = ConstrainedText(lm, prompt, schema, max_tokens=80)
        posterior = smc_steer(program, N, K, seed=args.seed)
        print(f"{prompt}  log Z-hat {posterior.log_ml:.1f}, {len(posterior)} particles")
        for text in sorted({particle.s for particle in posterior})[:3]:
            record = json.loads(text)
            print(f"  {record['name']}, {record['age']}, likes {record['likes']}: {record['said']!r}")
        print(f"  {posterior.best}\n")


if __name__ == "__main__":
    main()
