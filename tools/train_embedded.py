"""Training of the small language model that ships with llmppl: from text files to a folder for `from_pretrained`.

The model is a standard `LlamaForCausalLM` with a byte-level BPE tokenizer, so transformers alone can load it. The
schedule (warm-up, constant, linear decay) has two parts, main and decay. Every corpus has a weight in each part, so the
last part can use the simplest text. The same script runs on the CPU of a laptop and on one GPU.

    python tools/train_embedded.py --out out/tiny --minutes 80 --mix stories.txt:6:30 tales.txt:3:6 novels.txt:0.5:0

With `torchrun --nproc-per-node N`, N processes share every step, each with its own batch. On a CPU, one process per
core is faster than one process with all cores.

A mix item is PATH:MAIN_WEIGHT:DECAY_WEIGHT. A corpus is drawn with probability proportional to weight times size.
Files are UTF-8, with blank lines between documents. One document in fifty is held out of the training of the weights,
but not of the tokenizer. The script keeps the weights that do best on these, mixed as in the last part.
It also writes training.json, evaluation.json (see evaluate_embedded.py) and the checksum of the weights. With
`--weights`, training.json includes the earlier trainings.

Source: Jordan et al. (2024) for Muon, the optimiser of the hidden matrices; AdamW has the embeddings and the norms.
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from corpora import EOS, EOS_ID, Corpus, HeldOut, documents, parse, read_held_out, read_training
from evaluate_embedded import evaluate, held_out_losses, markdown
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# GPT-2's pre-tokens, except that digits and white space are single: no token has a space in its middle.
PRE_TOKENS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
ROWS = 256                                          # rows of logits that exist at a time in training


def weighted_documents(mix: list[str]) -> Iterator[str]:
    """Yield each document of the mix as often as its weight in the main part requires."""
    for item in mix:
        path, main_weight, _ = parse(item)
        times = 0.0
        for document in documents(path):
            times += main_weight
            yield from itertools.repeat(document, int(times))
            times %= 1


def train_tokenizer(mix: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose alphabet has every byte, so it encodes any text; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(weighted_documents(mix), trainer)
    return tokenizer


def newton_schulz(gradient: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Orthogonalise the rows of a matrix, or its columns if they are fewer; the shape does not change."""
    x = (gradient / (gradient.norm() + 1e-7)).to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised update; for hidden matrices only."""

    def __init__(
        self, params: list[Tensor], lr: float, dtype: torch.dtype, momentum: float = 0.95, weight_decay: float = 0.05
    ):
        super().__init__(params, {"lr": lr, "dtype": dtype, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(p.grad.lerp(average, group["momentum"]), group["dtype"])
                rate = group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-rate)


def new_model(vocab_size: int, args: argparse.Namespace) -> LlamaForCausalLM:
    """Build a Llama of the given sizes with random weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
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
    # On a CPU the plain products are faster: the backward pass of the fused attention is slow.
    return LlamaForCausalLM._from_config(config, attn_implementation=None if torch.cuda.is_available() else "eager")


