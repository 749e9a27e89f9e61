"""Cost of constraints: masks of regular expressions and grammars, compared with other libraries.

The subjects are fifteen regular expressions and four grammars (`grammars/`), over the vocabularies of real tokenizers.
All libraries read the same tokens in the same process and take turns. Figures are medians of CPU time in one thread,
and `x` is the time of the other library over ours. The tests check that masks are right; here they are only timed.

    python benchmarks/constraints.py --quick                        # four patterns, one vocabulary, a minute
    python benchmarks/constraints.py --vocab FOLDER ...             # folders of tokenizers, or folders of these
    python benchmarks/constraints.py --tokenizer gpt2               # a name that transformers knows
    python benchmarks/constraints.py --only memory start

outlines-core, llguidance, xgrammar and lm-format-enforcer run if they are installed:
`pip install 'llmppl-smc[bench]'`.
llguidance is set to give full masks, like all the others. If a library refuses a token of a text, the tokens before it
are timed (marked -). A library that takes more than `--limit` seconds is stopped if possible (marked >).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import logging
import os
import pickle
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import numpy as np
from tables import machine, save, table

from llmppl import Grammar, JsonSchema, Regex, TokenIndex, Vocabulary
from llmppl.constraints import encode_fragment
from llmppl.constraints.automata import characters, dfa, nfa, regex

try:
    import psutil
except ImportError:
    psutil = None
try:
    import outlines_core
except ImportError:
    outlines_core = None
try:
    import llguidance
except ImportError:
    llguidance = None
try:
    import xgrammar
except ImportError:
    xgrammar = None
try:
    import lmformatenforcer
except ImportError:
    lmformatenforcer = None

HERE = Path(__file__).resolve().parent
VOCABULARIES = HERE.parents[1] / "shared" / "vocab"     # next to the checkout, if present
MS, US = 1e3, 1e6


def words(number: int = 500, seed: int = 7) -> list[str]:
    """Return made-up words, the same in every call."""
    rng, found = random.Random(seed), set[str]()
    while len(found) < number:
        syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 5))]
        found.add("".join(syllables) + rng.choice(["", "n", "s", "r"]))
    return sorted(found)


CHAR = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'      # a character of a JSON string
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS = {
    "float": r"([0-9]*)?\.?[0-9]*",
    "identifier": r"[^\W\d]\w*",
    "yes_no": r"(yes|no|maybe|never)",
    "year": r"\s*19[0-9]{2}",
    "ipv4": r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
    "iso_datetime": f"{DATE}T{TIME}",
    "email": r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,10}",
    "url": r"(https?|ftp)://[a-zA-Z0-9.-]+(:[0-9]{1,5})?(/[^\s?#]*)?(\?[^\s#]*)?(#[^\s]*)?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "phone": r"(\+[0-9]{1,3} )?(\([0-9]{3}\) |[0-9]{3}-)[0-9]{3}-[0-9]{4}",
    "abb": r"(a|b)*abb",
    "az100": r"[a-z]{1,100}",
    "dot200": r".{0,200}",
    "json6": r'\{[ ]?"name"[ ]?:[ ]?"' + CHAR + r'{0,40}"[ ]?,[ ]?"age"[ ]?:[ ]?(-)?(0|[1-9][0-9]*)'
    r'[ ]?,[ ]?"email"[ ]?:[ ]?"' + CHAR + r'*"[ ]?,[ ]?"active"[ ]?:[ ]?(true|false)'
    r'[ ]?,[ ]?"score"[ ]?:[ ]?((-)?(0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-][0-9]+)?'
    r'[ ]?,[ ]?"tags"[ ]?:[ ]?\[[ ]?(("' + CHAR + r'*")(,[ ]?("' + CHAR + r'*")){0,3})?[ ]?\][ ]?\}',
    "words500": "(" + "|".join(words()) + ")",
}
QUICK = ("float", "year", "az100", "json6")
OBJECTS = [                                         # texts for json6; the other patterns read tokens drawn at random
    '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "active": true, "score": 9.75, "tags": []}',
    '{"name": "Zoë \\"Z\\" Müller","age":7,"email":"z@example.org","active":false,"score":-1.5e+3,"tags":["é","b c"]}',
    '{"name": "", "age": 120, "email": "", "active": true, "score": 0, "tags": ["one", "two", "three", "日本語 🙂"]}',
]
TEXTS = {
    "json": [
        '{\n  "id": 17, "name": "Zoë Müller", "tags": ["a", "b c", "日本語 🙂"],\n  "nested": {"pi": 3.14159, "e": '
        '-2.7e-3, "ok": true, "none": null, "list": [1, [2, [3, []]], {}]},\n  "text": "line\\nbreak and \\"quotes\\" '
        'and \\u00e9 plus a longer sentence to have some ordinary words in it."\n}',
        '[{"user":"ada","scores":[10,20,30],"meta":{"created":"2024-01-05T10:11:12Z","flags":[true,false,null]}},'
        '{"user":"bob","scores":[],"meta":{}}]',
    ],
    "arith": [
        "(alpha + 3.5) * beta_2 / (gamma - max(delta, 7, x1 % 3)) - -foo(bar(1, 2), 3) + 1000000 * (((zeta)))",
        "1 + 2 * 3 - 4 / (5 + 6) % 7 + f() + g(x) + h(x, y, z) * 0.001",
    ],
    "sql": [
        "SELECT c.name, COUNT(*) AS n, SUM(o.total) AS revenue FROM customers AS c LEFT JOIN orders AS o ON "
        "o.customer_id = c.id WHERE c.country IN ('FR', 'DE', 'US') AND o.created_at BETWEEN '2023-01-01' AND "
        "'2023-12-31' AND NOT o.status = 'cancelled' GROUP BY c.name HAVING COUNT(*) > 5 ORDER BY revenue DESC, c.name "
        "LIMIT 20;",
        "SELECT DISTINCT a, b + 1 AS b1 FROM (SELECT * FROM t WHERE x IS NOT NULL) AS sub INNER JOIN u AS v ON sub.id "
        "= v.id WHERE a LIKE 'it''s%' OR b IN (SELECT id FROM w);",
    ],
    "python": [
        "import os.path as osp\nfrom collections import defaultdict, Counter\nx = y = 2.5e-3\nresult = [f(i) ** 2 for "
        "i in range(10) if i % 2 == 0]\nd = {'a': 1, \"b\": [1, 2, 3][::-1]}\n",
        "def add(a: int, b=2, *args, **kwargs) -> int: return a + b * len(args)\nfor item in sorted(data.items(), "
        "key=len, reverse=True): print(f'{item}', item[0].upper(), sep='\\t')\nif x not in y and not (z is "
        "None or w >= 3): total += x if x > 0 else -x\nassert isinstance(result, list), 'expected a list'; del d['a']",
    ],
}


@dataclass
class Subject:
    """Vocabulary with its tokenizer."""

    name: str
    tokenizer: Any
    vocab: Vocabulary

    def encode(self, text: str) -> list[int]:
        return encode_fragment(self.tokenizer, self.vocab, text)


# ---- the libraries: `regex(pattern)`, `grammar(name)` and `schema(schema)` compile, and return a reader


class Reader:
    """One text, read token by token; `mask()` and `read(token)` are timed."""

    def begin(self) -> None:
        raise NotImplementedError

    def mask(self) -> Any:
        raise NotImplementedError

    def read(self, token: int) -> Any:
        """Advance by a token; return False if it is refused."""
        raise NotImplementedError


class Ours(Reader):
    def __init__(self, recognizer: Any, subject: Subject) -> None:
        self.index = recognizer.index(subject.vocab)
        self.begin()

    def begin(self) -> None:
        self.state = self.index.start

    def mask(self) -> Any:
        return self.index.mask(self.state)

    def read(self, token: int) -> None:
        self.state = self.index.advance(self.state, token)


class Llmppl:
    name, package = "llmppl", "llmppl"

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.trie = Regex("a").index(subject.vocab).trie      # one trie for all indices over a vocabulary

    def regex(self, pattern: str) -> Reader:
        return Ours(Regex(pattern), self.subject)

    def grammar(self, name: str) -> Reader:
        return Ours(Grammar(lark(name)), self.subject)

    def schema(self, schema: Any) -> Reader:
        return Ours(JsonSchema(schema), self.subject)


class OutlinesCore:
    name, package, module = "outlines-core", "outlines-core", outlines_core

    def __init__(self, subject: Subject) -> None:
        ids: dict[bytes, list[int]] = {}
        for id, token in enumerate(subject.vocab.tokens):
            if token:
                ids.setdefault(token, []).append(id)
        self.vocab = outlines_core.Vocabulary(subject.vocab.eos_ids[0], ids)
        self.bits = np.zeros((len(subject.vocab) + 31) // 32, np.int32)

    def regex(self, pattern: str) -> Reader:
        guide, bits = outlines_core.Guide(outlines_core.Index(pattern, self.vocab)), self.bits

        class Guided(Reader):
            def begin(self) -> None:
                guide.reset()

            def mask(self) -> None:
                guide.write_mask_into(bits.ctypes.data, bits.size, 4)

            def read(self, token: int) -> bool:
                try:
                    guide.advance(token, False)
                except ValueError:
                    return False
                return True

        return Guided()

    def schema(self, schema: Any) -> Reader:
        return self.regex(outlines_core.json_schema.build_regex_from_schema(json.dumps(schema)))


class LLGuidance:
    name, package, module = "llguidance", "llguidance", llguidance

    def __init__(self, subject: Subject) -> None:
        vocab = subject.vocab
        special = sorted({*vocab.eos_ids, *vocab.special_ids})
        tokens = [b"\xff<%d>" % id if id in special else token for id, token in enumerate(vocab.tokens)]
        facts = SimpleNamespace(
            eos_token_id=vocab.eos_ids[0], bos_token_id=None, tokens=tokens, special_token_ids=special
        )
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(facts))
        self.bits = np.zeros((len(vocab) + 31) // 32, np.int32)

    def regex(self, pattern: str) -> Reader:
        return self._reader("start: /" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", pattern) + "/")

    def grammar(self, name: str) -> Reader:
        return self._reader(lark(name))

    def schema(self, schema: Any) -> Reader:
        return self._reader("start: %json " + json.dumps(schema))

    def _reader(self, text: str) -> Reader:
        matcher = llguidance.LLMatcher(self.tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        bits = self.bits

        class Matched(Reader):
            def begin(self) -> None:
                matcher.reset()

            def mask(self) -> None:
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

            def read(self, token: int) -> bool:
                return bool(matcher.consume_token(token))

        return Matched()


class XGrammar:
    name, package, module = "xgrammar", "xgrammar", xgrammar

    def __init__(self, subject: Subject) -> None:
        vocab = subject.vocab
        tokens = list(vocab.tokens)                 # special tokens have no bytes in `vocab.tokens`
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[int(i) for i in vocab.eos_ids])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = xgrammar.allocate_token_bitmask(1, len(vocab))

    def regex(self, pattern: str) -> Reader:
        return self._reader(self.compiler.compile_regex(pattern))

    def grammar(self, name: str) -> Reader:
        """Use xgrammar's own JSON grammar, which is much faster there than ours."""
        compiler = self.compiler
        return self._reader(
            compiler.compile_builtin_json_grammar() if name == "json" else compiler.compile_lark(lark(name))
        )

    def schema(self, schema: Any) -> Reader:
        return self._reader(self.compiler.compile_json_schema(json.dumps(schema), strict_mode=False))

    def _reader(self, compiled: Any) -> Reader:
        matcher, bits = xgrammar.GrammarMatcher(compiled), self.bits

        class Matched(Reader):
            def begin(self) -> None:
                matcher.reset()

            def mask(self) -> None:
                matcher.fill_next_token_bitmask(bits)

            def read(self, token: int) -> bool:
                return bool(matcher.accept_token(token))

        return Matched()


