"""Chain of thought: reasoning in the target, and reasoning in the proposal.

After six examples, the model answers a question about numbers. There are three programs:
- *Direct*: it answers at once, with p(answer | question).
- *In the target*: a latent calculation comes first. An answer has the total probability of all calculations that lead
  to it. `extend` draws the left side of the calculation. The program observes its result, which Python computes, so a
  calculation counts less if its result surprises the model.
- *In the proposal*: the target is the direct answer. Its tokens are drawn from a mixture with the distribution after a
  calculation, and weighed by p / q. The calculation is an auxiliary draw, and weights depend on it only through q. For
  any calculation, the answer has its exact distribution and Z-hat is unbiased.

What to look for (`--lm smollm2`): the model has 135M parameters, and multiplies when it has no better idea. With a
calculation the most probable answer is right in 13 of 20 questions, without one in 2. Free sampling loses because of
its own wrong results. If Python computes the results, exact weights and local masking do not differ visibly over 20
questions: the decisive choice is the left side of the calculation. In the proposal, a calculation finds the right
answer in a third of the questions where direct draws of the same target miss it. The weights are uneven, so the mean of
Z-hat / Z is 1 only within a large error. The embedded model cannot calculate, and answers nothing right.

    20 questions, N=10
                                      right (the likeliest)  probability of what is right
      direct, exact                   0.10 ± 0.07            0.07 ± 0.03
      reasoning, free                 0.50 ± 0.11            0.41 ± 0.08
      reasoning, local masking        0.65 ± 0.11            0.58 ± 0.08
      reasoning in the target         0.65 ± 0.11            0.57 ± 0.08
        smc_steer, K=2                0.60 ± 0.11            0.52 ± 0.09

      p(right answer | question), 50 draws    none was right    |Z-hat / Z - 1|, median    mean of Z-hat / Z
      direct                                      0.35                     0.79                0.92 ± 0.19
      reasoning in the proposal                   0.05                     0.63                1.81 ± 0.93
"""

import argparse
import re

import numpy as np

from llmppl import (
    CachedTransformer,
    Model,
    Particles,
    Regex,
    Rule,
    enumerate_exact,
    importance_sampling,
    mixture,
    smc_steer,
)
from llmppl.distributions import Floats
from llmppl.lm import Context

SHOWN = [
    ("Sam had 9 balloons. 5 of them flew away. How many balloons does he have now?", "9 - 5 = 4"),
    ("There are 3 boxes with 6 pencils in each. How many pencils are there?", "3 * 6 = 18"),
    ("Kim read 7 pages on Monday and 8 pages on Tuesday. How many pages did she read?", "7 + 8 = 15"),
    ("10 cookies are shared by 5 children. How many cookies does each child get?", "10 / 5 = 2"),
    ("Mia found 2 shells and Tim found 6. How many shells do they have together?", "2 + 6 = 8"),
    ("A bus had 12 people. 3 got off. How many people are on the bus?", "12 - 3 = 9"),
]
QUESTIONS = {
    "Tom has 3 apples. He buys 4 more. How many apples does he have?": 7,
    "A box has 6 eggs. 2 of them break. How many eggs are left?": 4,
    "There are 5 cats and 3 dogs. How many animals are there?": 8,
    "Anna had 10 coins. She gave 4 to Ben. How many coins does she have now?": 6,
    "A pen costs 2 dollars. How much do 6 pens cost?": 12,
    "4 children share 12 sweets. How many does each child get?": 3,
    "Each car has 4 wheels. How many wheels do 3 cars have?": 12,
    "Lily is 9 years old. Her brother is 3 years younger. How old is he?": 6,
    "A farmer has 8 cows and buys 5 more. How many cows has he?": 13,
    "There were 15 birds on a tree. 7 flew away. How many birds are left?": 8,
    "20 chairs stand in 4 rows. How many chairs are in each row?": 5,
    "A week has 7 days. How many days have 2 weeks?": 14,
    "Max ate 2 plums and Eva ate 9. How many plums did they eat?": 11,
    "A rope is 14 meters long. 6 meters are cut off. How long is it now?": 8,
    "5 friends have 3 toys each. How many toys do they have?": 15,
    "18 cards are dealt to 3 players. How many cards does each player get?": 6,
    "Rosa has 6 red and 7 blue beads. How many beads does she have?": 13,
    "A shop had 16 lamps and sold 9. How many lamps does it have now?": 7,
    "One ticket costs 4 dollars. How much do 5 tickets cost?": 20,
    "A baker puts 24 rolls into 6 bags. How many rolls are in each bag?": 4,
}
LEFT, NUMBER = Regex(r" [0-9]{1,2} [-+*/] [0-9]{1,2} ="), Regex(r" [0-9]{1,2}\n")
RULE, THEN, MOST = Rule(temperature=0.5), "Answer:", 12      # beginning of the answer; tokens of a calculation


def asked(lm: CachedTransformer, question: str, reasoning: bool) -> Context:
    """Return the context in which the model calculates, or answers at once."""
    shots = [(*shown, " Calculation: " + shown[1] if reasoning else "") for shown in SHOWN]
    text = "".join(f"Question: {q}{c}\nAnswer: {made.split('= ')[1]}\n\n" for q, made, c in shots)
    return lm.context(f"{text}Question: {question}" + (" Calculation:" if reasoning else "\nAnswer:"))


def rest(left: str) -> str:
    """Return the text between the left side of a calculation and the answer; "" if the result is not whole."""
    first, sign, second = left.removesuffix("=").split()
    x, y = int(first), int(second)
    result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y and x % y == 0 else -1}[sign]
    return f" {result}\n{THEN}" if result >= 0 else ""


