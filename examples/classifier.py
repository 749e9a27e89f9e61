"""A classifier: the posterior over labels, and whether its probabilities are reliable.

A message gets one of five labels in two ways. *Answered*: a prompt asks the model for the label. The answer must be a
label, and is drawn token by token, because every label has several tokens. It is weighed exactly, or not at all with
local masking. *Explained*: the program draws the label and observes the message after "A customer's message to a shop,
about LABEL". It draws nothing else, so `enumerate_exact` sums over the labels. *Calibrated* divides by the probability
of the label for a message without content. This removes the model's preference for the label itself (Zhao et al. 2021).

What to look for (`--lm smollm2`): without a constraint the model almost never answers with a label. With a mask, it
takes the label that begins well, and guesses. The posterior of the same answer is right in half of the messages. As an
explanation the label is right in three quarters, with a mean probability of 0.82. That is not much more than the share
of right answers, as it should be for a classifier. Without any knowledge, the three columns would be 0.20, 0.20 and
log(1/5) = -1.61. Dividing by the label's own probability makes the answers overconfident. It helps the explanations,
but within the error. The embedded model has read about children and animals only, and guesses with every method.

    40 messages, N=10
                                          right         believed   log p(label)
      free sampling, N answers             0.03 ± 0.02       0.01        -4.55
      local masking, N answers             0.23 ± 0.07       0.60        -2.30
        calibrated                         0.23 ± 0.07       0.80        -2.70
      answered, smc_steer N, K=3           0.53 ± 0.08       0.69        -1.74
        calibrated                         0.47 ± 0.08       0.82        -1.84
      explained, exact                     0.72 ± 0.07       0.82        -0.89
        calibrated                         0.75 ± 0.07       0.83        -0.74
"""

import argparse
from collections.abc import Callable

import numpy as np

from llmppl import (
    EOS,
    CachedTransformer,
    ConstrainedText,
    Model,
    Particles,
    Regex,
    Uniform,
    enumerate_exact,
    importance_sampling,
    smc_steer,
)
from llmppl.distributions import Floats, Ints
from llmppl.lm import Context

MESSAGES = {
    "late delivery": [
        "My parcel should have been here on Monday and it still has not come.",
        "I ordered ten days ago and nothing has arrived.",
        "Where is my package? The tracking has not moved for a week.",
        "You promised it by Friday; today is Tuesday.",
        "How long does it take? I have been waiting for the lamp since June.",
        "The birthday was yesterday and the present is not here yet.",
        "It says out for delivery every day, and nobody comes.",
        "Two weeks for a book from the next town?",
    ],
    "damaged goods": [
        "The vase was in pieces when I opened the box.",
        "One of the chair's legs is cracked.",
        "The screen has a long scratch across it.",
        "The bottle leaked over everything in the box.",
        "The cups came without handles: they had all broken off.",
        "There is a dent in the side of the kettle.",
        "The shirt has a hole under the arm.",
        "It was so badly packed that the mirror did not survive.",
    ],
    "refund": [
        "I sent the shoes back and would like my money.",
        "Please pay back what I was charged for the order that I cancelled.",
        "You charged my card twice, I want one of the two payments back.",
        "I returned the coat a month ago and have not got my money.",
        "When will the 30 euros be on my account again?",
        "I do not want another one, I want what I paid for it.",
        "The return was accepted, but the payment was never reversed.",
        "Can I have my money back if I do not like it?",
    ],
    "account login": [
        "I forgot my password and the reset mail does not come.",
        "It says that my user name does not exist.",
        "I cannot sign in on my new phone.",
        "My account is locked after three tries.",
        "The code that you sent me is not accepted.",
        "Since the update the app asks for my password every time.",
        "How do I change the e-mail address that I sign in with?",
        "The page says wrong password, but it is right.",
    ],
    "price question": [
        "How much is the large one?",
        "Is it cheaper if I buy ten of them?",
        "What does shipping to Norway cost?",
        "Do students pay less?",
        "Is the tax included in the 49.90?",
        "The blue one costs more than the red one, why?",
        "Will it be on sale before Christmas?",
        "What would it cost with the longer cable?",
    ],
}
LABELS = list(MESSAGES)
LANGUAGE = Regex("|".join(LABELS))


