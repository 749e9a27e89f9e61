"""Values of texts with special tokens: every row of symbols, and every row of tokens of a model."""

import itertools
import pickle

import pytest
from helpers.tiny import tiny_model

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    Grammar,
    JsonSchema,
    Model,
    Regex,
    Vocabulary,
    enumerate_exact,
    generate,
    importance_sampling,
)
from llmppl.constraints import Special
from llmppl.constraints.machine.values import match_prefix, with_symbols
from llmppl.tasks import load_results

X, Y = Special("<x>"), Special("<y>")
SYMBOLS = ["a", "b", X, Y]
TOKENS = [b"a", b"b", b"", b"", b"ab", b""]  # a b <x> <y> ab <end>
VOCAB = Vocabulary(TOKENS, eos_ids=[5], special_texts={2: "<x>", 3: "<y>", 5: "<end>"})
CALL = ("a" + X).named("one") | ("a" + Y).named("two")
NUMBERS = JsonSchema({"enum": ["b"]}).named("json")
CASES = [
    (CALL, {("a", X): {"one": "a"}, ("a", Y): {"two": "a"}}),
    (
        CALL | Regex("a?b").named("words"),
        {
            ("a", X): {"one": "a"}, ("a", Y): {"two": "a"},
            ("b",): {"words": "b"}, ("a", "b"): {"words": "ab"},
        },
    ),
    (
        X.named("yes") | Y.named("no") | "a",
        {(X,): {"yes": None}, (Y,): {"no": None}, ("a",): "a"},
    ),
    (
        (X + Regex("[ab]")).times(0, 2),
        {
            (): [],
            **{(X, a): [(a,)] for a in "ab"},
            **{(X, a, X, b): [(a,), (b,)] for a in "ab" for b in "ab"},
        },
    ),
    (
        Regex("a*").named("before") + X + Regex("[ab]*").named("after"),
        {
            (*before, X, *after): {"before": before, "after": "".join(after)}
            for before in ("", "a", "aa", "aaa")
            for size in range(4 - len(before))
            for after in itertools.product("ab", repeat=size)
        },
    ),
    ((X | Y).optional() + "b" + Y.optional(), {
        (*before, "b", *after): (None, None)
        for before in ((), (X,), (Y,))
        for after in ((), (Y,))
    }),
    (Grammar('start: "a"+').named("g") + (X | Y), {
        ("a",) * n + (end,): {"g": "a" * n} for n in (1, 2, 3) for end in (X, Y)
    }),
    ((Regex("[ab]") + (X | Y)) & (CALL | "b" + X), {
        ("a", X): {"one": "a"}, ("a", Y): {"two": "a"}, ("b", X): ("b", None),
    }),
    (X + X | X + "a" + Y, {(X, X): "", (X, "a", Y): "a"}),
]  # fmt: skip


@pytest.mark.parametrize("part, values", CASES)
def test_parse_reads_special_tokens_as_symbols(part, values):
    for size in range(5):
        for symbols in itertools.product(SYMBOLS, repeat=size):
            if symbols in values:
                assert part.parse(symbols) == values[symbols] and symbols in part
            else:
                assert symbols not in part


@pytest.mark.parametrize("part, values", CASES)
def test_an_index_parses_tokens(part, values):
    index = pickle.loads(pickle.dumps(part)).index(VOCAB)
    for size in range(5):
        for ids in itertools.product(range(5), repeat=size):
            symbols = symbols_of(ids)
            if len(symbols) > 4:
                continue
            if symbols in values:
                assert index.parse(ids) == values[symbols]
            else:
                with pytest.raises(ValueError, match=" is not in "):
                    index.parse(ids)


def symbols_of(ids):
    """Return the symbols of tokens, of which 4 is two."""
    found = []
    for id in ids:
        found += {2: [X], 3: [Y]}.get(int(id), TOKENS[id].decode())
    return tuple(found)


@pytest.mark.parametrize("part, values", CASES)
def test_the_longest_prefix_that_fits_is_that_of_the_texts(part, values):
    names = {X: "<x>", Y: "<y>"}
    for symbols in itertools.product(SYMBOLS, repeat=3):
        written = [names.get(symbol, symbol) for symbol in symbols]
        begun = [n for n in range(4) if any(text[:n] == symbols[:n] for text in values)]
        found = match_prefix(part, with_symbols("".join(written), ["<x>", "<y>"]))
        assert found.length == len("".join(written[: begun[-1]]))
        assert found.complete == (symbols[: begun[-1]] in values)
        fits = {text[begun[-1]] for text in values if text[: begun[-1]] == symbols[: begun[-1]]
                and len(text) > begun[-1]}  # fmt: skip
        for symbol in SYMBOLS:
            shown = names.get(symbol, f"b'{symbol}'")
            assert (shown in found.expected) == (symbol in fits) or begun[-1] == 3
        assert ("the text must end" in found.expected) == found.complete