class LMFormatEnforcer:
    name, package, module = "lm-format-enforcer", "lm-format-enforcer", lmformatenforcer

    def __init__(self, subject: Subject) -> None:
        vocab = subject.vocab
        tokens = vocab.tokens
        shown = [(id, token.decode("utf-8", "replace")) for id, token in enumerate(tokens) if token]

        def decode(ids: Sequence[int]) -> str:
            return b"".join([tokens[id] for id in ids]).decode("utf-8", "replace")

        self.data = lmformatenforcer.TokenEnforcerTokenizerData(
            [(id, text, "\ufffd" not in text) for id, text in shown], decode, vocab.eos_ids[0], False, len(vocab)
        )

    def regex(self, pattern: str) -> Reader:
        enforcer = lmformatenforcer.TokenEnforcer(self.data, lmformatenforcer.RegexParser(pattern))

        class Enforced(Reader):
            def begin(self) -> None:
                self.ids: list[int] = []

            def mask(self) -> None:
                self.allowed = enforcer.get_allowed_tokens(self.ids)

            def read(self, token: int) -> None:
                self.ids.append(token)

        reader = Enforced()
        reader.begin()
        return reader


OTHERS: list[Any] = [OutlinesCore, LLGuidance, XGrammar, LMFormatEnforcer]


