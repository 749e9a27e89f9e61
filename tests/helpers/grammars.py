"""Grammars, random texts of them, and the comparison of masks with reading the tokens."""

import itertools

import numpy as np
from lark import Lark
from lark.exceptions import LarkError

from llmppl.constraints import Grammar
from llmppl.constraints.masks.index import TokenIndex


def parses(lark, text):
    try:
        lark.parse(text)
    except (LarkError, IndexError, AssertionError):
        return False
    return True


def plain_lark(grammar, start="start", **options):
    return Lark(grammar, parser="lalr", lexer="contextual", start=start, **options)


def check_states(grammar, alphabet, length, **options):
    """Compare recognizer and lark on all texts over `alphabet` (ASCII) of at most `length`; return how many parse."""
    lark = plain_lark(grammar, **options)
    texts = ["".join(text) for n in range(length + 1) for text in itertools.product(alphabet, repeat=n)]
    language = {text for text in texts if parses(lark, text)}
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    try:
        recognizer = Grammar(grammar, **options)
    except ValueError as error:
        assert "no text" in str(error) and not language, (grammar, error)
        return 0
    states = {"": recognizer.start}
    for text in texts:
        state = states.get(text)
        assert (state is not None and recognizer.accepts(state)) == (text in language), (grammar, text)
        assert state is not None or text not in prefixes, (grammar, text, "has a continuation that lark parses")
        for letter in alphabet if state is not None else ():
            after = recognizer.step(state, ord(letter))
            if after is not None:
                states[text + letter] = after
    return len(language)


PIECES = [*'"a" "b" "ab" "ba" "aab" "c" /a+/ /b+/ /[ab]+/ /ab?/ /a|ab/ /a+?/ /a*b/ /[ab]+c/ /b(a|bb)?/ /(ab)+/'.split()]
PIECES += "/a(?!b)/ /a(?=b)/ /a+(?=bc)/ /(?<=a)b/ /(?<!a)b/ /[ac]/ /b+$/ /^a/ /a+c?/ /A+/i /a++b?/ /\\bb/".split()


