"""Train the small language model that ships with llmppl: from plain text files to a folder for `from_pretrained`.

The model is a standard `LlamaForCausalLM` with a byte-level BPE tokenizer, so that it loads with nothing but
transformers. One schedule (warm-up, constant, linear decay) is cut in two parts, main and decay, and every corpus has
a weight in each: the last part can be spent on the simplest text. The same script serves a laptop's CPU and one GPU.

    python tools/train_embedded.py --out out/tiny --minutes 80 --mix stories.txt:6:30 tales.txt:3:6 novels.txt:0.5:0

`--evaluate FOLDER` instead of `--out` trains nothing and prints what a finished model makes of the same files.

A mix item is PATH:MAIN_WEIGHT:DECAY_WEIGHT; a corpus is drawn with probability proportional to weight times size.
A document is a block of text between blank lines; one in fifty is held out and only evaluated.
Source: Jordan et al. (2024) for Muon, the optimiser of the hidden matrices; AdamW has the embeddings and the norms.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"                               # id 0; closes every document, and is BOS, too
EOS_ID = 0
SHORTEST_DOCUMENT = 40                              # characters; shorter blocks are headings and page numbers
HELD_OUT = 50                                       # one document in so many
EVALUATED_WINDOWS = 40                              # of each corpus's held-out documents
SAVE_EVERY = 900                                    # seconds


@dataclass
class Corpus:
    """One text file, tokenised, with its weight in each part of the training."""

    name: str
    main_weight: float
    decay_weight: float
    train: np.ndarray                               # (n,) uint16
    held_out: np.ndarray                            # (m,) uint16


def documents(path: Path) -> Iterator[str]:
    """The blocks of a text file that blank lines separate, stripped, without the very short ones."""
    for block in path.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n\n"):
        if len(block := block.strip()) > SHORTEST_DOCUMENT:
            yield block


def train_tokenizer(paths: list[Path], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with every byte in its alphabet, so that it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document for path in paths for document in documents(path)), trainer)
    return tokenizer


def read_corpus(item: str, tokenizer: Tokenizer) -> Corpus:
    """Tokenise the file of one mix item, each document closed by EOS."""
    path, main_weight, decay_weight = item.rsplit(":", 2)
    train, held_out = [], []
    numbered = enumerate(documents(Path(path)))
    while chunk := list(itertools.islice(numbered, 4096)):
        for (k, _), encoding in zip(chunk, tokenizer.encode_batch([document for _, document in chunk]), strict=True):
            ids = np.array([*encoding.ids, EOS_ID], np.uint16)
            (held_out if k % HELD_OUT == 17 else train).append(ids)
    empty = [np.zeros(0, np.uint16)]
    name = Path(path).name
    return Corpus(name, float(main_weight), float(decay_weight), np.concatenate(empty + train),
                  np.concatenate(empty + held_out))  # fmt: skip


def newton_schulz(gradient: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise the rows (or the columns, if they are fewer) of a matrix; the shape stays."""
    x = gradient / (gradient.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for hidden matrices only."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(p.grad.lerp(average, group["momentum"]))
                rate = group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama of the sizes asked for, with random weights."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        rope_theta=10000.0,
        attention_bias=False,
    )
    return LlamaForCausalLM(config)