class Direct(Model):
    """An answer without a calculation."""

    def __init__(self, lm: CachedTransformer, question: str) -> None:
        super().__init__()
        self.context = asked(lm, question, reasoning=False)

    def step(self) -> None:
        self.s += self.extend(self.context, constraint=NUMBER, max_tokens=4, rule=RULE).text
        self.finish()


class Free(Model):
    """A calculation and an answer, both written freely by the model."""

    def __init__(self, lm: CachedTransformer, question: str) -> None:
        super().__init__()
        self.context = asked(lm, question, reasoning=True)

    def step(self) -> None:
        text = self.extend(self.context, until="\n\n", max_tokens=20, rule=RULE).text
        self.s += (re.findall(r"\nAnswer:( [0-9]{1,2})\n", text) or [""])[0]
        self.finish()


class Reasoned(Model):
    """A calculation with the right result, then the answer. The target sums over the calculations."""

    def __init__(self, lm: CachedTransformer, question: str) -> None:
        super().__init__()
        self.context, self.left = asked(lm, question, reasoning=True), ""

    def step(self) -> None:
        if not self.left:
            span = self.extend(self.context, constraint=LEFT, max_tokens=MOST, rule=RULE)
            self.left, more = span.text, rest(span.text)
            self.condition(bool(more))
            self.observe(self.transformer(span.context).string(), more)
            self.context = span.context + more
        else:
            self.s += self.extend(self.context, constraint=NUMBER, max_tokens=4, rule=RULE).text
            self.finish()


class Proposed(Direct):
    """A direct answer whose tokens are proposed as they would come after a calculation."""

    def __init__(self, lm: CachedTransformer, question: str) -> None:
        super().__init__(lm, question)
        self.reasoning, self.index = asked(lm, question, reasoning=True), NUMBER.index(lm.vocab)

    def step(self) -> None:
        made = self.extend(self.reasoning, until="\n", max_tokens=MOST, rule=RULE)        # is in weights only by q
        after, state, shares = made.context + THEN, self.index.start, np.array([0.2, 0.8])
        while not self.index.accepts(state):
            p, q = map(RULE, (self.transformer(self.context), self.transformer(after)))
            both = [dist.masked(self.index.mask(state)) for dist in (p, q)]
            token = self.sample(p, proposal=mixture(both, shares))
            shares = shares * np.exp([dist.log_prob(token) for dist in both])       # bounds the total w by 1 / 0.2
            shares /= shares.sum()
            state = self.index.advance(state, token)
            self.context, after = self.context + token, after + token
            self.s += token
        self.finish()


def answers(particles: Particles[Model], weighted: bool = True) -> Floats:
    """Return the (100,) probability of each answer, by weight or with equal weights; a missing answer has none."""
    weights = particles.weights if weighted else np.full(len(particles), 1 / max(1, len(particles)))
    found = np.array([int(particle.s or 100) for particle in particles], dtype=int)
    shares = np.zeros(101)
    np.add.at(shares, found, weights)
    return shares[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    number, N = (2, 3) if args.quick else (20, 10)
    lm, asked_for = CachedTransformer.from_pretrained(args.lm), list(QUESTIONS.items())[:number]
    draws = {
        kind: [importance_sampling(kind(lm, question), N, seed=args.seed) for question, _ in asked_for]
        for kind in (Free, Reasoned)
    }
    exact = [enumerate_exact(Direct(lm, question)) for question, _ in asked_for]
    steered = [smc_steer(Reasoned(lm, question), N, 2, seed=args.seed) for question, _ in asked_for]
    methods = {
        "direct, exact": list(map(answers, exact)),
        "reasoning, free": list(map(answers, draws[Free])),
        "reasoning, local masking": [answers(each, weighted=False) for each in draws[Reasoned]],
        "reasoning in the target": list(map(answers, draws[Reasoned])),
        "  smc_steer, K=2": list(map(answers, steered)),
    }
    right = np.array([answer for _, answer in asked_for])
    print(f"{number} questions, N={N}\n  {'':32}right (the likeliest)  probability of what is right")
    for name, found in methods.items():
        best, of_right = np.argmax(found, axis=1) == right, np.array(found)[range(number), right]
        best &= of_right > 0
        cells = [f"{each.mean():.2f} ± {each.std() / np.sqrt(number):.2f}" for each in (best, of_right)]
        print(f"  {name:32}{cells[0]:23}{cells[1]}")

    Z = np.array([np.exp(each.log_ml) * answers(each)[answer] for each, answer in zip(exact, right, strict=True)])
    head = "none was right    |Z-hat / Z - 1|, median    mean of Z-hat / Z"
    print(f"\n  p(right answer | question), {5 * N} draws    {head}")
    for name, kind in {"direct": Direct, "reasoning in the proposal": Proposed}.items():
        runs = [importance_sampling(kind(lm, question), 5 * N, seed=args.seed) for question, _ in asked_for]
        found = [np.exp(run.log_ml) * answers(run)[answer] for run, answer in zip(runs, right, strict=True)]
        ratio = np.array(found) / Z
        error, off = ratio.std(ddof=1) / np.sqrt(number), np.median(np.abs(ratio - 1))
        print(f"  {name:38}{np.mean(ratio == 0):10.2f}{off:25.2f}{ratio.mean():20.2f} ± {error:.2f}")


if __name__ == "__main__":
    main()