def random_grammar(rng):
    """Return the text of a grammar: two or three rules over overlapping terminals; often some text is ignored."""
    rules = ["start", "x", "y"][: rng.choice([1, 2, 2, 3])]
    names = [f"T{i}" for i in range(rng.choice([2, 3, 4]))]
    lines = []
    for rule in rules:
        choices = []
        for _ in range(rng.choice([1, 2, 2, 3])):
            symbols = [rng.choice(names + [rng.choice(rules)]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
            choices.append(" ".join(symbols))
        lines.append(f"{rule}: " + "\n  | ".join(choices))
    for name in names:
        priority = rng.choice(["", "", "", ".1", ".2"])
        lines.append(f"{name}{priority}: {rng.choice(PIECES)}")
    if rng.random() < 0.4:
        lines.append(f"%ignore {rng.choice(PIECES[5:] + ['/ /', '/ +/'])}")
    return "\n".join(lines)


JSON = r"""
start: value
?value: dict | list | STR | NUM | "true" | "false" | "null"
dict: "{" [entry ("," entry)*] "}"
entry: STR ":" value
list: "[" [value ("," value)*] "]"
STR: /"(\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4}|[^"\\\x00-\x1f])*"/
NUM: /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/
%ignore /[ \t\n\r]+/
"""
ARITHMETIC = r"""
start: sum
sum: product | sum ("+" | "-") product
product: power | product ("*" | "/") power
power: unit ["^" power]
unit: NUMBER | NAME | NAME "(" [sum ("," sum)*] ")" | "-" unit | "(" sum ")"
NUMBER: /\d+(\.\d+)?(e[-+]?\d+)?/
NAME: /[a-z]\w*/
%ignore " "
"""
SQL = r"""
start: query ";"?
query: "select"i ["distinct"i] what "from"i table join* ["where"i cond] ["order"i "by"i expr ["desc"i | "asc"i]]
join: "join"i table "on"i cond
what: "*" | expr ["as"i NAME] ("," expr ["as"i NAME])*
table: NAME ["as"i NAME] | "(" query ")"
cond: both ("or"i both)*
both: basic ("and"i basic)*
basic: "not"i basic | expr COMPARE expr | expr "is"i ["not"i] "null"i | expr "in"i "(" (query | expr ("," expr)*) ")"
expr: term (("+" | "-") term)*
term: NAME ["." NAME] | INT | REAL | TEXT | AGGREGATE "(" ("*" | expr) ")" | "(" expr ")"
COMPARE: "=" | "<>" | "<=" | ">=" | "<" | ">"
AGGREGATE: "count"i | "sum"i | "max"i
NAME: /[a-z_]\w*/i
INT: /[0-9]+/
REAL: /[0-9]+\.[0-9]*/
TEXT: /'([^'\n]|'')*'/
%ignore /[ \n]+/
"""
PYTHON = r"""
start: (NL | line)*
line: small (";" small)* ";"? NL | "def" NAME "(" [NAME ("," NAME)*] ")" ":" small NL
small: test | NAME "=" test | NAME AUGMENTED test | "return" [test] | "pass" | "del" NAME | "assert" test
     | "import" NAME ["as" NAME]
     | "if" test ":" small ["else" ":" small] | "for" NAME "in" test ":" small
test: either ["if" either "else" test] | "lambda" [NAME ("," NAME)*] ":" test
either: both ("or" both)*
both: compared ("and" compared)*
compared: "not" compared | sum [("<" | ">" | "==" | "in" | "not" "in" | "is" | "is" "not") sum]
sum: product (("+" | "-") product)*
product: atom (("*" | "/" | "//" | "%" | "**") atom)*
atom: NAME | NUMBER | STRING | "None" | "True" | "(" [test ("," test)*] ")" | "[" [test ("," test)*] "]" | "..."
    | "{" [test ":" test ("," test ":" test)*] "}" | "-" atom
    | atom "(" [test ("," test)*] ")" | atom "[" test "]" | atom "." NAME
AUGMENTED: /[-+*\/]=/
NAME: /[^\W\d]\w*/
NUMBER: /0[xX][0-9a-f]+|[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|\.[0-9]+/
STRING: /[fr]?("(?!"")(\\.|[^"\\\n])*"|'(\\.|[^'\\\n])*')/
NL: /(\r?\n[ \t]*)+/
%ignore /[ \t]+/
%ignore /#[^\n]*/
"""
GRAMMARS = {
    "json": (
        JSON,
        {"STR": ['""', '"a"', '"\\u00e9\\n"', '"Zoë 日本 🙂"'], "NUM": ["0", "-1", "2.5", "1e9", "-0.1E-2"]},
        '"}]:,0 ',
    ),
    "arithmetic": (ARITHMETIC, {"NUMBER": ["1", "2.5", "3e4", "1e", "07"], "NAME": ["x", "e1", "max", "éa"]}, "()0a,"),
    "sql": (
        SQL,
        {
            "COMPARE": ["=", "<", "<=", "<>"],
            "AGGREGATE": ["count", "SUM"],
            "NAME": ["a", "Tbl", "selected", "as_", "orders", "éa"],
            "INT": ["1", "20"],
            "REAL": ["1.", "2.5"],
            "TEXT": ["''", "'it''s'", "'é'"],
        },
        "selctfromonwhybaidu ,.()'*=1;",
    ),
    "python": (
        PYTHON,
        {
            "AUGMENTED": ["+=", "/="],
            "NAME": ["x", "define", "is_", "π", "notin", "f"],
            "NUMBER": ["1", "0xff", ".5", "1.", "2e-3"],
            "STRING": ["''", '"a"', "f'\\''", 'r"é"', '"#"'],
            "NL": ["\n", "\r\n  ", "\n\n"],
        },
        "x ()[]{}:=,.'\"\npasinotelr",
    ),
}  # fmt: skip


class Bare:
    """A grammar as a recognizer that offers only steps by bytes."""

    def __init__(self, grammar):
        self.start, self.step, self.accepts = grammar.start, grammar.step, grammar.accepts


def content(state):
    """Return the contents of a state without the identities of its objects, of which old ones may be dropped."""

    def below(stack):
        while stack is not None:
            yield stack.state, stack.layout
            stack = stack.below

    found = {(tuple(below(after.stack)), unit.states[number]) for unit, number, after in state.hypotheses}
    return found, state.accepts


def masks_agree(grammar, vocab, rng, walks, length):
    """Compare the masks of both ways in every state of some random walks; return how many states these were."""
    index, bare, seen = grammar.index(vocab), TokenIndex(Bare(grammar), vocab), 0
    for _ in range(walks):
        state, text = index.start, b""
        for _ in range(length):
            mask = index.mask(state)
            wrong = np.flatnonzero(mask != bare.mask(state))
            assert not wrong.size, (grammar.text, text, [vocab.tokens[i] for i in wrong[:5]], mask[wrong[:5]])
            seen += 1
            ids = index.allowed(state)
            ids = ids[~np.isin(ids, vocab.eos_ids)]
            if not ids.size:
                break
            short = rng.permutation(ids)[:8].tolist()
            token = min(short, key=lambda i: len(vocab.tokens[i])) if rng.random() < 0.6 else short[0]
            assert content(index.advance(state, token)) == content(bare.advance(state, token))
            state, text = index.advance(state, token), text + vocab.tokens[token]
    return seen
