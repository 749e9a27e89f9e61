"""Text to SQL: questions on a small SQLite database, which runs the queries.

A grammar (here a regular expression) contains tables, columns and their words. It does not know whether a query runs,
which only SQLite can tell, or whether it finds anything. *Local masking* draws each token from those that the grammar
allows. *Steering* also weighs these tokens by their probability. Where a query may end, it tests whether the query
runs. The method is `where`, adaptive weighted rejection sampling, which tests only drawn tokens. The answer is the
result with the most weight, summed over all queries that return it.

What to look for: plain samples are no SQL that runs. Masked samples follow the grammar. But most ask a table for a
column that it lacks, or for a baker whose name is a town, and find nothing. Steering reaches queries that do find
something. It may also lose all its particles, as in the first question: the word that the model wants to write after
"city =" is not in the tables. The number is the result's share of the weight, or of the votes. The query for the last
question finds something, but is wrong. Four of 12 is 0.33 +- 0.14; docs/quality.md has more questions and more methods.

    Who lives in Bonn?
      plain sampling, vote of 10   0.10  SELECT city FROM people WHERE job = 'baker' ORDER BY job DESC;
      local masking, vote of 10    0.00  no query that runs
      steering, N=10, K=3          0.00  no query that runs
    How old is Fay Dunn?
      plain sampling, vote of 10   0.00  no query that runs
      local masking, vote of 10    0.30  SELECT age FROM people WHERE job = 'baker' ORDER BY job DESC LIMIT 1
      steering, N=10, K=3          0.84  SELECT age FROM people WHERE name = 'Fay Dunn'
    What is the job of Hana Ito?
      plain sampling, vote of 10   0.00  no query that runs
      local masking, vote of 10    0.10  SELECT job FROM people WHERE job = 'baker' ORDER BY job DESC LIMIT 1
      steering, N=10, K=3          1.00  SELECT job FROM people WHERE name = 'Hana Ito'
    How many nurses are there?
      plain sampling, vote of 10   0.00  no query that runs
      local masking, vote of 10    0.10  SELECT job FROM people WHERE job = 'nurse' ORDER BY job DESC LIMIT 1
      steering, N=10, K=3          0.59  SELECT age FROM people WHERE job = 'nurse' AND city = 'Rome'

    plain sampling, vote of 10   0 of 12 results right
    local masking, vote of 10    1 of 12 results right
    steering, N=10, K=3          4 of 12 results right
"""

import argparse
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable

from llmppl import EOS, CachedTransformer, ConstrainedText, Model, Particles, Regex, importance_sampling, smc_steer
from llmppl.constraints import Index
from llmppl.lm import Context

TABLES = {
    "people": ("name", "job", "city", "age", "salary"),
    "books": ("title", "author", "year", "pages"),
}
ROWS = """
people | Ann Moore | nurse | Oslo | 34 | 41000
people | Ben Stone | baker | Rome | 52 | 29000
people | Carl Voss | pilot | Bonn | 45 | 88000
people | Dora Lind | nurse | Rome | 29 | 37500
people | Emil Berg | teacher | Oslo | 61 | 52000
people | Fay Dunn | lawyer | Lyon | 38 | 97000
people | Gus Hall | baker | Oslo | 23 | 24000
people | Hana Ito | pilot | Lyon | 57 | 93000
people | Ivo Kral | teacher | Bonn | 31 | 43000
people | Jane Wood | nurse | Oslo | 48 | 46500
people | Kurt Adler | lawyer | Rome | 66 | 71000
books | The Red Door | Ann Moore | 1999 | 312
books | Winter Sea | Fay Dunn | 2004 | 188
books | Stone and Salt | Ben Stone | 2011 | 450
books | A Long Night | Fay Dunn | 2016 | 275
books | The Last Train | Kurt Adler | 1987 | 520
books | Green Hills | Hana Ito | 2011 | 231
books | Blue Paper | Ann Moore | 2020 | 164
"""
QUESTIONS = """
Who lives in Bonn? | SELECT name FROM people WHERE city = 'Bonn'
How old is Fay Dunn? | SELECT age FROM people WHERE name = 'Fay Dunn'
What is the job of Hana Ito? | SELECT job FROM people WHERE name = 'Hana Ito'
How many nurses are there? | SELECT COUNT(*) FROM people WHERE job = 'nurse'
Where does Emil Berg live? | SELECT city FROM people WHERE name = 'Emil Berg'
Who wrote Green Hills? | SELECT author FROM books WHERE title = 'Green Hills'
Which books did Fay Dunn write? | SELECT title FROM books WHERE author = 'Fay Dunn'
How many pages does Blue Paper have? | SELECT pages FROM books WHERE title = 'Blue Paper'
How many books are there? | SELECT COUNT(*) FROM books
Who is the oldest? | SELECT name FROM people ORDER BY age DESC LIMIT 1
Which nurses live in Oslo? | SELECT name FROM people WHERE job = 'nurse' AND city = 'Oslo'
Which book is the shortest? | SELECT title FROM books ORDER BY pages LIMIT 1
"""
SHOTS = [
    ("How many people are there?", "SELECT COUNT(*) FROM people"),
    ("What does Gus Hall earn?", "SELECT salary FROM people WHERE name = 'Gus Hall'"),
    ("Which book has the most pages?", "SELECT title FROM books ORDER BY pages DESC LIMIT 1"),
    ("When did Stone and Salt come out?", "SELECT year FROM books WHERE title = 'Stone and Salt'"),
    ("Who is a baker in Rome?", "SELECT name FROM people WHERE job = 'baker' AND city = 'Rome'"),
]
WORDS = sorted({cell for row in ROWS.splitlines() for cell in row.split(" | ")[1:] if not cell.isdigit()})
COLUMN = "|".join(sorted({column for columns in TABLES.values() for column in columns}))
TEST = rf"({COLUMN}) (= '({'|'.join(WORDS)})'|(=|<|>) [0-9]{{1,6}})"
PATTERN = (
    rf"SELECT (COUNT\(\*\)|(AVG|MAX|MIN|SUM)\(({COLUMN})\)|{COLUMN}) FROM ({'|'.join(TABLES)})"
    rf"( WHERE {TEST}( AND {TEST})?)?( ORDER BY ({COLUMN})( DESC)? LIMIT 1)?"
)
MAX_TOKENS = 36
Result = tuple[tuple[object, ...], ...]                 # the rows of a query