def add_dropout(decoder: torch.nn.Module, probability: float) -> None:
    """Add dropout to the embeddings and the outputs of attention and feed-forward parts (Vaswani et al. 2017, 5.4)."""

    def drop(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> Tensor | tuple:
        first, *others = output if isinstance(output, tuple) else (output,)
        dropped = torch.nn.functional.dropout(first, probability, module.training)
        return (dropped, *others) if isinstance(output, tuple) else dropped

    for part in [decoder.embed_tokens, *(part for layer in decoder.layers for part in (layer.self_attn, layer.mlp))]:
        part.register_forward_hook(drop)


def rank_and_processes() -> tuple[int, int]:
    """Return the number of this process, from 0, and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def average_over_processes(gradients: list[Tensor], progress: float) -> float:
    """Replace the gradients by their means over the processes, if there are several, and return the mean progress."""
    _, processes = rank_and_processes()
    if processes == 1:
        return progress
    flat = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor([progress])])
    dist.all_reduce(flat)
    flat /= processes
    *means, mean_progress = flat.split([*(g.numel() for g in gradients), 1])
    for g, mean in zip(gradients, means, strict=True):
        g.copy_(mean.view_as(g))
    return mean_progress.item()


def working_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the type in which the products are computed."""
    return torch.bfloat16 if args.bfloat16 else torch.float32


def new_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms; each group stores its top rate."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    is_hidden = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in is_hidden]
    adam = torch.optim.AdamW(rest, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(hidden, args.lr, working_dtype(args)), adam]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["top_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(progress: float, steps: int, decay: float) -> float:
    """Return the scale: warm-up over 100 steps, then 1, then down to 0.02 over the last `decay` of the time."""
    return min(1.0, (steps + 1) / 100) * min(1.0, max(0.02, (1 - progress) / decay))


def draw_batch(corpora: list[Corpus], probs: np.ndarray, rows: int, window: int, rng: np.random.Generator) -> Tensor:
    """Draw windows from random positions, (rows, window + 1) int64; `probs` are the probabilities of the corpora."""
    drawn = []
    for k in rng.choice(len(corpora), rows, p=probs):
        ids = corpora[k].tokens
        start = rng.integers(0, len(ids) - window - 1)
        drawn.append(ids[start : start + window + 1].astype(np.int64))
    return torch.from_numpy(np.stack(drawn))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean nats of `labels` (n,) under softmax(x @ weight.T), for x (n, hidden) and weight (vocab, hidden).

    The forward pass computes the gradient in pieces, so the (n, vocab) logits never exist at the same time.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        x_grad, weight_grad = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        nats = torch.zeros((), device=x.device)
        for rows, targets, grad in zip(x.split(ROWS), labels.split(ROWS), x_grad.split(ROWS), strict=True):
            log_probs = torch.log_softmax((rows @ weight.T).float(), 1)
            nats -= log_probs.gather(1, targets[:, None]).sum()
            errors = log_probs.exp_()               # softmax, less 1 at the label
            errors.scatter_add_(1, targets[:, None], errors.new_full((len(targets), 1), -1.0))
            errors = errors.to(x.dtype)
            torch.mm(errors, weight, out=grad)
            weight_grad += errors.T @ rows
        ctx.save_for_backward(x_grad / len(x), (weight_grad / len(x)).to(weight.dtype))
        return nats / len(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad, None


def loss_on(decoder: torch.nn.Module, weight: Tensor, windows: Tensor) -> Tensor:
    """Return the mean nats per predicted token of (rows, window + 1) ids; `weight` is the tied embedding."""
    hidden = decoder(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
    return LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, windows[:, 1:].flatten())


def weighted_bits(losses: dict, corpora: list[Corpus]) -> float:
    """Return the bits per byte of the corpora by their shares of the last part; the best weights minimise this."""
    shares = {c.name: c.decay_weight * len(c.tokens) for c in corpora if c.name in losses}
    return sum(share * losses[name]["bits_per_byte"] for name, share in shares.items()) / (sum(shares.values()) or 1)


def inherit(model: LlamaForCausalLM, bpe: Tokenizer, folder: Path) -> None:
    """Copy the weights of `folder` into `model`; a new token gets the mean row of the tokens that spell it there."""
    old_bpe = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for size in SIZES:
        if (theirs := getattr(old.config, size)) != (ours := getattr(model.config, size)):
            raise ValueError(f"the model in {folder} has {size} {theirs}, but the options give {ours}")
    weights = old.state_dict()
    rows, ids = old.model.embed_tokens.weight.detach(), old_bpe.get_vocab()
    new_rows = torch.empty(bpe.get_vocab_size(), rows.shape[1])
    for token, k in bpe.get_vocab().items():
        pieces = [ids[token]] if token in ids else [piece.id for piece in old_bpe.model.tokenize(token)]
        new_rows[k] = rows[pieces].mean(0)
    model.load_state_dict(weights | {"model.embed_tokens.weight": new_rows, "lm_head.weight": new_rows})


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpora: list[Corpus],
    held_out: list[HeldOut],
    args: argparse.Namespace,
) -> dict:
    """Train for `args.steps` or `args.minutes`, write the best weights, and return the content of training.json."""
    rank, processes = rank_and_processes()
    rng = np.random.default_rng([args.seed, rank])
    torch.manual_seed(args.seed + rank)             # for dropout
    sizes = np.array([len(corpus.tokens) for corpus in corpora])
    main_probs = np.array([corpus.main_weight for corpus in corpora]) * sizes
    decay_probs = np.array([corpus.decay_weight for corpus in corpora]) * sizes
    optimizers = new_optimizers(model, args)
    adam_params = optimizers[1].param_groups[0]["params"]
    # The gradients are computed on a copy, in bfloat16 with --bfloat16; the trained weights stay in float32.
    working = copy.deepcopy(model).to(working_dtype(args)).train()
    if args.dropout:
        add_dropout(working.model, args.dropout)
    forward = torch.compile(working.model, dynamic=False) if args.compile else working.model
    pairs = list(zip(model.parameters(), working.parameters(), strict=True))

    start, next_look = time.monotonic(), args.look_every * 60
    progress, average = 0.0, None
    steps = tokens_seen = 0
    best, best_losses = math.inf, {}
    while progress < 1:
        probs = decay_probs if progress > 1 - args.decay else main_probs
        scale = learning_rate_scale(progress, steps, args.decay)
        window = args.window[steps % len(args.window)]
        rows = max(1, args.batch * args.window[0] // window)
        windows = draw_batch(corpora, probs / probs.sum(), rows, window, rng).to(model.device)
        loss = loss_on(forward, working.lm_head.weight, windows)
        loss.backward()
        for ours, theirs in pairs:
            ours.grad, theirs.grad = theirs.grad.float(), None
        steps += 1
        seconds = time.monotonic() - start
        progress = steps / args.steps if args.steps else seconds / (args.minutes * 60)
        progress = average_over_processes([p.grad for p in model.parameters()], progress)
        torch.nn.utils.clip_grad_norm_(adam_params, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["top_lr"] * scale
            optimizer.step()
        with torch.no_grad():
            for ours, theirs in pairs:
                theirs.copy_(ours)
        tokens_seen += rows * window * processes
        if not math.isfinite(loss.item()):
            raise ValueError(f"the loss of step {steps} is {loss.item()}: give a lower --lr and --adam-lr")
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if rank:
            continue                                # only the first process evaluates and writes
        if steps % 50 == 0:
            print(f"{seconds:7.0f} s  step {steps}  {tokens_seen / 1e6:.2f}M tokens  loss {average:.3f}", flush=True)
        if progress >= 1 or seconds >= next_look:
            next_look += args.look_every * 60
            losses = held_out_losses(model, tokenizer, held_out, args.window[0])
            print("held out:", losses, flush=True)
            if (score := weighted_bits(losses, corpora)) <= best:
                best, best_losses = score, losses
                model.save_pretrained(args.out)

    return {
        "held_out": best_losses,
        "steps": steps,
        "tokens_seen": tokens_seen,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "mix": [f"{corpus.name}:{corpus.main_weight}:{corpus.decay_weight}" for corpus in corpora],
        "tokens": {corpus.name: len(corpus.tokens) for corpus in corpora},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def check(corpora: list[Corpus], window: int) -> None:
    """Raise a ValueError if windows cannot be drawn from the mix."""
    names = [corpus.name for corpus in corpora]
    if len(set(names)) < len(names):
        raise ValueError(f"the files of a mix need different names, not {names}")
    for corpus in corpora:
        if len(corpus.tokens) < window + 2:
            raise ValueError(f"{corpus.name}: its {len(corpus.tokens)} tokens do not fill a window of {window}: "
                             "give a longer file or a shorter --window")  # fmt: skip
    for part in ("main", "decay"):
        weights = [getattr(corpus, f"{part}_weight") for corpus in corpora]
        if min(weights) < 0 or not sum(weights) > 0:
            raise ValueError(f"the weights of the {part} part are {weights}: none may be negative, and one positive")


def train_folder(args: argparse.Namespace) -> None:
    """Train tokenizer and model, and write the folder."""
    if "WORLD_SIZE" in os.environ:                  # set by torchrun
        dist.init_process_group()
    rank, _ = rank_and_processes()
    torch.manual_seed(args.seed)
    bpe = train_tokenizer(args.mix, args.vocab)
    corpora = read_training(args.mix, bpe)
    check(corpora, max(args.window))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        bos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=args.context,
    )
    model = new_model(bpe.get_vocab_size(), args)
    if args.weights:
        inherit(model, bpe, args.weights)
    model.to(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    if rank == 0:
        tokenizer.save_pretrained(args.out)
        print("tokens:", {corpus.name: len(corpus.tokens) for corpus in corpora})
        print("parameters:", sum(p.numel() for p in model.parameters()), flush=True)

    report = train(model, tokenizer, corpora, read_held_out(args.mix, bpe), args)
    if rank:
        return
    best = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float16)
    best.save_pretrained(args.out)
    if args.weights and (record := args.weights / "training.json").exists():
        earlier = json.loads(record.read_text(encoding="utf-8"))
        report["before"] = [*earlier.pop("before", []), earlier]
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    digest = hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest()
    (args.out / "model.safetensors.sha256").write_text(f"{digest}  model.safetensors\n", encoding="utf-8")
    print(markdown(evaluate(args.out, args.mix, args.window[0]), report), flush=True)


def wrong_option(args: argparse.Namespace) -> str | None:
    """Return a message on the first invalid option, or None."""
    head_width = args.hidden / max(1, args.heads)
    rules = {
        "weights": (
            args.weights is None or (args.weights / "config.json").is_file(),
            "a folder with a model and its config.json",
        ),
        "minutes": (args.minutes > 0, "above 0"),
        "steps": (args.steps >= 0, "0 (to use --minutes) or more"),
        "look_every": (args.look_every > 0, "above 0"),
        "vocab": (257 <= args.vocab <= 1 << 16, "from 257, the bytes and the end of text, to 65536"),
        "layers": (args.layers >= 1, "at least 1"),
        "heads": (args.heads >= 1 and head_width % 2 == 0, f"such that --hidden {args.hidden} over it is even"),
        "kv_heads": (args.kv_heads >= 1 and args.heads % args.kv_heads == 0, f"a divisor of --heads {args.heads}"),
        "intermediate": (args.intermediate >= 1, "at least 1"),
        "window": (
            1 <= min(args.window) and max(args.window) <= args.context,
            f"from 1 to --context {args.context}",
        ),
        "batch": (args.batch >= 1, "at least 1"),
        "lr": (args.lr > 0, "above 0"),
        "adam_lr": (args.adam_lr > 0, "above 0"),
        "dropout": (0 <= args.dropout < 1, "from 0 to below 1"),
        "decay": (0 < args.decay <= 1, "above 0 and at most 1"),
        "seed": (args.seed >= 0, "at least 0"),
    }
    for name, (good, what) in rules.items():
        if not good:
            value = getattr(args, name)
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            return f"--{name.replace('_', '-')} must be {what}, not {shown}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, default: float, what: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{what} (%(default)s)")

    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--mix", nargs="+", required=True, metavar="PATH:MAIN:DECAY", help="the texts, see above")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="start from these weights, of the same sizes")
    parser.add_argument("--bfloat16", action="store_true", help="for a GPU, or a processor with AMX")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    add("--minutes", 60.0, "how long to train")
    add("--steps", 0, "steps to train instead of minutes; the seed then determines the outcome")
    add("--look-every", 10.0, "minutes between two looks at held-out text")
    add("--vocab", 4096, "tokens of the vocabulary")
    add("--hidden", 192, "width of the model")
    add("--layers", 6, "layers")
    add("--heads", 6, "heads of attention")
    add("--kv-heads", 3, "heads of keys and values")
    add("--intermediate", 512, "width of the feed-forward parts")
    add("--context", 1024, "positions of the model")
    parser.add_argument(
        "--window", type=int, nargs="+", default=[256], metavar="TOKENS",
        help="tokens of a training window; several lengths alternate (256)",
    )  # fmt: skip
    add("--batch", 16, "windows of the first length in a step; other lengths use as many tokens")
    add("--lr", 0.02, "learning rate of Muon")
    add("--adam-lr", 0.004, "learning rate of AdamW")
    add("--dropout", 0.0, "probability of dropout, for texts that are read many times")
    add("--decay", 0.4, "share of the time in which the learning rate falls")
    add("--seed", 0, "seed of weights and windows")
    args = parser.parse_args()
    if wrong := wrong_option(args):
        parser.error(wrong)
    train_folder(args)


if __name__ == "__main__":
    main()
