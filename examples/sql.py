"""SQL by a grammar: queries that use only existing tables and their columns.

The grammar, in lark's syntax, allows only the tables and columns of one database, and after each table only its own
columns. The two programs differ only in their prompt.

What to look for: every query parses (lark checks this) and ends within its tokens. The embedded model has never seen
SQL, so each piece of SQL costs many nats (log Z-hat). The question therefore has little influence. The first question
is about the color of a dog, and its query asks for the towns of people. Use --lm for a model that knows SQL. The number
before a query is its weight. A condition costs so much that queries without one have nearly all of the weight.

    The girl had a dog and a cat. What color was the dog?  (log Z-hat -104.2)
      0.547  SELECT town, town FROM people;
      0.453  SELECT kind, kind FROM pets;
      0.000  SELECT height, height FROM people;

    The man lived in a big town. He had a job in the town.  (log Z-hat -100.4)
      0.970  SELECT height, height FROM people;
      0.030  SELECT town, town FROM people;
      0.000  SELECT height, height FROM people WHERE height = 185;
"""

import argparse

from llmppl import CachedTransformer, ConstrainedText, Grammar, smc_steer

GRAMMAR = r"""
start: " SELECT " (pets | people) ";"
pets: pet_columns " FROM pets" [" WHERE " pet_test (" AND " pet_test)*]
people: person_columns " FROM people" [" WHERE " person_test (" AND " person_test)*]
pet_columns: pet_column [", " pet_column]
person_columns: person_column [", " person_column]
pet_column: "kind" | "color" | "age"
person_column: "town" | "job" | "height"
pet_test: ("kind" | "color") " = " STRING | "age " COMPARE " " NUMBER
person_test: ("town" | "job") " = " STRING | "height " COMPARE " " NUMBER
COMPARE: "=" | "<" | ">"
STRING: /'[a-z]+'/
NUMBER: /[0-9]{1,3}/
"""
QUESTIONS = [
    "The girl had a dog and a cat. What color was the dog?",
    "The man lived in a big town. He had a job in the town.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    N, K, num_tokens = (3, 2, 24) if args.quick else (20, 4, 40)

    lm, grammar = CachedTransformer.from_pretrained(args.lm), Grammar(GRAMMAR)
    for question in QUESTIONS:
        program = ConstrainedText(lm, question, grammar, max_tokens=num_tokens)
        posterior = smc_steer(program, N, K, seed=args.seed)
        for particle in posterior:
            grammar.lark.parse(particle.s)              # raises if it does not parse
        print(f"{question}  (log Z-hat {posterior.log_ml:.1f})")
        for text, weight in [*posterior.by_text().items()][:3]:
            print(f"  {weight:.3f} {text}")
        print()


if __name__ == "__main__":
    main()