class Answered(Model):
    """Label in the model's answer, given that the answer is a label; `local` masks without a weight."""

    def __init__(self, lm: CachedTransformer, message: str, local: bool) -> None:
        super().__init__()
        self.context, self.local = asked(lm, message), local
        self.index = LANGUAGE.index(lm.vocab)
        self.state = self.index.start

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.index.mask(self.state))
        token = self.sample(allowed) if self.local else self.sample(p, proposal=allowed)
        if token == EOS:
            return self.finish()
        self.state = self.index.advance(self.state, token)
        self.context += token
        self.s += token


class Explained(Model):
    """Label of a given message, with a uniform prior over labels."""

    def __init__(self, lm: CachedTransformer, message: str) -> None:
        super().__init__()
        self.contexts = tuple(context_of(lm, label) for label in LABELS)
        self.message = message

    def step(self) -> None:
        label = self.sample(Uniform(0, len(LABELS) - 1))
        self.observe(self.transformer(self.contexts[label]).string(), self.message)
        self.s = LABELS[label]
        self.finish()


def asked(lm: CachedTransformer, message: str) -> Context:
    """Return the context that asks the model for a label."""
    task = "You sort messages of customers of a shop. Answer with one of these labels and nothing else: "
    task += ", ".join(LABELS) + "."
    if getattr(lm.tokenizer, "chat_template", None) is None:
        return lm.context(f"{task}\nMessage: {message}\nLabel: ")
    return lm.chat([{"role": "system", "content": task}, {"role": "user", "content": message}])


def context_of(lm: CachedTransformer, label: str) -> Context:
    """Return the context before a message about the label."""
    return lm.context(f'A customer\'s message to a shop, about {label}:\n"')


def over_labels(particles: Particles[Model]) -> Floats:
    """Return the (5,) probability of each label; a text that is not a label counts for none."""
    return particles.expect(lambda particle: np.array([particle.s.strip(" .").lower() == label for label in LABELS]))


def report(name: str, probabilities: Floats, truth: Ints) -> None:
    """Print a line of the table: `probabilities` is (messages, 5)."""
    right = probabilities.argmax(axis=1) == truth
    right &= probabilities.max(axis=1) > 0
    of_truth = np.log(np.maximum(probabilities[np.arange(len(truth)), truth], 0.01))
    error, believed = np.std(right) / np.sqrt(len(truth)), probabilities.max(axis=1)
    print(f"  {name:34}{right.mean():7.2f} ± {error:.2f}{believed.mean():11.2f}{of_truth.mean():13.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    per_label, N = (1, 4) if args.quick else (8, 10)

    lm = CachedTransformer.from_pretrained(args.lm)
    cases = [(label, message) for label in LABELS for message in MESSAGES[label][:per_label]]
    truth = np.array([LABELS.index(label) for label, _ in cases])
    methods: dict[str, Callable[[str], Particles[Model]]] = {
        "free sampling, N answers": lambda message: importance_sampling(
            ConstrainedText(lm, asked(lm, message), max_tokens=6), N, seed=args.seed
        ),
        "local masking, N answers": lambda message: importance_sampling(
            Answered(lm, message, local=True), N, seed=args.seed
        ),
        "answered, smc_steer N, K=3": lambda message: smc_steer(
            Answered(lm, message, local=False), N, 3, seed=args.seed
        ),
        "explained, exact": lambda message: enumerate_exact(Explained(lm, message + '"')),
    }
    print(f"{len(cases)} messages, N={N}\n  {'':34}  right         believed   log p(label)")
    for name, method in methods.items():
        found = np.array([over_labels(method(message)) for _, message in cases])
        report(name, found, truth)
        if not name.startswith("free"):
            nothing = over_labels(method("..."))
            calibrated = found / np.maximum(nothing, 0.01)
            report("  calibrated", calibrated / calibrated.sum(axis=1, keepdims=True), truth)


if __name__ == "__main__":
    main()