@functools.cache
def lark(name: str) -> str:
    return (HERE / "grammars" / f"{name}.lark").read_text()


# ---- measuring


clock = time.process_time_ns
TICK = 0                                            # cost of reading the clock


def set_clock() -> None:
    global TICK
    TICK = int(statistics.median([-clock() + clock() for _ in range(2001)]))


class TooLong(BaseException):                       # not an Exception, so that no library catches it
    pass


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong after `seconds`; native code stops only when it returns to Python."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)        # (a timer of CPU time would make the clock coarse)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Time:
    """Seconds: the median, a high quantile, and a mark for a failure."""

    median: float = float("nan")
    high: float = float("nan")
    mark: str = ""

    def show(self, unit: float, high: bool = False) -> str:
        if self.median != self.median:
            return self.mark
        worst = f"/{digits(self.high * unit)}" if high else ""
        return f"{'>' if self.mark == '>' else ''}{digits(self.median * unit)}{worst}{'-' if self.mark == '-' else ''}"


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def times(values: Sequence[float], mark: str = "", high: float = 1.0) -> Time:
    """Summarise the values; `high` is the quantile shown next to the median."""
    if not values:
        return Time(mark=mark)
    return Time(statistics.median(values), sorted(values)[min(int(high * len(values)), len(values) - 1)], mark)