def new_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest (embeddings, norms); each group remembers its top rate."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    is_hidden = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in is_hidden]
    adam = torch.optim.AdamW(rest, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(hidden, args.lr), adam]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["top_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(progress: float, steps: int, decay: float) -> float:
    """Warm-up over the first 100 steps, then 1, then down to 0.02 over the last `decay` of the time."""
    return min(1.0, (steps + 1) / 100) * min(1.0, max(0.02, (1 - progress) / decay))


def draw_batch(corpora: list[Corpus], probs: np.ndarray, rows: int, window: int, rng: np.random.Generator) -> Tensor:
    """(rows, window + 1) int64: windows from random places, the corpora chosen with `probs`."""
    drawn = []
    for k in rng.choice(len(corpora), rows, p=probs):
        ids = corpora[k].train
        start = rng.integers(0, len(ids) - window - 1)
        drawn.append(ids[start : start + window + 1].astype(np.int64))
    return torch.from_numpy(np.stack(drawn))


def loss_on(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Mean nats per predicted token of (rows, window + 1) ids; in bfloat16 on a GPU."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=windows.is_cuda):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpora: list[Corpus], window: int) -> dict:
    """Nats per token and bits per byte on the first held-out windows of every corpus that has one."""
    model.eval()
    results = {}
    for corpus in corpora:
        rows = min(EVALUATED_WINDOWS, (len(corpus.held_out) - 1) // window)
        if rows < 1:
            continue
        ids = torch.from_numpy(corpus.held_out[: rows * window + 1].astype(np.int64))
        windows = ids.unfold(0, window + 1, window).to(model.device)                    # (rows, window + 1)
        nats = sum(loss_on(model, row[None]).item() for row in windows) / rows
        num_bytes = len(tokenizer.decode(ids[1:], skip_special_tokens=True).encode())   # EOS has no bytes
        bits_per_byte = nats / math.log(2) * rows * window / num_bytes
        results[corpus.name] = {"nats_per_token": round(nats, 3), "bits_per_byte": round(bits_per_byte, 3)}
    model.train()
    return results


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpora: list[Corpus], args: argparse.Namespace
) -> dict:
    """Train for `args.minutes`; returns what training.json holds."""
    rng = np.random.default_rng(args.seed)
    sizes = np.array([len(corpus.train) for corpus in corpora])
    main_probs = np.array([corpus.main_weight for corpus in corpora]) * sizes
    decay_probs = np.array([corpus.decay_weight for corpus in corpora]) * sizes
    optimizers = new_optimizers(model, args)
    adam_params = optimizers[1].param_groups[0]["params"]
    forward = torch.compile(model) if args.compile else model

    start, budget = time.monotonic(), args.minutes * 60
    steps = tokens_seen = 0
    average, next_save = None, SAVE_EVERY
    while (progress := (time.monotonic() - start) / budget) < 1:
        probs = decay_probs if progress > 1 - args.decay else main_probs
        windows = draw_batch(corpora, probs / probs.sum(), args.batch, args.window, rng).to(model.device)
        loss = loss_on(forward, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adam_params, 1.0)
        scale = learning_rate_scale(progress, steps, args.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["top_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
        tokens_seen += args.batch * args.window
        seconds, average = time.monotonic() - start, loss.item() + 0.98 * ((average or loss.item()) - loss.item())
        if steps % 50 == 0:
            print(f"{seconds:7.0f} s  step {steps}  {tokens_seen / 1e6:.2f}M tokens  loss {average:.3f}", flush=True)
        if seconds > next_save:
            next_save += SAVE_EVERY
            model.save_pretrained(args.out)
            print("held out:", evaluate(model, tokenizer, corpora, args.window), flush=True)

    return {
        "held_out": evaluate(model, tokenizer, corpora, args.window),
        "steps": steps,
        "tokens_seen": tokens_seen,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "mix": [f"{corpus.name}:{corpus.main_weight}:{corpus.decay_weight}" for corpus in corpora],
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", type=Path, help="the folder to write")
    folder.add_argument("--evaluate", type=Path, metavar="FOLDER", help="evaluate the model of this folder instead")
    parser.add_argument("--mix", nargs="+", required=True, metavar="PATH:MAIN:DECAY")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024, help="positions of the model")
    parser.add_argument("--window", type=int, default=256, help="tokens of a training window")
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's learning rate")
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time spent decaying")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def evaluate_folder(args: argparse.Namespace) -> None:
    """Print the held-out losses of a finished model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.evaluate)
    model = LlamaForCausalLM.from_pretrained(args.evaluate, dtype=torch.float32)
    corpora = [read_corpus(item, tokenizer.backend_tokenizer) for item in args.mix]
    for name, losses in evaluate(model, tokenizer, corpora, args.window).items():
        print(name, losses, flush=True)


def train_folder(args: argparse.Namespace) -> None:
    """Train tokenizer and model, and write them with training.json."""
    torch.manual_seed(args.seed)
    bpe = train_tokenizer([Path(item.rsplit(":", 2)[0]) for item in args.mix], args.vocab)
    corpora = [read_corpus(item, bpe) for item in args.mix]
    print("tokens:", {corpus.name: len(corpus.train) for corpus in corpora}, flush=True)
    for corpus in corpora:
        if len(corpus.train) < args.window + 2:
            raise SystemExit(f"{corpus.name}: {len(corpus.train)} tokens do not fill a window of {args.window}")

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        bos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=args.context,
    )
    tokenizer.save_pretrained(args.out)
    model = new_model(args).to("cuda" if torch.cuda.is_available() else "cpu")
    print("parameters:", sum(p.numel() for p in model.parameters()), flush=True)

    report = train(model, tokenizer, corpora, args)
    model.to(torch.float16).save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


def main() -> None:
    args = arguments()
    (evaluate_folder if args.evaluate else train_folder)(args)


if __name__ == "__main__":
    main()
