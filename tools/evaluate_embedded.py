"""Evaluation of the small language model that ships with llmppl, or of a similar one, and the figures of its card.

    python tools/evaluate_embedded.py llmppl/lm/embedded --mix stories.txt:6:30 tales.txt:3:6 novels.txt:0.5:0 \\
        --card llmppl/lm/embedded/README.md

prints the figures, writes them to `evaluation.json` in the model's folder, and puts them into the card. The seed is
fixed, so the same files and model give the same figures. Use the mix of the training (see corpora.py). The figures:

- Bits per byte of held-out text. The bytes are those of the text; the end of a document has none.
- Nats per token of held-out documents, each from its beginning, by the position of the token in the document. They show
  how the model handles texts longer than its training windows.
- Infilling: one to three words are cut from the middle of a held-out sentence. They are ranked against nine other spans
  of as many words, from held-out text of the same collection, by the log-likelihood of the whole sentence.
  Ties count against the true words. Chance ranks them first in 10% of sentences, with a mean rank of 5.5.
- Free samples, which start from the end-of-text token alone. Known words: the share of their words that occur in the
  training texts of any collection, in lower case. Distinct-3: different word trigrams / all trigrams, over all samples
  (after Li et al. 2016). Repeated-4: the share of word 4-grams that occurred earlier in the sample (after Welleck et
  al. 2020). A word cut off by the length limit is not counted. Held-out documents are measured in the same way.
"""

import argparse
import json
import math
import re
from collections.abc import Iterable
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path

import numpy as np
import torch
from corpora import EOS_ID, HeldOut, parse, read_held_out, split
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

SEED = 0
WINDOWS = 40                                        # at most, from each collection's held-out text
DOCUMENTS = 100                                     # at most, from each collection, read whole
PLACES = (0, 64, 256, 512, 1024)                    # bounds of the ranges of positions in a document
QUESTIONS = 100                                     # of infilling, at most, from each collection
DISTRACTORS = 9
TEMPERATURES = (1.0, 0.7)
SAMPLES = 400                                       # at each temperature
SHOWN_SAMPLES = 20                                  # in evaluation.json, at each temperature
SAMPLE_TOKENS = 60
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
SENTENCE = re.compile(r"\b[A-Z][^.!?\n]+[.!?]")
SENTENCE_WORDS = range(8, 25)                       # length of a sentence of an infilling question
BEGIN, END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return [word.casefold().replace("’", "'") for word in WORD.findall(text)]


# ---- held-out text


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[HeldOut], window: int
) -> dict[str, dict[str, float]]:
    """Return nats per token and bits per byte of the first held-out windows, by file; skip files with no window."""
    results = {}
    for file in held_out:
        rows = min(WINDOWS, (len(file.tokens) - 1) // window)
        if rows < 1:
            continue
        ids = torch.from_numpy(file.tokens[: rows * window + 1].astype(np.int64))
        windows = ids.unfold(0, window + 1, window).to(model.device)                    # (rows, window + 1)
        nats = sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in windows) / rows
        num_bytes = len(tokenizer.decode(ids[1:], skip_special_tokens=True).encode())   # EOS has no bytes
        bits_per_byte = nats / math.log(2) * rows * window / num_bytes
        results[file.name] = {
            "windows": rows,
            "nats_per_token": round(nats, 3),
            "bits_per_byte": round(bits_per_byte, 3),
        }
    return results