def in_turns(calls: dict[str, Callable[[], object]], repeats: int, limit: float) -> dict[str, Time]:
    """Time each call `repeats` times, in turns; calls over `limit` seconds get fewer turns, but at least one."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    marks = dict.fromkeys(calls, "")
    with no_collection():
        for name, call in list(calls.items()) * repeats:
            if marks[name] or sum(spent[name]) > limit:
                continue
            begin = clock()
            try:
                with limited(limit):
                    begin = clock()
                    call()
                    end = clock()
            except TooLong:
                marks[name], end = ">", clock()
            except Exception as error:
                marks[name] = f"({type(error).__name__})"
                continue
            spent[name].append((end - begin - TICK) / 1e9)
    return {name: times(spent[name], marks[name]) for name in calls}


def read(reader: Reader, texts: Sequence[Sequence[int]], limit: float) -> tuple[list[float], str]:
    """Return the seconds of mask and read for each token of some texts, and a mark."""
    spent: list[float] = []
    mark = ""
    try:
        with no_collection(), limited(limit):
            for text in texts:
                reader.begin()
                for token in text:
                    begin = clock()
                    reader.mask()
                    fits = reader.read(token)
                    spent.append((clock() - begin - TICK) / 1e9)
                    if fits is False:
                        mark = "-"
                        break
    except TooLong:
        mark = ">"
    except Exception:
        mark = "-"
    return spent, mark


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and not during the measurement: a collection reads all memory and empties the CPU caches."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def array_bytes(whole: Any) -> int:
    """Return the memory of a whole index; equal masks count once."""
    masks: int = sum(len(found.key) for found in {*whole.masks})
    return masks + int(whole.next.nbytes + whole.begin.nbytes)


def forget() -> None:
    """Drop the cached character classes of other patterns, and their automata."""
    re.purge()
    for module in (nfa, dfa, regex, characters):
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


def walk(subject: Subject, pattern: str, number: int = 100, longest: int = 25) -> list[list[int]]:
    """Draw texts of `number` tokens in total, each token uniform over those that may follow; no end of text."""
    index, rng = Regex(pattern).index(subject.vocab), np.random.default_rng(0)
    texts: list[list[int]] = []
    left = number
    while left > 0:
        text: list[int] = []
        state = index.start
        while len(text) < min(longest, left):
            ids = index.allowed(state)
            ids = ids[~np.isin(ids, subject.vocab.eos_ids)]
            if not ids.size:
                break
            text.append(int(rng.choice(ids)))
            state = index.advance(state, text[-1])
        texts.append(text)
        left -= len(text)
    return texts


def resident() -> int:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


# ---- printing


def summary(title: str, ratios: dict[str, list[float]]) -> None:
    """Print the times of other libraries over ours; "faster" counts the items where llmppl is no slower."""
    rows = []
    for name, rates in ratios.items():
        found = [rate for rate in rates if rate == rate]
        if found:
            faster = sum(ratio >= 1 for ratio in found)
            figures = [digits(each) for each in (statistics.median(found), min(found), max(found))]
            rows.append([name, *figures, f"{faster} of {len(found)}"])
    table(f"{title}: time over ours", ["library", "median", "lowest", "highest", "faster"], rows)


def compared(found: dict[str, Time], others: Sequence[str], ratios: dict[str, list[float]]) -> list[str]:
    """Return the time of each other library over ours, as text, and add the ratios to `ratios`."""
    cells = []
    for name in others:
        rate = found[name].median / found["llmppl"].median
        ratios.setdefault(name, []).append(rate)
        cells.append("" if rate != rate else digits(rate))
    return cells


def first_masks(subject: Subject, engines: dict[str, Any], patterns: dict[str, str], options: Any) -> None:
    others = [name for name in engines if name != "llmppl"]
    rows = [["pattern", "llmppl", "new classes", *others, *[f"x {name}" for name in others]]]
    ratios: dict[str, list[float]] = {}

    def call(name: str, pattern: str) -> None:
        engines[name].regex(pattern).mask()

    for label, pattern in patterns.items():
        calls: dict[str, Callable[[], object]] = {}
        calls["forget"] = forget
        calls["new classes"] = functools.partial(call, "llmppl", pattern)
        calls["llmppl"] = functools.partial(call, "llmppl", pattern)
        calls |= {name: functools.partial(call, name, pattern) for name in others}
        found = in_turns(calls, options.repeats, options.limit)
        shown = [found[name].show(MS) for name in ("llmppl", "new classes", *others)]
        rows.append([label, *shown, *compared(found, others, ratios)])
    table(f"{subject.name}: compile + first mask, ms (for outlines-core the whole index)", rows[0], rows[1:])
    summary(f"{subject.name}: compile + first mask", ratios)


def tokens(subject: Subject, engines: dict[str, Any], patterns: dict[str, str], options: Any) -> None:
    others = [name for name in engines if name != "llmppl"]
    names = [*engines, *[f"x {name}" for name in others]]
    rows = [["pattern", *names]]
    first_rows = [["pattern", *names]]
    ratios: dict[str, list[float]] = {}
    first_ratios: dict[str, list[float]] = {}
    for label, pattern in patterns.items():
        texts = [subject.encode(text) for text in OBJECTS] if label == "json6" else walk(subject, pattern)
        shown: dict[str, Time] = {}
        first: dict[str, Time] = {}
        for name, engine in engines.items():
            try:
                with limited(options.limit):
                    reader = engine.regex(pattern)
            except TooLong:
                shown[name] = first[name] = Time(mark=">")
                continue
            except Exception as error:
                shown[name] = first[name] = Time(mark=f"({type(error).__name__})")
                continue
            spent, mark = read(reader, texts, options.limit)
            first[name] = Time(statistics.mean(spent), max(spent), mark) if spent else Time(mark=mark)
            again: list[float] = []
            for _ in range(options.repeats if not mark else 1):
                again += read(reader, texts, options.limit)[0]
            shown[name] = times(again, mark, 0.99)
        for found, table_rows, rates in ((shown, rows, ratios), (first, first_rows, first_ratios)):
            cells = [found[name].show(US, high=True) for name in engines]
            table_rows.append([label, *cells, *compared(found, others, rates)])
    title = f"{subject.name}: mask + advance of a token"
    table(f"{title}, us, median/p99, states visited before", rows[0], rows[1:])
    summary(f"{title}, states visited before", ratios)
    table(f"{title}, us, mean/max, first pass of a new reader", first_rows[0], first_rows[1:])
    summary(f"{title}, first pass of a new reader", first_ratios)


def states(subject: Subject, patterns: dict[str, str], options: Any) -> None:
    """Print the table of the documentation: 40 states at their first visit, in the order of runs, and `build_all`."""
    makers: dict[str, Callable[[], Any]] = {"[a-z ]+": lambda: Regex("[a-z ]+"), "(?s).*": lambda: Regex("(?s).*")}
    makers |= {label: functools.partial(Regex, pattern) for label, pattern in patterns.items()}
    makers[r"\w+( \w+){0,30}"] = lambda: Regex(r"\w+( \w+){0,30}")
    makers |= {f"{name}.lark": lambda name=name: Grammar(lark(name)) for name in ("json", "python")}
    rows = []
    for label, make in makers.items():
        passes = []
        for _ in range(options.repeats):
            spent = new_masks(make().index(subject.vocab), 40)
            index = make().index(subject.vocab)
            with no_collection():
                begin = clock()
                if not label.endswith(".lark"):
                    index.build_all()
                passes.append((spent[0], sum(spent), max(spent), (clock() - begin) / 1e9))
        shown = [digits(statistics.median(each) * MS) for each in zip(*passes, strict=True)]
        rows.append([label, str(len(spent)), *shown])
    header = ["constraint", "masks", "first", "all of them", "slowest", "build_all"]
    table(f"{subject.name}: masks of new states, ms", header, rows)


def new_masks(index: TokenIndex, number: int) -> list[float]:
    """Return the seconds of the masks of the first states, found by following some tokens of each."""
    rng, met, spent = np.random.default_rng(0), [index.start], []
    for state in met:                               # the list grows
        with no_collection():
            begin = clock()
            mask = index.mask(state)
            spent.append((clock() - begin - TICK) / 1e9)
        if len(spent) == number:
            break
        for token in rng.permutation(np.flatnonzero(mask))[:60].tolist():
            after = index.advance(state, token)
            if after is not index.end and after not in met:
                met.append(after)
    return spent


def whole(subject: Subject, engines: dict[str, Any], patterns: dict[str, str], options: Any) -> None:
    rows: list[list[str]] = []
    others = [name for name in engines if name == "outlines-core"]
    ratios: dict[str, list[float]] = {}
    rows.append(["pattern", "states", "llmppl", "new classes", *others, *["x"] * len(others), "arrays, MB"])

    def build(pattern: str) -> Any:
        return Regex(pattern).index(subject.vocab).build_all()

    for label, pattern in patterns.items():
        calls: dict[str, Callable[[], object]] = {
            "forget": forget,
            "new classes": functools.partial(build, pattern),
            "llmppl": functools.partial(build, pattern),
        }
        for name in others:
            calls[name] = functools.partial(outlines_core.Index, pattern, engines[name].vocab)
        found = in_turns(calls, options.repeats, options.limit)
        made = build(pattern)
        shown = [found[name].show(MS) for name in ("llmppl", "new classes", *others)]
        size = f"{array_bytes(made) / 1e6:.2f}"
        rows.append([label, str(len(made)), *shown, *compared(found, others, ratios), size])
    table(f"{subject.name}: regex to whole index, ms", rows[0], rows[1:])
    summary(f"{subject.name}: regex to whole index", ratios)


def memory(subject: Subject, engines: dict[str, Any], patterns: dict[str, str], options: Any) -> None:
    if psutil is None:
        print("\nmemory: psutil is not installed (pip install 'llmppl-smc[bench]')")
        return
    kept: list[Any] = []
    Regex("a").index(subject.vocab).build_all()       # allocates the parts that all share
    rows = [["pattern", "llmppl, arrays", "llmppl", *[name for name in engines if name == "outlines-core"]]]
    for label in [label for label in ("dot200", "json6", "words500") if label in patterns]:
        before = resident()
        kept.append(Regex(patterns[label]).index(subject.vocab))
        kept.append(kept[-1].build_all())
        row = [label, f"{array_bytes(kept[-1]) / 1e6:.1f}", f"{(resident() - before) / 1e6:.1f}"]
        if "outlines-core" in engines:
            before = resident()
            kept.append(outlines_core.Index(patterns[label], engines["outlines-core"].vocab))
            row.append(f"{(resident() - before) / 1e6:.1f}")
        rows.append(row)
    table(f"{subject.name}: memory of the whole index, MB (its arrays; growth of resident memory)", rows[0], rows[1:])


def grammars(subject: Subject, engines: dict[str, Any], options: Any) -> None:
    """Time each token by the median over the passes; every first pass uses a newly compiled grammar."""
    rows = [["grammar", "library", "compile ms", "first pass us", "sum ms", "second pass us", "sum ms", "x first",
             "x sum", "x second", "x sum"]]
    for label in list(TEXTS)[: 2 if options.quick else None]:
        texts = [subject.encode(text) for text in TEXTS[label]]
        passes: dict[str, tuple[list[float], list[list[float]], list[list[float]]]] = {}
        marks: dict[str, str] = {}
        turns = [name for name, engine in engines.items() if hasattr(engine, "grammar")] * options.repeats
        for name in turns:
            compiling, first, second = passes.setdefault(name, ([], [], []))
            if marks.get(name) or sum(map(sum, first)) > options.limit:
                continue
            try:
                with no_collection(), limited(options.limit):
                    begin = clock()
                    reader = engines[name].grammar(label)
                    compiling.append((clock() - begin) / 1e9)
            except TooLong:
                marks[name] = ">"
                continue
            except Exception as error:
                marks[name] = f"({type(error).__name__})"
                continue
            spent, marks[name] = read(reader, texts, options.limit)
            first.append(spent)
            if not marks[name]:
                second.append(read(reader, texts, options.limit)[0])
        figures: dict[str, list[float]] = {}
        for name, (compiling, first, second) in passes.items():
            cells, figures[name] = [], []
            for some in (first, second):
                each = [statistics.median(token) for token in zip(*some, strict=False)]
                shown = times(each, marks[name] if some is first or not some else "", 0.99)
                cells += [shown.show(US, high=True), digits(sum(each) * MS) if each else ""]
                figures[name] += [shown.median, sum(each) if each and not marks[name] else float("nan")]
            rates = [other / ours for other, ours in zip(figures[name], figures["llmppl"], strict=True)]
            shown_rates = ["" if rate != rate else digits(rate) for rate in rates]
            compiled = digits(statistics.median(compiling) * MS) if compiling else marks[name]
            rows.append([label, name, compiled, *cells, *shown_rates])
    table(f"{subject.name}: grammars, mask + advance of a token, median/p99 over the texts, and sum", rows[0], rows[1:])


START = """
import pickle, sys, time
from types import SimpleNamespace
with open(sys.argv[1], "rb") as file:
    tokens, eos_ids, special_ids = pickle.load(file)
