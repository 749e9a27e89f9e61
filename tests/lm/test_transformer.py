"""Language models for users: loading, contexts, errors, drawings."""

import gc
import itertools
import operator
import os
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.common import ROOT, repetitions
from helpers.families import TRIE, VOCAB, build, error_of, family_lm, model_of, together, truth
from helpers.tokenizers import PROMPT, TEMPLATE, byte_level, chat_lm, llama, unigram
from huggingface_hub import utils as hub
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils import logging

from llmppl import ConstrainedText, Regex, beam_search, choose, enumerate_exact, generate, search, smc_steer
from llmppl.constraints import EOS, Vocabulary
from llmppl.lm import Engine, NextToken, SlotEngine
from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.engines import hf
from llmppl.lm.transformer import CachedTransformer
from llmppl.models.model import Model

SHARED = ROOT.parent / "shared"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def uniform(tokenizer):
    """Return an lm of a tokenizer, with a uniform model."""
    V = len(Vocabulary.from_tokenizer(tokenizer))
    return CachedTransformer(lambda ids: np.zeros(V), tokenizer)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_model_loads_silently_without_a_network():
    code = (
        "from llmppl import CachedTransformer; lm = CachedTransformer.from_pretrained(engine='transformers');"
        "print(lm.engine.slot_bytes > 0, lm.model.dtype, abs(sum(map(float, 2.718281828459045 ** lm.context('The')"
        ".log_probs())) - 1) < 1e-6)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("True torch.float32 True\n", "")


@pytest.fixture
def bars():
    """Yield a function that returns whether (transformers, the hub) show progress bars; afterwards both show them."""
    yield lambda: (logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled())
    logging.enable_progress_bar()
    logging.set_verbosity_warning()


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("name", [None, EMBEDDED], ids=["embedded", "folder"])
def test_a_local_model_loads_without_a_progress_bar_and_restores_the_setting(name, shown, bars, capfd):
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    CachedTransformer.from_pretrained(name, engine="transformers")
    assert bars() == (shown, shown) and capfd.readouterr().err == ""


def test_models_loaded_in_threads_equal_those_loaded_one_by_one(bars, capfd):
    truth = CachedTransformer.from_pretrained(engine="transformers").context("Once").log_probs()
    with ThreadPoolExecutor(4) as threads:
        for lm in threads.map(CachedTransformer.from_pretrained, [EMBEDDED] * repetitions(12, 6)):
            np.testing.assert_array_equal(lm.context("Once").log_probs(), truth)
    assert bars() == (True, True) and capfd.readouterr().err == ""


def test_progress_bars_are_shown_if_transformers_is_verbose(bars, capfd):
    logging.set_verbosity_info()
    CachedTransformer.from_pretrained(EMBEDDED)
    assert "Loading weights" in capfd.readouterr().err


def downloaded(cache, repository):
    """Return a folder with a model as a download from the hub leaves it."""
    place = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(EMBEDDED, place / "snapshots" / ("a" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)


@pytest.fixture
def asked(monkeypatch):
    """Return the list of `local_files_only` of each attempt; attempts that may use the hub find nothing there."""
    seen, tokenizer = [], hf.AutoTokenizer.from_pretrained

    def noted(*arguments, local_files_only, **options):
        seen.append(local_files_only)
        return tokenizer(*arguments, local_files_only=True, **options)

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", noted)
    return seen


def test_a_downloaded_model_is_loaded_silently_without_contacting_the_hub(asked, tmp_path, embedded, capfd):
    downloaded(tmp_path, "somebody/model")
    lm = CachedTransformer.from_pretrained("somebody/model", cache_dir=tmp_path)
    assert np.allclose(lm.context("Once").log_probs(), embedded.context("Once").log_probs(), atol=1e-5)
    assert asked == [True] and capfd.readouterr().err == ""


def test_an_unknown_model_gives_one_line_and_the_error_of_transformers(asked, tmp_path, capfd):
    with pytest.raises(OSError, match="We couldn't connect|nobody/no-such-model"):
        CachedTransformer.from_pretrained("nobody/no-such-model", cache_dir=tmp_path)
    assert asked == [True, False]
    assert capfd.readouterr().err == "llmppl: loading nobody/no-such-model from the hub\n"
    with pytest.raises(OSError, match="We couldn't connect|nobody/no-such-model"):
        CachedTransformer.from_pretrained("nobody/no-such-model", cache_dir=tmp_path, local_files_only=True)
    assert asked == [True, False, True]


def test_device_and_device_map_together_are_refused():
    with pytest.raises(ValueError, match="give device= .* or device_map= .*, not both"):
        CachedTransformer.from_pretrained(device="cpu", device_map="auto")


@pytest.mark.parametrize("options", [
    {"device": "cpu"}, {"device": torch.device("cpu")}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}},
    pytest.param({"device_map": "auto"}, marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="auto means the GPU here")),
], ids=str)  # fmt: skip
def test_every_placement_on_a_cpu_gives_the_same_answers(options, embedded):
    lm = CachedTransformer.from_pretrained(**options)
    assert lm.model.dtype == torch.float32 and lm.engine.slot_bytes == embedded.engine.slot_bytes
    text = "Once upon a time there was"
    assert np.allclose(lm.context(text).log_probs(), embedded.context(text).log_probs(), atol=1e-5)