def test_names_of_special_tokens_are_text_where_no_part_asks_for_them():
    assert with_symbols("a<x>b", []) == ["a<x>b"] == with_symbols("a<x>b", [2])
    spelled = "<x>a"
    assert match_prefix(Regex("<x>a"), with_symbols(spelled, [])).complete
    assert match_prefix(X + "a", with_symbols(spelled, ["<x>"])).complete
    assert match_prefix(X + "a", [spelled]).expected == "the special token '<x>' must follow"


def test_errors_show_the_special_tokens_of_a_text():
    with pytest.raises(ValueError, match=r"\['ab', Special\('<x>'\), 'a'\] is not in \('a' \+"):
        CALL.index(VOCAB).parse([0, 1, 2, 0])
    with pytest.raises(ValueError, match=r"Special\('<x>'\) and Special\(2\) are one token: write"):
        (CALL | Special(2)).index(VOCAB)
    index = ("a" + X).index(VOCAB)
    state = index.advance(index.start, 0)
    with pytest.raises(ValueError, match=r"token 3 \(special '<y>'\) cannot follow .*: the special "
                       r"token '<x>' must follow\. Tokens that can: 2 \(special '<x>'\)"):  # fmt: skip
        index.advance(state, 3)


@pytest.fixture(scope="module")
def lm():
    return CachedTransformer(tiny_model(), VOCAB)


PART = (CALL | Regex("b").named("words")).times(1, 2)
VALUES = {("a", X): {"one": "a"}, ("a", Y): {"two": "a"}, ("b",): {"words": "b"}}


def value_by_hand(ids):
    """Return the value of tokens of `PART`."""
    symbols = symbols_of(ids)
    for size in (1, 2):
        if symbols[:size] in VALUES:
            rest = value_by_hand(ids[size:]) if symbols[size:] else []
            return [VALUES[symbols[:size]], *rest]
    raise ValueError(f"{symbols} begins with no text")


def test_particles_have_the_values_of_their_tokens(lm):
    posterior = enumerate_exact(ConstrainedText(lm, "a", PART, end="prefix"))
    found = {}
    for particle, weight in zip(posterior, posterior.weights, strict=True):
        ids = [int(token) for token in particle.context.tokens[1:]]
        assert particle.parsed == value_by_hand(ids)
        found[repr(particle.parsed)] = found.get(repr(particle.parsed), 0) + weight
    assert len(found) == 3 + 9
    assert {repr(value): share for value, share in posterior.by("parsed").items()} == (
        pytest.approx(found)
    )


@pytest.mark.parametrize("method", ["sample", "greedy", "beam", "best_of", "importance", "steer"])
def test_answers_have_the_values_of_their_tokens(lm, method):
    for seed in range(5):
        answer = generate(lm, "a", PART, method=method, seed=seed)
        ids = [int(token) for token in answer.particle.context.tokens[1:]]
        assert answer.value == value_by_hand(ids)
        assert pickle.loads(pickle.dumps(answer)).value == answer.value


def test_files_of_answers_keep_the_values_of_tokens(lm, tmp_path):
    file = tmp_path / "answers.db"
    answers = generate(lm, ["a", "b"], PART, method="sample", seed=1, to=file)
    assert [each.value for each in load_results(file, PART)] == [each.value for each in answers]


class OneSpan(Model):
    """Span under a constraint, with its value."""

    def __init__(self, context):
        super().__init__()
        self.context = context

    def step(self):
        span = self.extend(self.context, constraint=CALL)
        self.tokens = span.context.tokens[-2:]
        self.value = span.parsed
        self.finish()


def test_a_span_has_the_value_of_its_tokens(lm):
    posterior = importance_sampling(OneSpan(lm.context("a")), 20, seed=0)
    for particle in posterior:
        assert particle.value == value_by_hand(particle.tokens)[0]
    assert len({repr(particle.value) for particle in posterior}) == 2