class Vocabulary:
    pass
vocab = Vocabulary()
vocab.tokens, vocab.eos_ids, vocab.special_ids = tokens, eos_ids, special_ids
wall, cpu = time.perf_counter(), time.process_time()
from llmppl import Regex
index = Regex(sys.argv[2]).index(vocab)
index.mask(index.start)
print(time.perf_counter() - wall, time.process_time() - cpu, "transformers" in sys.modules)
"""


def start(subject: Subject, patterns: dict[str, str], options: Any) -> None:
    """Time new processes from `from llmppl import ...` to the first mask."""
    rows = [["pattern", "wall s", "cpu s", "imported"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.pickle"
        vocab = subject.vocab
        path.write_bytes(pickle.dumps((list(vocab.tokens), tuple(vocab.eos_ids), tuple(vocab.special_ids))))
        for label, pattern in patterns.items():
            found = []
            for _ in range(options.repeats):
                command = [sys.executable, "-c", START, str(path), pattern]
                found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
            wall, cpu = (statistics.median(float(each[i]) for each in found) for i in (0, 1))
            loaded = "transformers" if found[0][2] == "True" else "no transformers"
            rows.append([label, f"{wall:.3f}", f"{cpu:.3f}", loaded])
    table(f"{subject.name}: a new process, from the import to the first mask, tokens already loaded", rows[0], rows[1:])


# ---- the command


def header() -> str:
    """Return the machine and the compared engines, and the way to install missing ones."""
    missing = [engine.name for engine in OTHERS if engine.module is None]
    more = f"\nnot installed (pip install 'llmppl-smc[bench]'): {', '.join(missing)}" if missing else ""
    present = [engine.package for engine in OTHERS if engine.module is not None]
    return machine("llmppl", "numpy", "lark", *present) + more


def subjects(options: Any) -> Iterator[Subject]:
    from transformers import AutoTokenizer

    places = [(name, name) for name in options.tokenizer]
    for folder in [Path(folder) for folder in options.vocab]:
        if not folder.is_dir():
            raise SystemExit(f"--vocab {folder}: no such folder; give one that holds a tokenizer, or folders that do")
        inside = [folder] if (folder / "tokenizer_config.json").exists() else sorted(folder.iterdir())
        places += [(each.name, str(each)) for each in inside if (each / "tokenizer_config.json").exists()]
    if not places:
        names = ("gpt2", "cl100k_base", "o200k_base")
        places = [(name, str(VOCABULARIES / name)) for name in names if (VOCABULARIES / name).is_dir()]
    if options.quick:
        places = places[:1]
    for name, place in places:
        tokenizer = AutoTokenizer.from_pretrained(place)
        yield Subject(name, tokenizer, Vocabulary.from_tokenizer(tokenizer))
    if not places:
        from llmppl import CachedTransformer

        lm = CachedTransformer.from_pretrained(engine="transformers")
        yield Subject("embedded", lm.tokenizer, lm.vocab)


PARTS = ("first", "tokens", "states", "whole", "memory", "grammars", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", nargs="+", default=[], metavar="FOLDER", help="of tokenizers, or folders of these")
    parser.add_argument("--tokenizer", nargs="+", default=[], metavar="NAME", help="a name that transformers knows")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="NAME")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement, in turns")
    parser.add_argument("--limit", type=float, default=10, help="CPU seconds for a measurement of one library")
    parser.add_argument("--without", nargs="+", default=[], metavar="LIBRARY", help="leave it out")
    parser.add_argument("--quick", action="store_true", help="four patterns, two grammars, one vocabulary")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    options = parser.parse_args()
    if options.quick:
        options.patterns, options.repeats, options.limit = list(QUICK), 3, 2
        options.without = [*options.without, "lm-format-enforcer"]
    patterns = {label: PATTERNS[label] for label in options.patterns}
    logging.disable(logging.CRITICAL)               # some libraries log errors from which they recover
    warnings.filterwarnings("ignore")
    print(header())
    present = [Llmppl] + [each for each in OTHERS if each.module is not None and each.name not in options.without]
    set_clock()
    for subject in subjects(options):
        engines, setup = {}, []
        for engine in present:
            begin = clock()
            engines[engine.name] = engine(subject)
            setup.append(f"{engine.name} {(clock() - begin) / 1e9:.2f}")
        print(f"\n== {subject.name}, {len(subject.vocab):,} tokens; once for the vocabulary, s: {', '.join(setup)}")
        engines["llmppl"].regex("[a-z]*").mask()
        if "first" in options.only:
            first_masks(subject, engines, patterns, options)
        if "tokens" in options.only:
            tokens(subject, engines, patterns, options)
        if "states" in options.only:
            states(subject, patterns, options)
        if "whole" in options.only:
            whole(subject, engines, patterns, options)
        if "memory" in options.only:
            memory(subject, engines, patterns, options)
        if "grammars" in options.only:
            grammars(subject, engines, options)
        if "start" in options.only:
            start(subject, patterns, options)
    save(options.out, "numpy", "lark", *(each.package for each in OTHERS))


if __name__ == "__main__":
    main()
