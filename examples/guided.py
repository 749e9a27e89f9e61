"""Guided and unguided: the answers of a language model with and without a required form.

These are the listings of Willard & Louf 2023, Sec. 3: yes or no, a year, an IP address, and a name for a variable at
temperature 0.1 (with several bounds on its length, one run each). Each question is continued for 30 tokens freely, and
in the language of a regular expression. A guided answer ends where the model leaves the language, or where nothing can
follow. It does not need EOS, which a model of stories rarely writes after one word.

What to look for: the guided answer has the required form, whatever the model knows. The embedded model knows nothing
about the questions and has seen few digits. The form does not guarantee the content. log Z-hat shows how far the free
model is from the form.

    Is 1+1=2?
      unguided  'cipricadiat."'
      guided    'Yes'  (log Z-hat -1.1)

    In what year was Noam Chomsky born?
      unguided  'It might have gone far."'
      guided    ' 1913'  (log Z-hat -21.3)

    What is the IP address of the Google DNS servers?
      unguided  "Yes, mixture. Yes, you can praise you, father; but you must not rejoice till all I'm satisfied," [cut]
      guided    '43.00.242.000'  (log Z-hat -17.3)

    What is a good Python variable name? (temperature 0.1)
      unguided     'Yes, I am sure you are a very good-looking man, and I am a very good-looking man, and I ...' [cut]
      at most 1    'Yes'
      at most 2    'Yes'
      at most 4    'Yes'
      at most 8    'Yes'
"""

import argparse

from llmppl import CachedTransformer, ConstrainedText, Particles, Regex, Rule, smc_steer

BYTE = r"(25[0-5]|2[0-4]\d|[01]?\d\d?)"
QUESTIONS = [
    ("Is 1+1=2? ", r"\s*([Yy]es|[Nn]o|[Nn]ever|[Aa]lways)"),
    ("In what year was Noam Chomsky born?\n", r"\s*19[0-9]{2}"),
    ("What is the IP address of the Google DNS servers? ", rf"({BYTE}\.){{3}}{BYTE}"),
]
NAME = ("What is a good Python variable name? ", r"[^\W\d]\w*")


def shown(posterior: Particles[ConstrainedText]) -> str:
    """Return one text of the posterior, on one line."""
    text = posterior.sample(seed=0)
    return repr(text.s) + " [cut]" * text.cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_tokens, N, K = (8, 2, 2) if args.quick else (30, 10, 3)

    lm = CachedTransformer.from_pretrained(args.lm)
    for question, pattern in QUESTIONS:
        unguided = smc_steer(ConstrainedText(lm, question, max_tokens=num_tokens), 1, 1, seed=args.seed)
        guided = smc_steer(ConstrainedText(lm, question, Regex(pattern), max_tokens=30), N, K, seed=args.seed)
        print(f"\n{question.strip()}")
        print(f"  unguided  {shown(unguided)}")
        print(f"  guided    {shown(guided)}  (log Z-hat {guided.log_ml:.1f})")

    question, pattern = NAME
    print(f"\n{question.strip()} (temperature 0.1)")
    free = ConstrainedText(lm, question, max_tokens=num_tokens, rule=Rule(temperature=0.1))
    unguided = smc_steer(free, 1, 1, seed=args.seed)
    print(f"  unguided     {shown(unguided)}")
    for most in (1, 2, 4, 8):
        program = ConstrainedText(lm, question, Regex(pattern), max_tokens=most, rule=Rule(temperature=0.1))
        print(f"  at most {most}    {shown(smc_steer(program, 1, 1, seed=args.seed))}")


if __name__ == "__main__":
    main()
