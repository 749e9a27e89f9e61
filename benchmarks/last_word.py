"""Last words of passages, in the four settings of ReLM: e3 of `queries.py`.

The settings of Kuchnik et al. 2023, Sec. 4.4, allow any word (*baseline*), a word of the passage (*words*), any word
followed by the end of text (*terminated*), and the same without stop words (*no_stop*). Ours add *words* with the other
two restrictions, words that end where the text may continue, and greedy decoding. `--rows` keeps the answers of each
passage as a line and skips passages that it already has, so a run of hours can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tables import table
from transformers import GenerationConfig

from llmppl import CachedTransformer
from llmppl.queries import Query, Rule

STOP_WORDS = set(
    "a about after again all am an and any are as at be because been before being but by can could did do does doing "
    "down during each few for from further had has have having he her here hers him his how i if in into is it its "
    "just me more most my no nor not now of off on once only or other our out over own said same she should so some "
    "such than that the their them then there these they this those through to too under until up very was we were "
    "what when where which while who why will with would you your".split()
)
AFTER = r'(\.|!|\?)?(")?'
PAPER = "baseline 41.6, words 56.6, terminated 65, no_stop 71 (GPT-2 XL); 27, 43, 46.4, 52.2 (small)"


def e3(options: argparse.Namespace) -> None:
    for name in options.lm or [None]:
        lm = CachedTransformer.from_pretrained(name, dtype=options.dtype)
        called = " ".join(filter(None, [Path(name).name if name else "embedded", options.dtype]))
        for which, texts in passages(options, lm).items():
            asked = texts[: 25 if options.quick else options.passages]
            answers = [answer for answer, _ in zip(answered(lm, called, asked, options), asked, strict=True)]
            report(f"{called}, {which}; at most {options.expansions:,} expansions", answers)
    print(f"paper, 500 of LAMBADA: {PAPER}")


def passages(options: argparse.Namespace, lm: CachedTransformer) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    if options.lambada:
        sets["LAMBADA"] = [json.loads(line)["text"] for line in options.lambada.read_text().splitlines()]
    if options.text:
        documents = [block.strip() for block in options.text.read_text().split("\n\n")]
        held_out = [block for block in documents if len(block) > 40][17::50]       # as in the embedded model's training
        sets[f"held-out {options.text.stem}"] = [cut for text in held_out if (cut := cloze(text))]
    if not sets:
        texts = (lm.tokenizer.decode(ids) for ids in free_samples(lm, 250, 160, 0.7, seed=1))
        sets["written at T=0.7"] = [cut for text in texts if (cut := cloze(text))]
    return sets


def cloze(text: str, least: int = 25, most: int = 80) -> str | None:
    """Return the beginning of a text up to a word that occurs earlier, or None; `least` and `most` bound its length."""
    words = text.split()[:most]
    for i in range(len(words) - 1, least, -1):
        if words[i].strip('.!?"').isalpha() and words[i].strip('.!?"') in [word.strip('.,!?"') for word in words[:i]]:
            return " ".join(words[: i + 1])
    return None


def free_samples(lm: CachedTransformer, N: int, length: int, temperature: float, seed: int) -> Iterator[list[int]]:
    """Draw texts of at most `length` tokens; yield their ids without the eos."""
    torch.manual_seed(seed)
    end = lm.tokenizer.eos_token_id
    begin = end if lm.tokenizer.bos_token_id is None else lm.tokenizer.bos_token_id
    how = {"do_sample": True, "top_k": 0, "temperature": temperature}
    config = GenerationConfig(max_new_tokens=length, pad_token_id=end, eos_token_id=end, **how)
    for done in range(0, N, 250):
        first = torch.full((min(250, N - done), 1), begin)
        with torch.inference_mode():
            ids = lm.model.generate(first, attention_mask=torch.ones_like(first), generation_config=config)
        for row in ids[:, 1:].tolist():
            yield row[: row.index(end)] if end in row else row


def answered(
    lm: CachedTransformer, called: str, texts: list[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield, for each passage, its target and each setting's word and expansions, from `--rows` or computed now."""
    known = {}
    if options.rows and options.rows.exists():
        lines = [json.loads(line) for line in options.rows.read_text().splitlines()]
        known = {(row["lm"], row["text"], row["most"]): row for row in lines}
    for text in texts:
        row = known.get((called, text, options.expansions))
        if row is None:
            context, last = text.rsplit(" ", 1)
            lm = CachedTransformer(lm.model, lm.tokenizer)          # a new cache for each passage
            row = {"lm": called, "most": options.expansions, "target": re.sub(r"[^a-zA-Z].*", "", last)}
            row |= {"answers": settings(lm, context, options.expansions), "text": text}
            if options.rows:
                with options.rows.open("a") as file:
                    print(json.dumps(row), file=file)
        yield row


