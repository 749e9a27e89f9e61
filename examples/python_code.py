"""Python by a grammar: functions that parse, and the names that they use.

The grammar is a small part of Python: a function of one line, its arguments, and an expression of these or other names.
A name must not be a keyword; its terminal uses look-ahead for this. The program parses each text with Python, and shows
its names.

What to look for: every text parses, and ends within its tokens. The embedded model has never seen a program. It adds
names that are words or look like words, and uses little else. The grammar does not know which names are already in use.
All but one of the functions below have two arguments of one name. This parses, but Python would refuse to compile it.

    How do I know if a dog is big?  (log Z-hat -114.3)
      def melegs(washer, which, though, they, thesey, thesey): return again    # names used: again
      def melegs(washer, which, though, they, thesey, thesey): return to    # names used: to
      def melegs(washer, which, though, they, thesey, thesey): return up    # names used: up
      def melegs(washer, which, though, they, theyen, ayahb): return again    # names used: again

    def is_happy(friend): return friend == "happy"  (log Z-hat -77.5)
      def cribbb(ouncy, beaked, energy, defeat, energy): return a    # names used: a
      def cribbb(ouncy, beaked, energy, defeat, energy): return also    # names used: also
      def cribbb(ouncy, beaked, energy, defeat, energy): return back    # names used: back
      def cribbb(ouncy, beaked, energy, defeat, energy): return be    # names used: be
"""

import argparse
import ast
import keyword

from llmppl import CachedTransformer, ConstrainedText, Grammar, Rule, smc_steer

GRAMMAR = r"""
start: "def " NAME "(" NAME ("," " " NAME)* "):" " " body
body: "return " test | NAME " = " test "; return " test
test: sum [" if " sum " " COMPARE " " sum " else " test]
sum: term (" " SIGN " " term)*
term: NAME | NUMBER | STRING | NAME "(" test ("," " " test)* ")" | "not " term
COMPARE: "<" | ">" | "==" | "in"
SIGN: "+" | "-" | "*"
NAME: /(?!KEYWORDS)[a-z]{1,6}(_[a-z]{1,6})?/
NUMBER: /0|[1-9][0-9]*/
STRING: /"[a-z ]*"/
""".replace("KEYWORDS", rf"({'|'.join(keyword.kwlist)})\b")
PROMPTS = ["How do I know if a dog is big?\n", "def is_happy(friend): return friend == \"happy\"\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    N, K, num_tokens = (2, 2, 16) if args.quick else (20, 4, 30)

    lm, grammar = CachedTransformer.from_pretrained(args.lm), Grammar(GRAMMAR)
    for prompt in PROMPTS:
        program = ConstrainedText(lm, prompt, grammar, max_tokens=num_tokens, rule=Rule(temperature=0.8))
        posterior = smc_steer(program, N, K, seed=args.seed)
        print(f"{prompt.strip()}  (log Z-hat {posterior.log_ml:.1f})")
        for text in sorted({particle.s for particle in posterior})[:4]:
            names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
            print(f"  {text}    # names used: {', '.join(sorted(names)) or 'none'}")
        print()


if __name__ == "__main__":
    main()