@torch.no_grad()
def nats_by_place(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[HeldOut]
) -> dict[str, list[tuple[int, float | None]]]:
    """Return, by file, the number of tokens and their mean nats in each range of PLACES (None for an empty range)."""
    results = {}
    for file in held_out:
        nats = [np.zeros(0)]
        for document in file.documents[:DOCUMENTS]:
            row = [EOS_ID, *tokenizer.encode(document, add_special_tokens=False, verbose=False), EOS_ID]
            ids = torch.tensor([row[: PLACES[-1] + 1]], device=model.device)
            log_probs = torch.log_softmax(model(input_ids=ids[:, :-1]).logits[0].double(), 1)
            nats.append(-log_probs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
        ranges = [np.concatenate([each[begin:end] for each in nats]) for begin, end in pairwise(PLACES)]
        results[file.name] = [(len(each), round(float(each.mean()), 3) if len(each) else None) for each in ranges]
    return results


# ---- infilling


def sentences(documents: list[str]) -> list[list[str]]:
    """Return the sentences of the documents that have SENTENCE_WORDS pieces, as lists of pieces without white space."""
    found = (match.group().split() for match in chain.from_iterable(map(SENTENCE.finditer, documents)))
    return [pieces for pieces in found if len(pieces) in SENTENCE_WORDS]


def middle_spans(pieces: list[str], length: int) -> list[int]:
    """Return the starts of spans of `length` plain words, outside the first two and last two pieces of a sentence."""
    starts = range(2, len(pieces) - length - 1)
    return [k for k in starts if all(WORD.fullmatch(piece) for piece in pieces[k : k + length])]


def infilling_questions(documents: list[str], rng: np.random.Generator) -> list[list[str]]:
    """Return the choices of each question, all different; the first choice is the sentence of the documents."""
    pool = sentences(documents)
    rng.shuffle(pool)
    spans: dict[int, set[str]] = {
        length: {" ".join(pieces[k : k + length]) for pieces in pool for k in middle_spans(pieces, length)}
        for length in (1, 2, 3)
    }
    ordered = {length: sorted(found) for length, found in spans.items()}    # the order of a set varies by process
    questions = []
    for pieces in pool[:QUESTIONS]:
        length = int(rng.integers(1, 4))
        starts = middle_spans(pieces, length)
        if not starts or len(ordered[length]) <= DISTRACTORS:
            continue
        k = int(rng.choice(starts))
        gold = " ".join(pieces[k : k + length])
        others = [span for span in ordered[length] if span != gold]
        chosen = [others[i] for i in rng.choice(len(others), DISTRACTORS, replace=False)]
        questions.append([" ".join([*pieces[:k], span, *pieces[k + length :]]) for span in [gold, *chosen]])
    return questions


@torch.no_grad()
def log_likelihoods(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Return the log-likelihood in nats of each text as the beginning of a document, (n,)."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    width = max(map(len, encoded))
    ids = torch.tensor([[EOS_ID, *row, *[EOS_ID] * (width - len(row))] for row in encoded], device=model.device)
    log_probs = torch.log_softmax(model(input_ids=ids[:, :-1]).logits.float(), 2)
    of_tokens = log_probs.gather(2, ids[:, 1:, None])[:, :, 0]                          # (n, width)
    inside = torch.tensor([[k < len(row) for k in range(width)] for row in encoded], device=model.device)
    return (of_tokens * inside).sum(1).cpu().numpy()


def infilling(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[HeldOut]
) -> dict[str, dict[str, float]]:
    """Return, by file, how often the missing words rank first of ten, and their mean rank."""
    results = {}
    for file in held_out:
        questions = infilling_questions(file.documents, np.random.default_rng(SEED))
        if not questions:
            continue
        likelihoods = [log_likelihoods(model, tokenizer, texts) for texts in questions]
        ranks = [1 + int((row[1:] >= row[0]).sum()) for row in likelihoods]
        results[file.name] = {
            "questions": len(ranks),
            "first": round(float(np.mean(np.array(ranks) == 1)), 3),
            "mean_rank": round(float(np.mean(ranks)), 2),
        }
    return results


# ---- free samples


def training_words(mix: list[str]) -> set[str]:
    """Return the words of the training documents of the mix."""
    return {word for item in mix for document in split(parse(item)[0])[0] for word in words(document)}


@torch.no_grad()
def free_samples(model: LlamaForCausalLM, temperature: float) -> list[list[int]]:
    """Draw SAMPLES documents of at most SAMPLE_TOKENS tokens; the EOS that ends a document is removed."""
    torch.manual_seed(SEED)
    prompt = torch.full((SAMPLES, 1), EOS_ID, device=model.device)
    rows = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=SAMPLE_TOKENS,
        pad_token_id=EOS_ID,
    )
    return [[*row, EOS_ID][: [*row, EOS_ID].index(EOS_ID)] for row in rows[:, 1:].tolist()]


def first_documents(held_out: list[HeldOut]) -> list[str]:
    """Return SAMPLES held-out documents, taken from the files in turn; fewer if there are fewer."""
    locked = chain.from_iterable(zip_longest(*(file.documents for file in held_out)))
    return list(islice((document for document in locked if document is not None), SAMPLES))


def ngrams(items: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(items[k:] for k in range(n)), strict=False))


def text_statistics(
    tokenizer: PreTrainedTokenizerFast, samples: Iterable[list[int]], vocabulary: set[str]
) -> dict[str, float]:
    """Return known words, distinct-3 and repeated-4 (see above) of documents, cut to SAMPLE_TOKENS tokens."""
    texts = []
    for ids in samples:
        found = words(tokenizer.decode(ids[:SAMPLE_TOKENS]))
        texts.append(found[:-1] if len(ids) >= SAMPLE_TOKENS else found)
    trigrams = [trigram for text in texts for trigram in ngrams(text, 3)]
    of_four = [ngrams(text, 4) for text in texts]
    num_words, num_of_four = sum(map(len, texts)), sum(map(len, of_four))
    return {
        "texts": len(texts),
        "words": num_words,
        "known_words": round(sum(word in vocabulary for text in texts for word in text) / max(1, num_words), 4),
        "distinct_3": round(len(set(trigrams)) / max(1, len(trigrams)), 4),
        "repeated_4": round(1 - sum(len(set(found)) for found in of_four) / max(1, num_of_four), 4),
    }


# ---- all figures


