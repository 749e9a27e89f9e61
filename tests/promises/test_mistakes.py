"""What a newcomer gets wrong: each mistake is answered by its name, its place and what works."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import TOKENS, table_lm, tiny_lm, tiny_model

from llmppl import (
    Categorical,
    ConstrainedText,
    Grammar,
    Infilling,
    JsonSchema,
    Model,
    PromptIntersection,
    Regex,
    Rule,
    Vocabulary,
    enumerate_exact,
    generate,
    importance_sampling,
    repeat,
    smc_steer,
)
from llmppl.lm import CachedTransformer
from llmppl.models.programs import short_words
from llmppl.queries import extraction, search

V = 6
A, B, C, SPACE, AB, END = range(6)
LM = tiny_lm(V)
AT = "JSON schema at "


def program(**options):
    return ConstrainedText(LM, "a", Regex("a*b"), **options)


def load(**options):
    return CachedTransformer.from_pretrained(**options)


def run(step):
    """Inference of a program of one step."""

    class Once(Model):
        def step(self):
            step(self)
            self.finish()

    return importance_sampling(Once(), 1)


def letters(text: str) -> CachedTransformer:
    """A model of the letters, the blank and EOS, all equally likely."""
    tokens = [*(bytes([each]) for each in text.encode()), b""]
    return CachedTransformer(lambda ids: [0.0] * len(tokens), Vocabulary(tokens, eos_ids=[len(tokens) - 1]))


MISTAKES = [
    # ---- the language model and the prompt
    (lambda: ConstrainedText("abc", LM), TypeError, "prompt must be .*, and the language model comes before"),
    (lambda: program(temperature=0.5), TypeError, r"takes no temperature: give it in rule=Rule\(temperature=...\)"),
    (lambda: importance_sampling(program(), 3).expect("s"), TypeError, "f must be a function of a particle, as lambda"),
    (lambda: importance_sampling(program(), 3)["s"], TypeError, r"by\('s'\) is the posterior of an attribute"),
    (lambda: generate(LM, "a", {"type": "object"}), TypeError, "give JsonSchema"),
    (lambda: importance_sampling(program(), 3).log_Z, AttributeError, "has no log_Z: .*log_ml estimates log Z"),
    (lambda: importance_sampling(program(), 3).best.text, AttributeError, "Text has no text: it is s, or str"),
    (lambda: generate(LM, "a", max_tokens=1).confidence, AttributeError, "its confidence is probability"),
    (lambda: generate(LM, "a", ["a", "b"]).posterior.best_option, AttributeError, "no best_option: take best"),
    (lambda: ConstrainedText("gpt2", "a"), TypeError, r"not 'gpt2': CachedTransformer.from_pretrained\(name\)"),
    (lambda: ConstrainedText(tiny_model(V), "a"), TypeError, r"not a Llama\w+: .* CachedTransformer\(model, tokeni"),
    (lambda: ConstrainedText(LM, None), TypeError, "prompt must be a str or a Context, not None"),
    (lambda: ConstrainedText(LM, ["a", "b"]), TypeError, "prompt must be .* run_many takes many prompts"),
    (lambda: ConstrainedText(LM, [{"role": "user"}]), TypeError, r"prompt must be .*: lm.chat\(messages\) makes one"),
    (lambda: Infilling("a[BLANK]b", LM), TypeError, r"lm must be a CachedTransformer, not 'a\[BLANK\]b'"),
    (lambda: PromptIntersection(["a"], LM), TypeError, "lm must be a CachedTransformer, not 'a'"),
    (lambda: CachedTransformer("gpt2", "gpt2"), TypeError, r"tokenizer must be .*from_pretrained\(name\) loads a"),
    (lambda: CachedTransformer(tiny_model(V), tiny_model(V)), TypeError, r"tokenizer must be .*, not a Llama\w+: "),
    (lambda: CachedTransformer.from_pretrained(tiny_model(V)), TypeError, r"not a Llama\w+: .*former\(model, tok"),
    (lambda: CachedTransformer.from_pretrained(cache_bytes="2GB"), TypeError, "cache_bytes must be an integer, not"),
    (lambda: load(n_ctx=512), TypeError, "takes no n_ctx: it is an option of engine='llama.cpp'"),
    # ---- options
    (lambda: program(max_new_tokens=5), TypeError, r"takes no max_new_tokens: did you mean max_tokens\?"),
    (lambda: search(LM, "ab", max_results=3), TypeError, r"no max_results: itertools.islice\(search\(...\), n\)"),
    (lambda: importance_sampling(program(), 3).mean, AttributeError, r"take best.mean, by\('mean'\) or expect\(f\)"),
    (lambda: Regex("a") | JsonSchema({"type": "object"}).automaton, TypeError, "if it is None, .fallback_reason says"),
    (lambda: extraction(LM, "a", "b").tries(0.5), AttributeError, "Extraction has no tries: near.tries"),
    (lambda: smc_steer(program(), 2, max_tokens=5), TypeError, "smc_steer takes no max_tokens: it takes K, N, budget"),
    (lambda: smc_steer(program(), 2, max_step=5), TypeError, r"takes no max_step: did you mean max_steps\?"),
    (lambda: Rule(temperature="hot"), TypeError, "temperature must be a number, not 'hot'"),
    (lambda: repeat(smc_steer(program(), 2, seed=0), 3), TypeError, "run must be a function, as .* not a P"),
    (lambda: repeat(lambda: smc_steer(program(), 2, seed=0), 3), TypeError, "run must take 1 argument, as lambda"),
    (lambda: ConstrainedText(LM, letters("ab").context("a")), ValueError, "and it is one of .*, with other tokens"),
    # ---- programs
    (lambda: run(lambda self: self.sample({"a": 0.5, "b": 0.5})), TypeError, r" Categorical\(\{'a': 0.5, 'b"),
    (lambda: run(lambda self: self.sample(LM.context("a"))), TypeError, r": give self.transformer\(context\)"),
    (lambda: run(lambda self: self.observe(LM.context("a"), 0)), TypeError, r": give self.transformer\(context\)"),
    (lambda: str(run(lambda self: setattr(self, "s", LM.vocab[0])).best), TypeError, r"s must be a str.*self.s \+= t"),
    # ---- constraints
    (lambda: Grammar("sql.lark"), ValueError, r"'sql.lark' is the name of a file: Grammar.from_file\('sql.lark'\)"),
    (lambda: Grammar(Path("sql.lark")), TypeError, "grammar must be a str, not .*Path"),
    (lambda: JsonSchema("a/record.json"), ValueError, r"pass its content: JsonSchema\(Path\('a/record.json'\).read_t"),
    (lambda: JsonSchema(Path("record.json")), ValueError, r"JsonSchema\(Path\('record.json'\).read_text\(\)\)"),
    (lambda: JsonSchema({"propertyes": {}}), ValueError, AT + "#: 'propertyes' is no keyword: did you mean 'propert"),
    (lambda: JsonSchema({"items": {"max_length": 4}}), ValueError, AT + "#/items: 'max_length' .* mean 'maxLength'"),
    (lambda: JsonSchema({"$defs": {"a": {"typ": "null"}}, "$ref": "#/$defs/a"}), ValueError, "a: .* mean 'type'"),
    (lambda: JsonSchema({"type": ["strng"]}), ValueError, AT + "#, 'type': .*; did you mean 'string'"),
    (lambda: JsonSchema({"name": {"type": "string"}}), ValueError, AT + "# has no keyword, .* are 'name' properties?"),
    (lambda: Regex("a").index(LM.vocab).advance(1, "a"), TypeError, "token must be an integer, not 'a'"),
    (lambda: JsonSchema({}).index(LETTERS.vocab).advance((), "1"), TypeError, "token must be an integer, not '1'"),
    (lambda: ConstrainedText(LM, "a", "a+b"), TypeError, r"not 'a\+b': give Regex\('...'\) for a pattern"),
    (lambda: ConstrainedText(LM, "a", SCHEMA), TypeError, r"JsonSchema\(...\) for a schema"),
    (lambda: ConstrainedText(LM, "a", regex="a+"), TypeError, "ConstrainedText takes no regex: it takes complete, "),
    (lambda: Grammar('root ::= "a"'), ValueError, "lark writes a rule as start: ..., not as root ::= ..."),
    # ---- distributions and results
    (lambda: Categorical(["a", "b"]), TypeError, r"probs must be a list of prob.*as in Categorical\(\{'a': 0.5, 'b'"),
    (lambda: smc_steer(program(), 2, seed=0).expect(str), TypeError, r"f returned .* for texts there is by_text\(\)"),
    (lambda: smc_steer(program(), 2, seed=0).expect(lambda p: {}), TypeError, r"averages numbers, .*f returned \{\}"),
]
LETTERS = letters("0123456789")


@pytest.mark.parametrize("mistake, error, said", MISTAKES)
def test_an_error_shows_the_mistake_and_a_remedy(mistake, error, said):
    with pytest.raises(error, match=said):
        mistake()


def test_annotations_and_names_in_a_schema_are_no_misspellings():
    properties = {name: {"type": "null"} for name in ("propertyes", "requird", "typ")}
    notes = {"title": "t", "descripton": "d", "x-order": 1, "enumNames": ["a"], "examples": [{"typ": 1}]}
    JsonSchema({"type": "object", "properties": properties, **notes})
    JsonSchema({"const": {"requird": 1}})
    JsonSchema({})
    (said,) = JsonSchema({"type": "null", "maxlength": 3}, lenient=True).warnings
    assert "'maxlength' is no keyword" in said


# ---- warnings


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda lm: ConstrainedText(lm, "Tim is", Regex("happy|sad")), "the last word of the prompt, as in 'ish'"),
        (lambda lm: Infilling(lm, "Tim is [BLANK] and sad"), r"leave the blank out, 'Tim is\[BLANK\]'"),
        (lambda lm: ConstrainedText(lm, "Tim is", Regex(" (happy|sad)")), None),
        (lambda lm: ConstrainedText(lm, "Tim is", Regex("(happy)?")), None),
        (lambda lm: ConstrainedText(lm, "Tim is ", Regex("happy")), None),
        (lambda lm: Infilling(lm, "Tim is[BLANK] and sad "), None),
    ],
)
def test_only_a_text_that_would_join_the_previous_word_warns(make, said):
    lm = letters("Tim is happy and sad")
    if said is not None:
        with pytest.warns(UserWarning, match=said) as caught:
            make(lm)
        assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if said is None else "ignore")
        make(lm)


# ---- what the dead died of


def reasons(model: Model, N: int = 50) -> dict[str, int]:
    posterior = importance_sampling(model, N, seed=0)
    return {death.reason: death.count for death in posterior.deaths}


def never(id: int) -> CachedTransformer:
    """A model that gives one token no probability."""
    return table_lm(lambda ids: [-math.inf if each == id else 0.0 for each in range(V)], TOKENS[: V - 1])


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_a_schema_without_room_to_end_is_refused():
    lm = letters('{"n":1}')
    with pytest.raises(ValueError, match="no text ends within max_tokens=4, the shortest takes 7 tokens: give room"):
        importance_sampling(ConstrainedText(lm, '"', JsonSchema(SCHEMA), max_tokens=4), 8, seed=0)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: ConstrainedText(never(B), "a", Regex("b")), "no token allowed by Regex('b') has positive proba"),
        (
            lambda: ConstrainedText(never(B), "a", Regex("b|abc"), max_tokens=1),
            "no token allowed by Regex('b|abc') and an end within max_tokens=1 has positive",
        ),
        (lambda: ConstrainedText(LM, "a", Regex("b"), min_tokens=3), "allowed by Regex('b') and min_tokens=3 has"),
        (lambda: ConstrainedText(LM, "a", ["b", "cc"], min_tokens=3), "allowed by the list ['b', 'cc'] and min_tok"),
        (lambda: ConstrainedText(LM, "a", ["b" * 20, "c" * 20], min_tokens=21), "the list of 2 strings and min_t"),
        (lambda: ConstrainedText(never(END), "a", complete=True, max_tokens=2), "the text cannot end within max_tok"),
        (lambda: ConstrainedText(LM, "a", only_c, max_tokens=9), "only_c is false of the text"),
        (
            lambda: ConstrainedText(LM, "a", Regex("ab|abc"), mask=short_words(LM.vocab, 1)),
            "no token allowed by Regex('ab|abc') and the mask has positive probability",
        ),
        (
            lambda: ConstrainedText(LM, "a", Regex("b+"), rule=Rule(top_k=1)),
            " under Rule(top_k=1), applied before the mask: a temperature or a weaker rule keeps more tokens",
        ),
        (lambda: Infilling(LM, "a[BLANK]b", max_tokens=1), "the holes have more tokens than max_tokens=1"),
        (lambda: Infilling(LM, "a[BLANK]b", min_tokens=4), "the holes have fewer tokens than min_tokens=4"),
        (lambda: Infilling(never(B), "a[BLANK]b"), "the fragment after a hole has probability 0"),
        (lambda: PromptIntersection([never(B), only_b()], ["a", "c"]), "no token has positive probability after all p"),
        (lambda: PromptIntersection([never(B), only_b()], ["a", "c"], proposal="first"), "was drawn after the first"),
    ],
)
def test_a_ready_made_program_reports_a_death_by_its_constraint(make, said):
    found = reasons(make())
    assert any(said in reason for reason in found) and len(found) <= 2
    assert not any("NextToken" in reason or ".py" in reason for reason in found)


def only_c(text):
    return set(text) <= {"c"}


def only_b():
    return table_lm(lambda ids: [0.0 if each == B else -math.inf for each in range(V)], TOKENS[: V - 1])


class Masked(Model):
    """Writes any token, then one that a mask allows."""

    def __init__(self, mask):
        super().__init__()
        self.context, self.mask = LM.context("a"), np.array(mask)
        self.mask.setflags(write=False)

    def step(self):
        for mask in (LM.vocab.not_eos, self.mask):
            token = self.sample(self.transformer(self.context).masked(mask))
            self.s, self.context = self.s + token, self.context + token
        self.finish()


def test_equal_deaths_in_different_contexts_are_one_death():
    deaths = enumerate_exact(Masked([False] * V)).deaths
    (death,) = deaths
    assert death.count == V - 1 and death.text in {token.decode() for token in TOKENS}
    assert death.reason.startswith("sample: NextToken.masked(no value) has no value of positive probability (test_mist")
    assert not enumerate_exact(Masked([True] * V)).deaths


def test_a_statement_of_a_subclass_is_reported_with_its_line():
    class Own(ConstrainedText):
        def step(self):
            super().step()
            self.condition(False)

    (reason,) = reasons(Own(LM, "a", Regex("a+b")))
    assert reason.startswith("condition is false (test_mistakes.py, line ")
