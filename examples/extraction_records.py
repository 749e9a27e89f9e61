"""Extraction to records: a sentence about a person becomes a JSON object; the answers to 20 sentences are known.

Three methods use one model and one constraint. *Plain sampling* draws a free text. *Local masking* draws each token
from those that keep the text a record; it ignores where the model prefers other tokens. *Steering* draws in the same
way, and weighs a record by the probability that the model writes it. The answer is the record with the most weight,
summed over all its spellings in tokens, spaces and letter case.

What to look for: with five texts each, steering gets nearly twice as many records right as a vote of masked texts.
Masked texts are ahead of a vote of free texts, because few free texts have all four fields. The number is the answer's
share of the weight, or of the votes. Where steering is wrong, its share is low, as with the lawyer, who is 52; her son
is 14. Twenty sentences are few (11 of 20 is 0.55 +- 0.11). docs/quality.md has more sentences and more methods. One of
them, the most probable of 20 masked texts, does as well.

    Maria Lopez, 34, works as a nurse in Denver.
      plain sampling, vote of 5    0.20  maria lopez, 34, journy doctor, denver
      local masking, vote of 5     0.80  maria lopez, 34, nurse, denver
      steering, N=5, K=3           0.68  maria lopez, 34, nurse, denver
    After nine years in Oslo, the baker Jens Dahl, now 41, moved to Bergen.
      plain sampling, vote of 5    0.20  jens dahl, 41, plumber, bergen
      local masking, vote of 5     0.60  jens dahl, 41, plumber, bergen
      steering, N=5, K=3           0.48  jens dahl, 41, baker, bergen
    The lawyer Anna Weiss is 52; she lives in Munich with her sons, 14 and 17.
      plain sampling, vote of 5    0.20  the lawyer anna weiss, 14, lawyer anna, munich
      local masking, vote of 5     0.40  the lawyer anna weiss, 14, lawyer, munich
      steering, N=5, K=3           0.24  anna weiss, 14, lawyer, munich

    plain sampling, vote of 5    4 of 20 records right
    local masking, vote of 5     6 of 20 records right
    steering, N=5, K=3           11 of 20 records right
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from llmppl import EOS, CachedTransformer, ConstrainedText, Model, Particles, Regex, importance_sampling, smc_steer
from llmppl.constraints import Index
from llmppl.lm import Context

PEOPLE = """
Maria Lopez, 34, works as a nurse in Denver. | Maria Lopez | 34 | nurse | Denver
After nine years in Oslo, the baker Jens Dahl, now 41, moved to Bergen. | Jens Dahl | 41 | baker | Bergen
The lawyer Anna Weiss is 52; she lives in Munich with her sons, 14 and 17. | Anna Weiss | 52 | lawyer | Munich
Born in Lima, the plumber Pedro Quispe, 29, has made Madrid his home. | Pedro Quispe | 29 | plumber | Madrid
Ruth Cole is twenty-six years old, a teacher, and happy in Leeds. | Ruth Cole | 26 | teacher | Leeds
In Kyoto you will find the gardener Kenji Mori, who turned 63 last week. | Kenji Mori | 63 | gardener | Kyoto
Tom Reed left the army at 30; today, at 47, he is a farmer in Tulsa. | Tom Reed | 47 | farmer | Tulsa
At 58 the judge Carla Rossi still walks to work through Turin. | Carla Rossi | 58 | judge | Turin
Our new dentist is Omar Said. He is 38, comes from Cairo and lives in Lyon. | Omar Said | 38 | dentist | Lyon
The cook Lin Chen, 33, gave up her flat in Shanghai and lives in Vienna. | Lin Chen | 33 | cook | Vienna
Sixty years old, the pilot Hugo Petit has come home to Nantes. | Hugo Petit | 60 | pilot | Nantes
Eva Klein has been a librarian for 21 years; she is 45 and lives in Graz. | Eva Klein | 45 | librarian | Graz
The police say that Ivan Petrov, 27, a mechanic from Varna, saw everything. | Ivan Petrov | 27 | mechanic | Varna
Sara Berg, a painter of 32, came to Paris when she was 22. | Sara Berg | 32 | painter | Paris
Amina Bello, 39, is the only doctor in Kano, and her patients have to wait. | Amina Bello | 39 | doctor | Kano
Paul Novak, 55, a butcher, closed his shop in Brno. | Paul Novak | 55 | butcher | Brno
Grace Kim (31) lives in Boston, is an architect and has a brother of 28. | Grace Kim | 31 | architect | Boston
Liam Byrne, nineteen, is the youngest carpenter in Cork. | Liam Byrne | 19 | carpenter | Cork
Nina Costa, a chemist of 44, was born in Braga but lives in Porto. | Nina Costa | 44 | chemist | Porto
Yusuf Demir is no longer a waiter: at 36 he is a tailor in Izmir. | Yusuf Demir | 36 | tailor | Izmir
"""
FIELDS = ("name", "age", "job", "city")
Fields = tuple[str, ...]                                # the fields of a record, in lower case
PATTERN = (
    r'\{ ?"name": ?"[A-Z][A-Za-z ]*", ?"age": ?[1-9][0-9]?, ?"job": ?"[A-Za-z][a-z ]*", ?"city": ?"[A-Z][A-Za-z ]*" ?\}'
)
MAX_TOKENS = 40
SHOT = "Bill Hart is a plumber of 52 who lives in Leeds."


class Record(Model):
    """Record in the model's answer, given that the answer is a record; `local` masks without a weight."""

    def __init__(self, context: Context, index: Index, local: bool) -> None:
        super().__init__()
        self.context, self.index, self.local = context, index, local
        self.state, self.left = index.start, MAX_TOKENS

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.index.mask_within(self.state, self.left))       # leaves enough tokens to end
        token = self.sample(allowed) if self.local else self.sample(p, proposal=allowed)
        if token == EOS:
            return self.finish()
        self.state = self.index.advance(self.state, token)
        self.left -= 1
        self.context += token
        self.s += token


