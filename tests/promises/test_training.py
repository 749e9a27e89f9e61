"""The embedded model's recipe, run end to end on the sample of tools/corpus_sample: text to tokenizer to model to card.

A small model takes 200 steps.
"""

import contextlib
import copy
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.common import HANG, ROOT
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import LlamaForCausalLM

from llmppl import CachedTransformer, ConstrainedText, Regex, smc_standard
from llmppl.lm.embedded import PATH, verify
from llmppl.lm.engines import hf

pytestmark = pytest.mark.slow
TOOLS = ROOT / "tools"
SAMPLE = TOOLS / "corpus_sample" / "grimm_tales.txt"
sys.path.insert(0, str(TOOLS))                      # as it is for a script of the folder
import corpora  # noqa: E402
import evaluate_embedded  # noqa: E402
import train_embedded  # noqa: E402

SMALL = "--steps 200 --vocab 512 --hidden 64 --layers 2 --heads 4 --kv-heads 2 --intermediate 128 --batch 8"
MIX = f"{SAMPLE}:1:1"


def run(script: ModuleType, *arguments: object) -> str:
    """What a script of tools/ printed, given these arguments."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        script.main()
    return printed.getvalue()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The folder that the training script made, its output, its model and its figures."""
    folder = tmp_path_factory.mktemp("small") / "model"
    printed = run(train_embedded, "--out", folder, "--mix", MIX, "--window", 64, *SMALL.split())
    lm = CachedTransformer.from_pretrained(folder)
    return SimpleNamespace(
        folder=folder,
        printed=printed,
        lm=lm,
        corpus=corpora.read_training([MIX], lm.tokenizer.backend_tokenizer)[0],
        held_out=corpora.read_held_out([MIX], lm.tokenizer.backend_tokenizer)[0],
        training=json.loads((folder / "training.json").read_text(encoding="utf-8")),
        evaluation=json.loads((folder / "evaluation.json").read_text(encoding="utf-8")),
    )


def test_the_model_beats_token_frequencies_on_held_out_text(recipe):
    found, size = recipe.evaluation["held_out"][SAMPLE.name], len(recipe.lm.vocab)
    counts = np.bincount(recipe.corpus.tokens, minlength=size) + 1.0
    nats = -np.log(counts / counts.sum())[recipe.held_out.tokens[1 : found["windows"] * 64 + 1]]
    assert found["nats_per_token"] < nats.mean() - 1.0
    assert found == pytest.approx(recipe.training["held_out"][SAMPLE.name], abs=0.005)     # float16 against float32
    verify(recipe.folder)


def test_held_out_losses_agree_with_a_loop_over_the_tokens(recipe):
    """Nats of each token one after the other; bytes by the vocabulary's own account of the tokens."""
    ids, lm = recipe.held_out.tokens[:65].tolist(), recipe.lm
    short = corpora.HeldOut("short", [], np.array(ids, np.uint16))
    found = evaluate_embedded.held_out_losses(lm.model, lm.tokenizer, [short], 64)["short"]
    with torch.no_grad():
        logits = [lm.model(input_ids=torch.tensor([ids[:k]])).logits[0, -1].double() for k in range(1, 65)]
    nats = -sum(float(torch.log_softmax(row, 0)[token]) for row, token in zip(logits, ids[1:], strict=True))
    num_bytes = sum(len(lm.vocab.tokens[token]) for token in ids[1:])
    assert found["nats_per_token"] == pytest.approx(nats / 64, abs=0.001)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / num_bytes, abs=0.001)


def test_the_folder_loads_as_a_language_model_that_writes(recipe):
    text = smc_standard(ConstrainedText(recipe.lm, "There was once", Regex(r" [a-z]+ [a-z]+\.")), 4, seed=0)
    assert all(re.fullmatch(r" [a-z]+ [a-z]+\.", str(particle)) for particle in text) and len(text) > 0


@given(text=st.text())
def test_the_tokenizer_round_trips_any_text(recipe, text):
    tokenizer = recipe.lm.tokenizer
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_printed_figures_are_written_into_a_card(recipe, tmp_path):
    """An evaluation of its own prints the same, too: the seed is fixed."""
    card = tmp_path / "card.md"
    card.write_text(f"above\n{evaluate_embedded.BEGIN}\nformer figures\n{evaluate_embedded.END}\nbelow\n")
    printed = run(evaluate_embedded, recipe.folder, "--mix", MIX, "--window", 64, "--card", card)
    assert printed.strip() in recipe.printed
    text = card.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "former figures" not in text
    figures, training = recipe.evaluation, recipe.training
    for shown in (
        f"{training['steps']:,} steps",
        f"{training['minutes']} minutes",
        f"| {SAMPLE.name} | {len(recipe.corpus.tokens):,} | 100% | 100% |",
        f"{figures['held_out'][SAMPLE.name]['bits_per_byte']:.3f}",
        f"{figures['infilling'][SAMPLE.name]['mean_rank']:.2f}",
        f"{figures['text']['0.7']['known_words']:.1%}",
    ):
        assert shown in text
    assert [len(figures["samples"][name]) for name in ("1.0", "0.7")] == [20, 20]


# ---- the parts


def test_a_held_out_document_is_never_trained_on():
    train, held_out = corpora.split(SAMPLE)
    everything = list(corpora.documents(SAMPLE))
    assert len(held_out) == len(everything[17::50]) > 0 and sorted(train + held_out) == sorted(everything)
    assert not {" ".join(text.split()) for text in held_out} & {" ".join(text.split()) for text in train}