def settings(lm: CachedTransformer, context: str, most: int) -> dict[str, tuple[str | None, int]]:
    """Return the word of each setting, None if the search gave up, and its number of expansions."""
    any_word, one_of = " [a-zA-Z]+", f" ({'|'.join(sorted(set(re.findall('[a-zA-Z]+', context))))})"
    stop = f" (?i:{'|'.join(sorted(STOP_WORDS))})"
    asked = {
        "baseline": (any_word + AFTER, "prefix", None),
        "words": (one_of + AFTER, "prefix", None),
        "terminated": (any_word + AFTER, "eos", None),
        "no_stop": (any_word + AFTER, "eos", stop + AFTER),
        "words, terminated": (one_of + AFTER, "eos", None),
        "words, no_stop": (one_of + AFTER, "eos", stop + AFTER),
        "words, to their end": (one_of, "boundary", None),
        "words, no_stop, to their end": (one_of, "boundary", stop),
    }
    found = {name: first(lm, context, more, end, ignore, most) for name, (more, end, ignore) in asked.items()}
    prompt = torch.tensor([[int(token) for token in lm.context(context).tokens]])
    end = lm.tokenizer.eos_token_id
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=end, eos_token_id=end)
    with torch.inference_mode():
        ids = lm.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0]
    written = re.match(r"\s*([a-zA-Z]+)", lm.tokenizer.decode(ids[prompt.shape[1] :]))
    return found | {"greedy decoding": (written and written[1], len(ids) - prompt.shape[1])}


def first(
    lm: CachedTransformer, prefix: str, more: str, end: str, ignore: str | None, most: int
) -> tuple[str | None, int]:
    """Return the word of the best token sequence within `most` expansions, with the paper's top_k of 1,000."""
    rule = Rule(top_k=min(1000, len(lm.vocab)))
    query = Query(lm, re.escape(prefix) + more, prefix=prefix, end=end, ignore=ignore, max_tokens=8, rule=rule)
    found = query.best(results="tokens", batch=64 if end == "eos" else 4, max_expansions=most)
    match = next(found, None)
    word = None if match is None else re.findall("[a-zA-Z]+", str(match)[len(match.prefix) :])[0]
    return word, found.expansions


def report(title: str, rows: list[dict[str, Any]]) -> None:
    targets = [row["target"] for row in rows]
    cells, common = [], []
    for setting in rows[0]["answers"]:
        words, expansions = zip(*(row["answers"][setting] for row in rows), strict=True)
        hits = [word == target for word, target in zip(words, targets, strict=True)]
        rare = [hit for hit, target in zip(hits, targets, strict=True) if target.lower() not in STOP_WORDS]
        share, given = statistics.mean(hits), [word for word in words if word is not None]
        error = math.sqrt(share * (1 - share) / len(hits))
        shares = statistics.mean(rare or [False]), 1 - len(given) / len(words), sum(hits) / max(1, len(given))
        cells.append([setting, f"{100 * share:.1f} +- {100 * error:.1f}", *(f"{100 * each:.1f}" for each in shares),
                      f"{statistics.mean(expansions):,.0f}"])
        most = Counter(given).most_common(6)
        common.append([setting, ", ".join(f"{word} {100 * n / len(given):.1f}" for word, n in most)])
    columns = ["", "right", "no stop-word targets", "no answer", "right of answers", "expansions"]
    table(f"e3: last word right of {len(rows)} passages, % +- standard error ({title})", columns, cells)
    table("e3: the most frequent answers, % of the answers given", ["", ""], common)
