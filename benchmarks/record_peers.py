"""Records a CPU second and their validity, beside `generate` of transformers with the masks of other libraries.

    python benchmarks/record_peers.py [--records 24] [--out FILE]           # SmolLM2, 45 minutes of one core

The records are those of record_cost.py, with the bounds of its numbers. Each library reads the same JSON schema and
runs the same model of transformers on one thread. Every row decodes greedily, except "best_of", which has
probabilities. A library compiles the schema before the clock starts. "Valid" counts the texts that the type accepts
within 120 tokens.
`pip install 'llmppl-smc[bench]' outlines` installs the other libraries; a missing one is named and skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record_cost import Order, prompts_of
from tables import save, table
from transformers import LogitsProcessor, LogitsProcessorList

from llmppl import CachedTransformer, JsonSchema, generate

MAX_TOKENS = 120
SCHEMA = Order.model_json_schema()
Write = Callable[[list[Any]], list[str]]


class Called(LogitsProcessor):
    """Processor of transformers that is a function."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.function(input_ids, scores)


def feed(take: Callable[[int], Any], ids: torch.Tensor) -> int:
    """Give tokens to a matcher, and return their number."""
    for token in ids.tolist():
        take(token)
    return len(ids)


def by_transformers(lm: CachedTransformer, processor: Callable[[int], LogitsProcessor]) -> Write:
    """Return a function that writes greedy texts, one prompt after the other, with a fresh processor for each."""

    def write(prompts: list[Any]) -> list[str]:
        texts = []
        for prompt in prompts:
            context = lm.context(prompt) if isinstance(prompt, str) else prompt
            ids = [*map(int, context.tokens)]
            processors = LogitsProcessorList([processor(len(ids))])
            with torch.inference_mode():
                found = lm.model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                    max_new_tokens=MAX_TOKENS,
                    do_sample=False,
                    logits_processor=processors,
                    pad_token_id=lm.tokenizer.eos_token_id,
                )
            texts.append(lm.tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
        return texts

    return write


def with_outlines(lm: CachedTransformer) -> Write:
    outlines = importlib.import_module("outlines")
    model = outlines.from_transformers(lm.model, lm.tokenizer)
    generator = outlines.Generator(model, outlines.types.JsonSchema(SCHEMA))

    def write(prompts: list[Any]) -> list[str]:
        texts = []
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else str(prompt.text)
            texts.append(generator(text, max_new_tokens=MAX_TOKENS, do_sample=False))
        return texts

    return write


def with_xgrammar(lm: CachedTransformer) -> Write:
    xgrammar = importlib.import_module("xgrammar")
    size = lm.model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(lm.tokenizer, vocab_size=size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))

    def processor(start: int) -> LogitsProcessor:
        matcher = xgrammar.GrammarMatcher(compiled)
        bits = xgrammar.allocate_token_bitmask(1, size)
        read = 0

        def mask(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal read
            read += feed(matcher.accept_token, input_ids[0, start + read :])
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bits)
                xgrammar.apply_token_bitmask_inplace(scores, bits)
            return scores

        return Called(mask)

    return by_transformers(lm, processor)


def with_llguidance(lm: CachedTransformer) -> Write:
    llguidance = importlib.import_module("llguidance")
    tokenizers = importlib.import_module("llguidance.hf")
    bitmasks = importlib.import_module("llguidance.torch")
    tokenizer = tokenizers.from_tokenizer(lm.tokenizer, n_vocab=lm.model.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))

    def processor(start: int) -> LogitsProcessor:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        bits = bitmasks.allocate_token_bitmask(1, tokenizer.vocab_size)
        read = 0

        def mask(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal read
            read += feed(matcher.consume_token, input_ids[0, start + read :])
            bitmasks.fill_next_token_bitmask(matcher, bits)
            bitmasks.apply_token_bitmask_inplace(scores, bits)
            return scores

        return Called(mask)

    return by_transformers(lm, processor)


def with_llmppl(lm: CachedTransformer, together: int, method: str) -> Write:
    schema = JsonSchema(Order)

    def write(prompts: list[Any]) -> list[str]:
        lm.clear()
        options: Any = {"method": method, "together": together, "seed": 0, "progress": False}
        return [answer.text for answer in generate(lm, prompts, schema, max_tokens=MAX_TOKENS, **options)]

    return write


OTHERS = {"outlines": with_outlines, "xgrammar": with_xgrammar, "llguidance": with_llguidance}


def is_valid(text: str) -> bool:
    try:
        return bool(Order.model_validate_json(text))
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lm = CachedTransformer.from_pretrained("smollm2", engine="transformers")
    prompts, right = prompts_of(lm, given.records)
    writers = {
        "llmppl, one after the other": with_llmppl(lm, 1, "greedy"),
        "llmppl, 8 together": with_llmppl(lm, 8, "greedy"),
        "llmppl, best_of": with_llmppl(lm, 1, "best_of"),
    }
    for name, make in OTHERS.items():
        try:
            writers[f"transformers, {name}"] = make(lm)
        except ImportError as error:
            print(f"{name} is skipped: {error}")
    seconds = {name: list[float]() for name in writers}
    texts = dict[str, list[str]]()
    for _ in range(given.rounds):
        for name, write in writers.items():
            start = time.process_time()
            texts[name] = write(prompts)
            seconds[name].append(time.process_time() - start)
    rows = []
    base = np.median(next(iter(seconds.values())))
    for name in writers:
        values = [Order.model_validate_json(text) if is_valid(text) else None for text in texts[name]]
        num_valid = sum(value is not None for value in values)
        num_right = sum(value == truth for value, truth in zip(values, right, strict=True))
        spent = np.median(seconds[name])
        rows.append([name, num_valid, num_right, f"{spent / given.records:.2f}", f"{spent / base:.2f}"])
    columns = ["method", "valid", "right", "CPU s a record", "times the first"]
    table(f"{given.records} records of seven fields", columns, rows)
    save(given.out, "torch", "transformers", *OTHERS)


if __name__ == "__main__":
    main()