def test_a_corpus_is_its_documents_each_closed_by_an_end_token():
    tokenizer = train_embedded.train_tokenizer([MIX], 300)
    (corpus,), (rest,) = corpora.read_training([MIX], tokenizer), corpora.read_held_out([MIX], tokenizer)
    train, held_out = corpora.split(SAMPLE)
    assert rest.documents == held_out
    for ids, texts in ((corpus.tokens, train), (rest.tokens, held_out)):
        assert (ids == corpora.EOS_ID).sum() == len(texts) and ids[-1] == corpora.EOS_ID
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(t + corpora.EOS for t in texts)


def test_the_loss_and_its_gradients_agree_with_autograd():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (300, 20))
    labels = torch.randint(20, (300,), generator=generator)
    found, expected = [], []
    for out, loss in ((found, train_embedded.LinearCrossEntropy.apply),
                      (expected, lambda x, weight, y: torch.nn.functional.cross_entropy(x @ weight.T, y))):  # fmt: skip
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        value = loss(*leaves, labels)
        value.backward()
        out += [value.detach().double(), *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)      # the sum is kept in float32


@pytest.mark.parametrize("options, message", [
    ("--vocab 70000", "--vocab must be from 257, the bytes and the end of text, to 65536, not 70000"),
    ("--heads 6 --kv-heads 4", "--kv-heads must be a divisor of --heads 6, not 4"),
    ("--weights nowhere", "--weights must be a folder with a model and its config.json, not nowhere"),
])  # fmt: skip
def test_an_invalid_number_is_refused_before_training_begins(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(train_embedded, "--out", tmp_path / "model", "--mix", MIX, *options.split())
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_weights_continue_under_their_own_or_another_tokenizer(recipe):
    """With its own tokenizer nothing changes; a token that is new gets the mean of the tokens that spell it."""
    old, bpe = recipe.lm.model, recipe.lm.tokenizer.backend_tokenizer
    again = LlamaForCausalLM(old.config)            # with weights of its own, at random
    train_embedded.inherit(again, bpe, recipe.folder)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), old.state_dict().values(), strict=True))

    other_bpe = train_embedded.train_tokenizer([MIX], len(recipe.lm.vocab) + 100)
    config = copy.deepcopy(old.config)
    config.vocab_size = other_bpe.get_vocab_size()
    larger = LlamaForCausalLM(config)
    train_embedded.inherit(larger, other_bpe, recipe.folder)
    rows, old_rows = larger.get_input_embeddings().weight, old.get_input_embeddings().weight
    fresh = other_bpe.get_vocab().keys() - bpe.get_vocab().keys()
    assert fresh
    for token in fresh:                             # the letters of a byte-level token spell its bytes
        pieces = bpe.encode(decoders.ByteLevel().decode([token]), add_special_tokens=False).ids
        torch.testing.assert_close(rows[other_bpe.token_to_id(token)], old_rows[pieces].mean(0))
    for token in ["<|endoftext|>", "e", "0"]:
        assert torch.equal(rows[other_bpe.token_to_id(token)], old_rows[bpe.token_to_id(token)])


def test_two_processes_share_steps_of_two_lengths_and_average_gradients_and_progress(recipe, tmp_path):
    """The script of two processes trains the model a little more, and then averages numbers that are known."""
    script = tmp_path / "both.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
        "import torch, train_embedded\n"
        "shapes, draw = [], train_embedded.draw_batch\n"
        "def draw_and_note(*arguments):\n"
        "    shapes.append(tuple((windows := draw(*arguments)).shape))\n"
        "    return windows\n"
        "train_embedded.draw_batch = draw_and_note\n"
        "train_embedded.main()\n"
        "rank, processes = train_embedded.rank_and_processes()\n"
        "gradients = [torch.full((2, 3), rank + 1.0), torch.tensor([10.0 * rank])]\n"
        "progress = train_embedded.average_over_processes(gradients, 0.5 + rank / 4)\n"
        f"torch.save((processes, progress, gradients, shapes), {str(tmp_path)!r} + f'/{{rank}}.pt')\n"
    )
    out = tmp_path / "model"
    options = [*SMALL.split(), "--steps", "3", "--dropout", "0.1", "--window", "64", "128", "--weights", recipe.folder]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    subprocess.run([*launch, "--out", out, "--mix", MIX, *options], check=True, capture_output=True, timeout=HANG)
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert (training["steps"], training["tokens_seen"]) == (3, 3 * 2 * 8 * 64)
    assert training["before"] == [recipe.training]
    verify(out)
    for rank in (0, 1):
        processes, progress, gradients, shapes = torch.load(tmp_path / f"{rank}.pt")
        assert shapes == [(8, 65), (4, 129), (8, 65)]       # windows with the token that follows
        assert (processes, progress) == (2, 0.625)
        assert gradients[0].tolist() == [[1.5] * 3] * 2 and gradients[1].tolist() == [5.0]


def test_weights_with_another_checksum_are_refused(tmp_path, monkeypatch):
    verify()
    folder = tmp_path / "embedded"
    shutil.copytree(PATH, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    digest = hashlib.sha256(weights).hexdigest()
    with pytest.raises(ValueError, match=rf"(?s)damaged: the SHA-256 of .* is {digest[:12]}.*install llmppl again"):
        verify(folder)
    monkeypatch.setattr(hf, "verify", lambda: verify(folder))
    with pytest.raises(ValueError, match="the weights of the embedded model are damaged"):
        CachedTransformer.from_pretrained(engine="transformers")
    (folder / "model.safetensors.sha256").write_bytes(b"")
    with pytest.raises(ValueError, match="the weights of the embedded model are damaged"):
        verify(folder)