def evaluate(folder: Path, mix: list[str], window: int) -> dict:
    """Return all figures of the model in a folder, and write them to its evaluation.json."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = read_held_out(mix, tokenizer.backend_tokenizer)
    vocabulary = training_words(mix)
    samples = {str(temperature): free_samples(model, temperature) for temperature in TEMPERATURES}
    real = tokenizer(first_documents(held_out), add_special_tokens=False, verbose=False).input_ids
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "window": window,
        "held_out": held_out_losses(model, tokenizer, held_out, window),
        "nats_by_place": nats_by_place(model, tokenizer, held_out),
        "infilling": infilling(model, tokenizer, held_out),
        "text": {
            name: text_statistics(tokenizer, ids, vocabulary) for name, ids in [*samples.items(), ("held out", real)]
        },
        "samples": {
            name: [tokenizer.decode(ids) for ids in drawn[:SHOWN_SAMPLES]] for name, drawn in samples.items()
        },
    }
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    return figures


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a markdown table, followed by an empty line."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]] + [""]


def shares(mix: list[str], tokens: dict[str, int]) -> list[list[str]]:
    """Return the share of every file in the drawn tokens, in the main part and in the last part."""
    parsed = [parse(item) for item in mix]
    drawn = np.array([[weight * tokens[path.name] for weight in weights] for path, *weights in parsed])
    percent = 100 * drawn / drawn.sum(0)
    return [[path.name, f"{tokens[path.name]:,}", *(f"{share:.0f}%" for share in row)]
            for (path, *_), row in zip(parsed, percent, strict=True)]  # fmt: skip


def markdown(figures: dict, training: dict) -> str:
    """Return the section of the card: the figures of evaluation.json and the training figures of training.json."""
    trainings = [*training.get("before", []), training]
    amounts = [
        " + ".join(each) + f" {unit}"
        for unit, each in [
            ("steps", [f"{one['steps']:,}" for one in trainings]),
            ("tokens", [f"{one['tokens_seen'] / 1e6:.1f}M" for one in trainings]),
            ("minutes", [str(one["minutes"]) for one in trainings]),
        ]
    ]
    held_out, answers = figures["held_out"], figures["infilling"]
    losses = [
        [name, str(row["windows"]), f"{row['nats_per_token']:.3f}", f"{row['bits_per_byte']:.3f}"]
        for name, row in held_out.items()
    ]
    places = [
        [name, *(f"{nats:.3f} ({count:,})" if count else "" for count, nats in row)]
        for name, row in figures["nats_by_place"].items()
    ]
    ranks = [
        [name, str(row["questions"]), f"{row['first']:.0%}", f"{row['mean_rank']:.2f}"] for name, row in answers.items()
    ]
    statistics = [
        [name if name == "held out" else f"samples at temperature {name}", str(row["texts"]), f"{row['words']:,}",
         f"{row['known_words']:.1%}", f"{row['distinct_3']:.3f}", f"{row['repeated_4']:.3f}"]
        for name, row in figures["text"].items()
    ]  # fmt: skip
    return "\n".join([
        f"{figures['parameters']:,} parameters; {', '.join(amounts)}. The mix of the last training:",
        "",
        *table(["file", "tokens to train on", "share, main part", "share, last part"],
               shares(training["mix"], training["tokens"])),
        f"Held-out text, in windows of {figures['window']} tokens:",
        "",
        *table(["file", "windows", "nats per token", "bits per byte"], losses),
        "Held-out documents from their beginning: nats per token by position (and the number of tokens):",
        "",
        *table(["file", *(f"{begin} to {end}" for begin, end in pairwise(PLACES))], places),
        f"Infilling: the rank of the missing words of a held-out sentence among {DISTRACTORS} others:",
        "",
        *table(["file", "questions", "ranked first", "mean rank"], ranks),
        f"Free samples of at most {SAMPLE_TOKENS} tokens, and the beginnings of held-out documents:",
        "",
        *table(["text", "number", "words", "known words", "distinct-3", "repeated-4"], statistics),
    ]).rstrip()  # fmt: skip


def fill(card: Path, section: str) -> None:
    """Put `section` between the two marks of the card; raise a ValueError if a mark is missing."""
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{card} has no place for the figures: it needs a line {BEGIN} and, below it, a line {END}")
    card.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the model")
    parser.add_argument("--mix", nargs="+", required=True, metavar="PATH:MAIN:DECAY", help="the files of the training")
    parser.add_argument("--window", type=int, default=256, help="tokens of a held-out window (%(default)s)")
    parser.add_argument("--card", type=Path, metavar="FILE", help="write the figures between the marks of this file")
    args = parser.parse_args()
    logging.disable_progress_bar()
    section = markdown(
        evaluate(args.folder, args.mix, args.window),
        json.loads((args.folder / "training.json").read_text(encoding="utf-8")),
    )
    print(section)
    if args.card:
        fill(args.card, section)


if __name__ == "__main__":
    main()