class Query(Model):
    """Query in the model's answer, given that it follows the grammar and runs; `local` only masks."""

    def __init__(self, context: Context, index: Index, runs: Callable[[str], bool], local: bool) -> None:
        super().__init__()
        self.context, self.index, self.runs, self.local = context, index, runs, local
        self.state, self.left = index.start, MAX_TOKENS

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.index.mask_within(self.state, self.left))       # leaves enough tokens to end
        if self.local:
            token = self.sample(allowed)
        elif self.index.accepts(self.state):
            token = self.sample(p, proposal=allowed.where(lambda token: token != EOS or self.runs(str(self.s))))
        else:
            token = self.sample(p, proposal=allowed)
        if token == EOS:
            return self.finish()
        self.state = self.index.advance(self.state, token)
        self.left -= 1
        self.context += token
        self.s += token


def database() -> sqlite3.Connection:
    """Return a database in memory with the tables."""
    base = sqlite3.connect(":memory:")
    for table, columns in TABLES.items():
        base.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
    for line in ROWS.strip().splitlines():
        table, *cells = line.split(" | ")
        values = [int(cell) if re.fullmatch(r"-?\d+", cell) else cell for cell in cells]
        base.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
    return base


def result(base: sqlite3.Connection, query: str) -> Result | None:
    """Return the sorted rows of a query; None if it does not run, or finds nothing."""
    try:
        rows = base.execute(query).fetchmany(100)
    except sqlite3.Error:
        return None
    return tuple(sorted(rows, key=repr)) if rows and rows != [(None,)] else None


def question(text: str) -> list[dict[str, str]]:
    """Return the conversation that asks for a query."""
    schema = "\n".join(f"{table}({', '.join(columns)})" for table, columns in TABLES.items())
    asks = [f"Write SQL for these tables:\n{schema}\n\n{SHOTS[0][0]}", *(shot[0] for shot in SHOTS[1:]), text]
    messages = [{"role": "user", "content": ask} for ask in asks]
    for i, (_, query) in reversed([*enumerate(SHOTS)]):
        messages.insert(i + 1, {"role": "assistant", "content": query})
    return messages


def most_weight(base: sqlite3.Connection, particles: Particles[Model]) -> tuple[Result | None, float, str | None]:
    """Return (result, its share of the weight, one of its queries) for the heaviest result; None counts for none."""
    weights: dict[Result | None, float] = defaultdict(float)
    queries: dict[Result | None, str] = {}
    for particle, weight in zip(particles, particles.weights, strict=True):
        found = result(base, str(particle.s))
        weights[found] += weight
        queries.setdefault(found, str(particle.s))
    weights[None] = 0.0
    found, share = max(weights.items(), key=lambda item: item[1])
    return found, share, queries.get(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file with a chat template (SmolLM2)", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num, N, K = (2, 3, 2) if args.quick else (12, 10, 3)

    lm, base = CachedTransformer.from_pretrained(args.lm), database()
    index = Regex(PATTERN).index(lm.vocab)

    def runs(query: str) -> bool:
        return result(base, query) is not None

    methods: dict[str, Callable[[Context], Particles[Model]]] = {
        f"plain sampling, vote of {N}": lambda context: importance_sampling(
            ConstrainedText(lm, context, max_tokens=MAX_TOKENS), N, seed=args.seed
        ),
        f"local masking, vote of {N}": lambda context: importance_sampling(
            Query(context, index, runs, local=True), N, seed=args.seed
        ),
        f"steering, N={N}, K={K}": lambda context: smc_steer(
            Query(context, index, runs, local=False), N, K, seed=args.seed
        ),
    }
    right = Counter[str]()
    for i, line in enumerate(QUESTIONS.strip().splitlines()[:num]):
        asked, query = line.split(" | ")
        if i < 4:
            print(asked)
        for name, method in methods.items():
            found, share, said = most_weight(base, method(lm.chat(question(asked))))
            right[name] += found == result(base, query)
            if i < 4:
                print(f"  {name:28} {share:.2f}  {said if share else 'no query that runs'}")
    print()
    for name in methods:
        print(f"{name:28} {right[name]} of {num} results right")


if __name__ == "__main__":
    main()
