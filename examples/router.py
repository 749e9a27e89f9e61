"""A router that abstains: tickets go to a queue, or to a person where the model is not sure.

Each ticket is a decision with two questions, after labelled examples. An answer whose confidence is below `abstain` is
None. Confidence is 0 for a guess and 1 for certainty.

What to look for (`--lm smollm2`): the tickets without an answer. A threshold means something for one model and one
question; `examples/filter.py` fits a calibration, after which it is the share of right answers.

    Could we move the call to Tuesday?         -> a person (money?)      0.46
    Dad asks whether you come home on Sunday.  -> family                 0.83
    Thanks, I paid the bill yesterday.         -> a person (family?)     0.57
    Grandma is ill, please ring her.           -> family                 0.85
    The new price is 40 euros.                 -> money                  0.74
"""

import argparse

from llmppl import CachedTransformer
from llmppl.decisions import choice, decide

QUESTIONS = {
    "topic": choice("What is the message about?", ["money", "a meeting", "family"]),
    "answer": "Does the message ask for an answer?",
}
EXAMPLES = [
    ("Can we meet at six instead of five?", {"topic": "a meeting", "answer": True}),
    ("Mum is home again and feels better.", {"topic": "family", "answer": False}),
    ("I will send you the rent tomorrow.", {"topic": "money", "answer": False}),
    ("Did you pay the plumber?", {"topic": "money", "answer": True}),
    ("Your sister called, she is at the station.", {"topic": "family", "answer": False}),
    ("The talk begins at nine, room four.", {"topic": "a meeting", "answer": False}),
]
TICKETS = [
    "Could we move the call to Tuesday?",
    "Dad asks whether you come home on Sunday.",
    "Thanks, I paid the bill yesterday.",
    "Grandma is ill, please ring her.",
    "The new price is 40 euros.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--abstain", type=float, default=0.4, help="least confidence of an answer")
    args = parser.parse_args()
    lm = CachedTransformer.from_pretrained(args.lm)
    tickets = TICKETS[:2] if args.quick else TICKETS

    decisions = decide(lm, tickets, QUESTIONS, examples=EXAMPLES, orders=3, abstain=args.abstain, progress=False)
    for decision in decisions:
        queue = decision.value["topic"] or f"a person ({decision['topic'].best}?)"
        print(f"{decision.state:42} -> {queue:22} {decision['topic'].probability:.2f}")


if __name__ == "__main__":
    main()