@pytest.mark.parametrize("dtype, slot", [("float64", 2.0), (torch.float64, 2.0), ("bfloat16", 0.5), (None, 1.0)])
def test_dtype_applies_to_the_weights_and_the_cache(dtype, slot, embedded):
    lm = CachedTransformer.from_pretrained(dtype=dtype, engine="transformers")
    assert lm.model.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32)
    assert lm.engine.slot_bytes == slot * embedded.engine.slot_bytes
    difference = np.abs(np.exp(lm.context("The").log_probs()) - np.exp(embedded.context("The").log_probs())).max()
    assert difference < (0.05 if dtype == "bfloat16" else 1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device_map": "auto"}], ids=str)
def test_a_gpu_gives_the_same_answers(options, embedded):
    lm = CachedTransformer.from_pretrained(dtype="float32", **options)
    text = "Once upon a time there was"
    assert lm.model.device.type == "cuda" and lm.engine.slot_bytes > 0
    assert np.allclose(lm.context(text).log_probs(), embedded.context(text).log_probs(), atol=1e-3)


@pytest.mark.parametrize("tokenizer", [None, "gpt2", lambda text: [1]])
def test_an_invalid_tokenizer_is_refused(embedded, tokenizer):
    with pytest.raises(TypeError, match="tokenizer must be a transformers tokenizer or a Vocabulary, not"):
        CachedTransformer(embedded.model, tokenizer)


def test_half_a_character_that_has_no_bytes_is_refused_with_its_place(embedded):
    for make in (lambda: embedded.context("a\ud800"), lambda: embedded.context("a") + "b\ud800"):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            make()


def test_an_invalid_language_model_is_refused():
    with pytest.raises(TypeError, match="7 is no language model"):
        CachedTransformer(7, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base", "mistral_v3"])
def test_contexts_of_real_vocabularies_add_up(name):
    from transformers import AutoTokenizer

    if not (SHARED / "vocab" / name).is_dir():
        pytest.skip(f"the vocabulary of {name} is not here")
    lm = uniform(AutoTokenizer.from_pretrained(SHARED / "vocab" / name))
    for start, text in itertools.product(("The theory", "naïve", "日本"), (" of", " 日本語 🙂", "é\n\n  x", "<s>")):
        assert (lm.context(start) + text).text == start + text


# --- contexts ---------------------------------------------------------------------------------------------------------


def with_bos(tokenizer):
    """Return a tokenizer that puts its BOS before every text."""
    from tokenizers.processors import TemplateProcessing

    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def test_an_empty_prompt_is_BOS_or_an_error(embedded):
    lm = uniform(llama())
    (token,) = lm.context("").tokens
    assert int(token) == lm.tokenizer.bos_token_id and lm.context("") == lm.context() and lm.context("").text == ""
    assert uniform(byte_level()).context("").tokens == []           # a function reads it
    for ask in (family_lm("llama").context, embedded.at([]).log_probs):
        with pytest.raises(ValueError, match="an empty prompt needs a BOS token, as this model reads no empty context"):
            ask()


class Reads(Engine):
    """Engine that answers an empty context."""

    reads_empty = True

    def forward(self, contexts, asked):
        return np.stack([after(contexts[i][:n]) for i, n in asked])


def after(ids):
    return np.sin(np.arange(1, 4) * (1 + sum(ids)) + len(ids))


@pytest.mark.parametrize("model", [after, Reads()])
def test_programs_and_queries_of_an_empty_prompt_are_exact(model):
    lm = CachedTransformer(model, Vocabulary([b"a", b"b", b"<end>"], eos_ids=[2]))
    truth = {}
    for ids in itertools.chain.from_iterable(itertools.product([0, 1], repeat=n) for n in range(4)):
        rows = [np.asarray(after(ids[:n])) for n in range(len(ids) + 1)]
        logs = [row - np.log(np.exp(row).sum()) for row in rows]
        truth["".join("ab"[i] for i in ids)] = sum(log[i] for log, i in zip(logs, [*ids, 2], strict=True))
    program = ConstrainedText(lm, "", Regex("[ab]{0,3}"), end="eos")
    posterior = enumerate_exact(program)
    found = {str(particle): particle.log_weight for particle in posterior}
    assert found == pytest.approx(truth) and len(found) == 15
    assert smc_steer(program, 15, 3, seed=0).log_ml == pytest.approx(posterior.log_ml)
    assert {str(match): match.log_prob for match in search(lm, "[ab]{0,3}", end="eos")} == pytest.approx(truth)
    found = {(m.prefix, str(m)): m.log_joint for m in search(lm, "a?(b|ab)", prefix=["", "a"], end="eos")}
    parts = [("", "b"), ("", "ab"), ("", "aab"), ("a", "ab"), ("a", "aab")]
    assert found == pytest.approx({(prefix, text): truth[text] for prefix, text in parts})
    assert lm.context("ab").log_prob_since(lm.context("")) == pytest.approx(
        sum(lm.at(ids).log_probs()[i] for ids, i in [([], 0), ([0], 1)])
    )


def test_BOS_is_neither_added_to_nor_removed_from_an_encoding():
    lm = uniform(llama())
    assert lm.tokenizer.bos_token_id not in map(int, lm.context("the").tokens)
    lm = uniform(with_bos(llama()))
    context = lm.context("the")
    assert [int(i) for i in context.tokens] == lm.tokenizer.encode("the")
    assert int(context.tokens[0]) == lm.tokenizer.bos_token_id and context.text == "the"
    assert int(lm.context("").tokens[0]) == lm.tokenizer.bos_token_id and len(lm.context("")) == 1


@pytest.mark.parametrize("make", [byte_level, llama, unigram, lambda: with_bos(llama())],
                         ids=["byte-level", "llama", "unigram", "llama with BOS"])  # fmt: skip
def test_the_text_of_a_sum_is_the_sum_of_the_texts(make):
    lm = uniform(make())

    @settings(max_examples=repetitions(300, 30), derandomize=True)
    @given(UNICODE.filter(bool), st.lists(UNICODE, max_size=3))
    @example("the", [" cat", "é", "日本", "🙂"])
    @example(" ", [" ", "the", " the"])
    def check(start, texts):
        contexts = list(itertools.accumulate(texts, operator.add, initial=lm.context(start)))
        assert [each.text for each in contexts] == list(itertools.accumulate([start, *texts]))
        assert [len(each) for each in contexts] == [len(each.tokens) for each in contexts]

    check()


def test_a_character_split_over_tokens_comes_out_whole():
    lm = uniform(byte_level())
    by_byte = {data: lm.vocab[i] for i, data in enumerate(lm.vocab.tokens) if len(data) == 1}
    context = lm.context("the ")
    for byte in "🙂".encode():
        assert context.text.bytes + bytes([byte]) == (context + by_byte[bytes([byte])]).text.bytes
        context = context + by_byte[bytes([byte])]
    assert context.text == "the 🙂" and len(context) == len(lm.context("the ")) + 4


def test_contexts_are_immutable_and_equal_at_the_same_node():
    lm = family_lm("llama")
    context = lm.context("ABC")
    more = context + "D"
    assert context.text == "ABC" and len(context) == 3 and len(more) == 4
    assert more == lm.context("ABCD") and hash(more) == hash(lm.context("ABCD")) and more != context
    assert context + "" == context and context != "ABC"
    assert family_lm("llama").context("ABC") != context
    token = lm.vocab[5]
    assert (context + token) == (context + 5) == (context + np.int64(5))
    assert context + EOS == context + lm.vocab[2] and (context + EOS).text == "ABC"


def test_a_token_of_an_equal_vocabulary_is_the_same():
    context, equal = family_lm("llama").context("ABC"), Vocabulary(VOCAB.tokens, eos_ids=[2], special_ids=[0, 1])
    assert context + equal[5] == context + 5


OTHER = Vocabulary(VOCAB.tokens[:10])[5]


@pytest.mark.parametrize(
    ("ask", "error", "sentence"),
    [
        (lambda lm: lm.context([3, 4]), TypeError, r"text must be a str, not \[3, 4\]"),
        (lambda lm: lm.context("é"), ValueError, "no tokens of this vocabulary spell"),
        (lambda lm: lm.context("A") + OTHER, ValueError, "belongs to another vocabulary"),
        (lambda lm: lm.context("A") + 50, ValueError, "id 50 is not in this vocabulary"),
        (lambda lm: NextToken(lm.context("A")).log_prob(OTHER), ValueError, "belongs to another vocabulary"),
        (lambda lm: lm.context("ABC").log_prob_since(lm.context("ABD")), ValueError, "does not continue"),
        (lambda lm: lm.context("ABC").log_prob_since(lm.context("ABCD")), ValueError, "does not continue"),
        (lambda lm: lm.context("ABC").log_prob_since(lm.context("BC")), ValueError, "does not continue"),
    ],
)
def test_texts_and_tokens_that_do_not_fit_are_refused(ask, error, sentence):
    with pytest.raises(error, match=sentence):
        ask(family_lm("llama"))


def test_EOS_with_several_ids_must_be_named():
    lm = CachedTransformer(model_of("llama"), Vocabulary(VOCAB.tokens, eos_ids=[2, 3]))
    with pytest.raises(ValueError, match=r"context \+ EOS is ambiguous; add one of the eos ids \(2, 3\)"):
        lm.context("ABC") + EOS


# --- lengths ----------------------------------------------------------------------------------------------------------


def short_lm():
    config = TRIE["gpt2"]()
    config.n_positions = 6
    return CachedTransformer(build(config), VOCAB)


def test_a_prompt_longer_than_the_model_reads_is_an_error():
    lm = short_lm()
    with pytest.raises(ValueError, match="a context of 7 tokens, and the model reads at most 6"):
        lm.context("ABCDEFG")
    assert error_of(lm, lm.context("ABCDEF")) <= 1e-4
    assert len(lm.trie) == 6


def test_a_text_that_outgrows_the_model_is_an_error():
    lm = short_lm()
    full = lm.context("ABCDEF")
    beyond = full + "G"
    for ask in (beyond.log_probs, lambda: NextToken(beyond), lambda: (beyond + "H").log_prob_since(full)):
        with pytest.raises(ValueError, match="a context of 7 tokens, and the model reads at most 6: shorten"):
            ask()
    right = truth(lm, full.tokens)[int(beyond.tokens[-1])]
    assert abs(beyond.log_prob_since(full) - right) < 1e-4        # the last token need not be read


def test_generation_at_the_length_of_the_model_is_cut_with_a_warning():
    from llmppl.inference import smc_standard

    class Endless(Model):
        def __init__(self, lm):
            super().__init__()
            self.context = lm.context("ABC")

        def step(self):
            self.context = self.context + self.sample(self.transformer(self.context))

    with pytest.warns(UserWarning, match="step 5 .*a context of 7 tokens, and the model reads at most 6"):
        posterior = smc_standard(Endless(short_lm()), N=2, seed=0)
    assert all(particle.cut and len(particle.context) == 7 for particle in posterior)


def test_next_token_returns_one_object_while_it_lives():
    lm = family_lm("llama")
    program, context = Model(), lm.context("ABC")
    dist = program.transformer(context)
    assert context.next_token() is dist and lm.context("ABC").next_token() is dist
    assert isinstance(dist, NextToken) and (context + "D").next_token() is not dist
    gone = weakref.ref(dist)
    del dist
    assert gone() is None and np.isclose(np.exp(context.next_token().log_probs()).sum(), 1.0)


# --- drawings ---------------------------------------------------------------------------------------------------------


def test_the_trie_prints_its_size():
    lm = family_lm("llama")
    prompt = lm.context("ABC")
    together([prompt.log_probs])
    left, right = prompt + "D", prompt + "EF"
    together([left.log_probs])
    assert repr(lm.trie) == (
        "<Trie of 6 contexts: keys and values of 4 (0.1 MB), next-token rows of 2 (0.0 MB); 0.1 of 2147.5 MB>"
    )
    assert len(right) == 5


def test_every_object_has_an_informative_repr():
    lm = family_lm("llama")
    assert repr(lm) == "CachedTransformer(LlamaForCausalLM, Vocabulary(50 tokens, eos=2))"
    assert repr(lm.context("ABC")) == "Context('ABC')"
    assert repr(lm.context("ABC" * 20 + "DEFG")) == (
        "Context('ABCABCABCABCABCABCAB' ... 'BCABCABCABCABCABCABCABCABCDEFG')"
    )
    assert repr(lm.trie) == (
        "<Trie of 0 contexts: keys and values of 0 (0.0 MB), next-token rows of 0 (0.0 MB); 0.0 of 2147.5 MB>"
    )
    assert str(lm.stats).startswith("0 rounds, 0 rows, 0 tokens run, 0 cache hits; ")


# --- any function is an lm --------------------------------------------------------------------------------------------


def bigrams(ids):
    """Return logits: after an a, b is three times as likely as a or the end; after a b, the end is certain."""
    return np.log([1.0, 3.0, 1.0]) if not ids or ids[-1] == 0 else [-np.inf, -np.inf, 0.0]


def test_any_function_from_token_ids_to_logits_is_a_language_model():
    lm = CachedTransformer(bigrams, Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    assert np.allclose(np.exp(lm.context("aa").log_probs()), [0.2, 0.6, 0.2])
    assert np.allclose(np.exp(lm.context("ab").log_probs()), [0, 0, 1])
    assert np.isclose(np.exp(NextToken(lm.context("a")).string().log_prob("ab")), 0.2 * 0.6)
    assert NextToken(lm.context("a")).string().log_prob([1, 0]) == -np.inf
    assert NextToken(lm.context("ab")).log_prob(EOS) == 0.0
    assert not isinstance(lm.engine, SlotEngine) and lm.engine.max_length is None
    assert lm.context("aab").text == "aab" and lm.context("a") + EOS == lm.context("a") + 2


def test_a_function_runs_once_for_each_needed_context():
    asked = []

    def function(ids):
        asked.append(tuple(ids))
        return bigrams(ids)

    lm = CachedTransformer(function, Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    together([lm.context(text).log_probs for text in ("a", "aa", "a", "aab", "b")])
    together([lm.context(text).log_probs for text in ("a", "aa", "ba")])
    assert sorted(asked) == [(0,), (0, 0), (0, 0, 1), (1,), (1, 0)]


def test_a_function_may_return_torch_tensors():
    lm = CachedTransformer(lambda ids: torch.tensor([0.0, 0.0, -torch.inf]), Vocabulary([b"a", b"b", b"c"]))
    assert np.allclose(np.exp(lm.context("a").log_probs()), [0.5, 0.5, 0])


@pytest.mark.parametrize("logits", [[0.0] * 2, [0.0] * 7, [[0.0] * 3], 0.0])
def test_a_function_that_returns_a_wrong_number_of_logits_is_refused(logits):
    lm = CachedTransformer(lambda ids: logits, Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    with pytest.raises(ValueError, match=r"shape \(.*\) after the tokens \[0\].* each of the 3 tokens"):
        lm.context("a").log_probs()


@pytest.mark.parametrize("x", [0.0, 1e6, -1e9, 1e15, -1e17, 1e300])
def test_probabilities_add_up_to_one_however_large_the_logits_are(x):
    lm = CachedTransformer(lambda ids: np.array([x, x, x]), Vocabulary([b"a", b"b", b""], eos_ids=[2]))
    assert np.allclose(np.exp(lm.context("a").log_probs()), 1 / 3)
    assert np.isclose(lm.context("aba").log_prob_since(lm.context("a")), -2 * np.log(3))


# --- ends -------------------------------------------------------------------------------------------------------------


def two_ends():
    """Return a tokenizer with the special tokens <eos> and <turn>; <eos> is its eos token."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return tokenizer, tokenizer.convert_tokens_to_ids("<turn>")


def test_extra_eos_ids_join_the_named_ones():
    tokenizer, turn = two_ends()
    V = len(tokenizer)
    assert CachedTransformer(lambda ids: np.zeros(V), tokenizer).vocab.eos_ids == (tokenizer.eos_token_id,)
    lm = CachedTransformer(lambda ids: np.zeros(V), tokenizer, eos_ids=[turn])
    assert lm.vocab.eos_ids == tuple(sorted({tokenizer.eos_token_id, turn}))
    lm = CachedTransformer.from_pretrained(eos_ids=[0])
    assert lm.vocab.eos_ids == (0,)


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        (["<turn>"], TypeError, "each of eos_ids must be an integer, not '<turn>'"),
        ([10**6], ValueError, "eos_ids: 1000000 is the id of no special token"),
        ([5], ValueError, r"eos_ids: 5 is the id of no special token, .*: give stop=\.\.\. to a ready-made program"),
    ],
)
def test_an_id_that_cannot_end_a_text_is_refused_as_eos(ids, error, said):
    with pytest.raises(error, match=said):
        CachedTransformer(lambda ids: [0.0], two_ends()[0], eos_ids=ids)


def test_a_vocabulary_has_its_own_ends():
    with pytest.raises(ValueError, match="a Vocabulary has eos_ids of its own"):
        CachedTransformer(lambda ids: [0.0, 0.0], Vocabulary([b"a", b"b"]), eos_ids=[1])


# --- chat -------------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "the end?"}
BEGUN = {"role": "assistant", "content": "the"}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([USER], {}, "user: the end?\nassistant:"),
        ("the end?", {}, "user: the end?\nassistant:"),
        (iter([USER]), {}, "user: the end?\nassistant:"),
        ("Hi", {"system": "Be kind."}, "system: Be kind.\nuser: Hi\nassistant:"),
        ([USER, BEGUN], {}, "user: the end?\nassistant: the"),
        ([USER, BEGUN, USER], {}, "user: the end?\nassistant: the\nuser: the end?\nassistant:"),
        ([USER, BEGUN], {"add_generation_prompt": True}, "user: the end?\nassistant: the\nassistant:"),
        ([USER, BEGUN], {"continue_final_message": False}, "user: the end?\nassistant: the\nassistant:"),
        ([USER], {"continue_final_message": True}, "user: the end?"),
        ([USER], {"add_generation_prompt": False}, "user: the end?\n"),
        ([USER], {"chat_template": PROMPT}, "assistant:"),
    ],
)
def test_a_conversation_is_encoded_by_the_template_up_to_the_answer(messages, options, expected):
    context = chat_lm().chat(messages, **options)
    assert context.text == expected
    assert (context + " yes").text == expected + " yes"


def test_options_of_the_template_are_passed_and_others_refused():
    reads = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
    reads += "{% for tool in tools or [] %}{{ tool.function.name }}{% break %}{% endfor %}"
    reads += "{%- generation -%}.{% endgeneration %}{% set shown = namespace(n=2) %}{{ shown.n }}"
    lm, tool = chat_lm(reads), {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    end = "user: Hi\nassistant:"
    assert lm.chat("Hi").text == end + ".2"
    assert lm.chat("Hi", enable_thinking=False, tools=[tool]).text == end + "nonelook.2"
    with pytest.raises(TypeError, match="by this template, takes no enable_thinkin: did you mean enable_thinking"):
        lm.chat("Hi", enable_thinkin=False)
    with pytest.raises(TypeError, match="takes no tools: it takes add_generation_prompt, chat_tem"):
        chat_lm().chat("Hi", tools=[tool])
    with pytest.raises(TypeError, match="chat, by this template, takes no max_length: it takes "):
        lm.chat("Hi", max_length=3)
    with pytest.raises(TypeError, match="takes no sytem: did you mean system?"):
        lm.chat("Hi", sytem="Be kind.")


@pytest.mark.parametrize("make", [byte_level, lambda: Vocabulary([b"a", b"b"])], ids=["tokenizer", "vocabulary"])
def test_chat_without_a_template_raises_with_a_remedy(make):
    tokenizer = make()
    lm = CachedTransformer(lambda ids: [0.0], tokenizer)
    with pytest.raises(ValueError, match=r"no chat template.*: write the conversation out and use context\(text\)"):
        lm.chat("the")
    if isinstance(tokenizer, Vocabulary):
        with pytest.raises(ValueError, match="no chat template"):
            lm.chat("the", chat_template=TEMPLATE)
    else:
        assert lm.chat("the", chat_template=TEMPLATE).text == "user: the\nassistant:"


STRICT = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% if not loop.last or message['role'] == 'user' %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "options", "error", "said"),
    [
        (TEMPLATE, ["Hi"], {}, TypeError, "messages must be a str or a list of dicts such as .*, not of 'Hi'"),
        (TEMPLATE, USER, {}, TypeError, r"messages must be a str or a list of dicts such as \{'role': 'user'"),
        (TEMPLATE, [], {}, TypeError, r"messages must be a str or a list of dicts such as .*, not of \[\]"),
        (TEMPLATE, [{"content": "Hi"}], {}, TypeError, r"not of \{'content': 'Hi'\}"),
        (TEMPLATE, [USER, {"role": "user"}], {}, TypeError, r"not of \{'role': 'user'\}"),
        (TEMPLATE, "Hi", {"system": 3}, TypeError, "system must be a str, not 3"),
        (STRICT, "Hi", {"system": "x"}, ValueError, "refuses this conversation: System role not supported"),
        (STRICT, [USER, BEGUN], {}, ValueError, "refuses this conversation: "),
    ],
)  # fmt: skip
def test_an_invalid_conversation_is_refused_with_the_reason(template, messages, options, error, said):
    with pytest.raises(error, match=said):
        chat_lm(template).chat(messages, **options)


USES = {
    "a run": lambda lm: smc_steer(ConstrainedText(lm, "Once", Regex(" [a-z]+"), max_tokens=3), 3, 2, seed=0),
    "beams": lambda lm: beam_search(ConstrainedText(lm, "Once", Regex(" [a-z]+"), max_tokens=3), 2, 2),
    "a text": lambda lm: str(lm("Once", Regex(" [a-z]{2}"), seed=0)),
    "several": lambda lm: [*generate(lm, ["Once", "The"], Regex(" [a-z]{2}"), seed=0)],
    "a choice": lambda lm: str(choose(lm, "Once", [" upon", " a"])),
}


@pytest.mark.parametrize("use", USES)
def test_the_last_reference_to_a_language_model_frees_it(use):
    USES[use](CachedTransformer.from_pretrained(engine="transformers"))     # imports may leave cycles
    gc.collect()
    gc.disable()
    try:
        lm = CachedTransformer.from_pretrained(engine="transformers")
        USES[use](lm)
        kept = weakref.ref(lm), weakref.ref(lm.engine), weakref.ref(lm.trie)
        del lm
        assert [each() for each in kept] == [None, None, None]
    finally:
        gc.enable()