def instances(lines: str) -> Iterator[tuple[str, Fields | None]]:
    """Yield the (sentence, record) of each line."""
    for line in lines.strip().splitlines():
        sentence, name, age, job, city = line.split(" | ")
        yield sentence, record_of({"name": name, "age": int(age), "job": job, "city": city})


def record_of(value: object) -> Fields | None:
    """Return the fields as a tuple in lower case; None if one is missing."""
    if not isinstance(value, dict) or not all(field in value for field in FIELDS):
        return None
    return tuple(str(value[field]).strip().lower() for field in FIELDS)


def record_in(text: str) -> Fields | None:
    """Return the record inside a text, or None."""
    found = re.search(r"\{[^{}]*\}", text)
    try:
        return record_of(json.loads(found[0])) if found else None
    except ValueError:
        return None


def question(sentence: str) -> list[dict[str, str]]:
    """Return the conversation that asks for the record of a sentence."""
    ask = "Give the name, age, job and city of this person as JSON: "
    return [
        {"role": "user", "content": ask + SHOT},
        {"role": "assistant", "content": '{"name": "Bill Hart", "age": 52, "job": "plumber", "city": "Leeds"}'},
        {"role": "user", "content": ask + sentence},
    ]


def most_weight(particles: Particles[Model]) -> tuple[Fields | None, float]:
    """Return (record, share of the weight) of the heaviest record; texts without a record count for none."""
    weights: dict[Fields | None, float] = defaultdict(float)
    for particle, weight in zip(particles, particles.weights, strict=True):
        weights[record_in(str(particle.s))] += weight
    weights[None] = 0.0
    return max(weights.items(), key=lambda item: item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file with a chat template (SmolLM2)", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num, N, K = (2, 3, 2) if args.quick else (20, 5, 3)

    lm = CachedTransformer.from_pretrained(args.lm)
    index = Regex(PATTERN).index(lm.vocab)
    methods: dict[str, Callable[[Context], Particles[Model]]] = {
        f"plain sampling, vote of {N}": lambda context: importance_sampling(
            ConstrainedText(lm, context, max_tokens=MAX_TOKENS), N, seed=args.seed
        ),
        f"local masking, vote of {N}": lambda context: importance_sampling(
            Record(context, index, local=True), N, seed=args.seed
        ),
        f"steering, N={N}, K={K}": lambda context: smc_steer(Record(context, index, local=False), N, K, seed=args.seed),
    }
    known, right = list(instances(PEOPLE))[:num], Counter[str]()
    for i, (sentence, truth) in enumerate(known):
        if i < 3:
            print(sentence)
        for name, method in methods.items():
            record, share = most_weight(method(lm.chat(question(sentence))))
            right[name] += record == truth
            if i < 3:
                print(f"  {name:28} {share:.2f}  {', '.join(record) if record else 'no record'}")
    print()
    for name in methods:
        print(f"{name:28} {right[name]} of {len(known)} records right")


if __name__ == "__main__":
    main()
