"""The engine of llama.cpp: the logits of plain forward passes, for any cached, shared, cut and evicted contexts.

The files hold the embedded model. The truth is a forward pass of transformers over each whole context.
"""

import ctypes
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from helpers.common import repetitions, slow
from helpers.fire import Interrupt
from helpers.gguf_files import byte_level, gemma3, mamba, write

from llmppl import CachedTransformer, Model, smc_steer
from llmppl.lm.embedded import PATH
from llmppl.lm.engines import llamacpp
from llmppl.lm.engines.llamacpp import LlamaCpp
from llmppl.testing import check_engine

pytest.importorskip("xllamacpp", reason="pip install 'llmppl-smc[llama-cpp]'")
pytest.importorskip("gguf", reason="pip install 'llmppl-smc[llama-cpp]'")
V = 4096
KINDS = {"F32": ("f32", 5e-5), "F16": ("f16", 0.1), "Q8_0": ("f32", 0.5), "Q4_0": ("f16", 0.5)}


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """Return a function that writes the file of each kind once."""
    folder = tmp_path_factory.mktemp("llamacpp")
    written = {}

    def file(kind="F32"):
        if kind not in written:
            written[kind] = write(folder / f"{kind}.gguf", model, byte_level(PATH, V), kind)
        return written[kind]

    return file


@pytest.fixture(scope="module")
def truth(model):
    """Return a function from ids to (V,) log-probabilities by a plain forward pass, each computed once."""
    known = {}

    def log_probs(ids):
        ids = tuple(ids)
        if ids not in known:
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
            known.update({ids[: n + 1]: row for n, row in enumerate(rows)})
        return known[ids]

    return log_probs


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def lasts(contexts):
    return [(i, len(ids)) for i, ids in enumerate(contexts)]


def distance(engine, truth, contexts, asked=None):
    """Return the largest difference of log-probabilities from the truth."""
    asked = lasts(contexts) if asked is None else asked
    rows = log_softmax(engine.forward(contexts, asked))
    assert rows.shape == (len(asked), V)
    return max(np.abs(row - truth(contexts[i][:n])).max() for row, (i, n) in zip(rows, asked, strict=True))


def held_is_consistent(engine):
    """Check that the contexts agree with the sequences and cells of llama.cpp."""
    held, last_place = engine._held, engine._library.c.llama_memory_seq_pos_max
    contexts = [each.ids for each in held]
    assert contexts == sorted(contexts) and not any(b.startswith(a) for a, b in itertools.pairwise(contexts))
    assert engine._tokens == len({ids[:n] for ids in contexts for n in range(4, len(ids) + 1, 4)}) <= engine.cells
    assert sorted([*(each.number for each in held), *engine._free]) == list(range(256))
    assert all(0 <= each.keep <= each.done == each.size for each in held)
    memory = ctypes.c_void_p(engine._memory)
    assert [last_place(memory, ctypes.c_int32(each.number)) for each in held] == [each.size - 1 for each in held]


def distinct(contexts):
    """Return the number of tokens of distinct contexts."""
    return len({tuple(ids[: n + 1]) for ids in contexts for n in range(len(ids))})


def grown(rng, contexts):
    """Return the contexts of the next round: most continue, some branch, some are new; none is a prefix of another."""
    new = []
    for ids in contexts:
        n = len(ids) if rng.random() < 0.7 else int(rng.integers(0, len(ids)))
        for _ in range(rng.integers(0, 3)):
            new.append(ids[:n] + rng.integers(5, V, rng.integers(1, 4)).tolist())
    new = new or [rng.integers(5, V, rng.integers(1, 30)).tolist()]
    return [ids for ids in new if not any(ids != other and other[: len(ids)] == ids for other in new)]


# --- the same logits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, most", [("F32", 5e-5), ("F16", 0.02), ("Q8_0", 1.0), ("Q4_0", 10.0)])
def test_log_probs_agree_with_a_plain_forward_pass(kind, most, files, truth):
    rng = np.random.default_rng(1)
    engine = LlamaCpp(files(kind))
    start = rng.integers(5, V, 20).tolist()
    contexts = [start[: rng.integers(1, 20)] + rng.integers(5, V, rng.integers(1, 9)).tolist() for _ in range(20)]
    assert distance(engine, truth, contexts) < most
    assert engine.tokens == distinct(contexts)
    assert engine.eos_ids == [0] and engine.max_length == 1024


@pytest.mark.parametrize("seed", range(repetitions(full=20, quick=3)))
@pytest.mark.parametrize("n_ctx", [256, 2048])
def test_random_rounds_agree_with_plain_passes_whatever_is_cached(seed, n_ctx, files, truth):
    rng = np.random.default_rng(seed)
    engine = LlamaCpp(files(), n_ctx=n_ctx, batch_size=int(rng.choice([8, 64, 512])))
    contexts = [rng.integers(5, V, 40).tolist()]
    for _ in range(15):
        before, contexts = contexts, grown(rng, contexts)[:12]
        asked = lasts(contexts) + [
            (i, int(rng.integers(1, len(ids)))) for i, ids in enumerate(contexts) if len(ids) > 1 and rng.random() < 0.3
        ]
        assert distance(engine, truth, contexts, asked) < 5e-5
        held_is_consistent(engine)
        if rng.random() < 0.5:
            engine.release([ids for ids in before if ids not in contexts])
        if rng.random() < 0.1:
            engine.clear()


def test_shared_tokens_run_once_and_cached_tokens_do_not_run_again(files, truth):
    engine = LlamaCpp(files())
    start = list(range(10, 50))
    contexts = [[*start, 7, 8], [*start, 7, 9, 10], [*start[:20], 5], [3, 4]]
    assert distance(engine, truth, contexts) < 5e-5 and engine.tokens == distinct(contexts)
    more = [[*ids, i] for ids in contexts for i in (60, 61)]
    assert distance(engine, truth, more) < 5e-5 and engine.tokens == distinct([*contexts, *more])
    before = engine.tokens
    assert distance(engine, truth, more, [*lasts(more), (0, 10), (0, 11), (0, 30)]) < 5e-5
    assert engine.tokens == before + len(more) + 3       # rows that are not kept: only their last tokens
    held_of = engine._tokens
    assert held_of == distinct(more)


def test_many_places_of_a_cached_context_run_one_token_each(files, model):
    engine, places = LlamaCpp(files()), range(2, 701, 2)                    # more of them than sequences
    ids = np.random.default_rng(3).integers(5, V, 700).tolist()
    engine.forward([ids], [(0, 700)])
    found = log_softmax(engine.forward([ids], [(0, n) for n in places]))
    with torch.no_grad():
        truth = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    assert np.abs(found - truth[np.array(places) - 1]).max() < 5e-5
    assert engine.tokens == 700 + 350


def test_more_contexts_than_sequences(files, model):
    engine = LlamaCpp(files())
    contexts = [[9, 8, 7, i] for i in range(5, 505)]
    for tokens in (503, 503 + 500 + 244):               # the last contexts are cached, and run first
        with torch.no_grad():
            truth = model(torch.tensor(contexts)).logits[:, -1].log_softmax(-1).numpy()
        assert np.abs(log_softmax(engine.forward(contexts, lasts(contexts))) - truth).max() < 5e-5
        assert engine.tokens <= tokens
        contexts = [[*ids, 6] for ids in contexts]


def test_a_full_cache_drops_released_contexts_then_the_least_recently_used(files, truth):
    engine = LlamaCpp(files(), n_ctx=256)
    long, old, new = [[i] * 80 for i in (5, 6, 7)]
    for ids in (long, old, new):
        engine.forward([ids], [(0, 80)])
    engine.release([new])
    assert distance(engine, truth, [[8] * 60]) < 5e-5 and engine.tokens == 300          # `new` makes room
    assert distance(engine, truth, [[*old, 9]]) < 5e-5 and engine.tokens == 301
    assert distance(engine, truth, [[4] * 100]) < 5e-5 and engine.tokens == 401         # `long` does
    assert distance(engine, truth, [[*old, 9, 10]]) < 5e-5 and engine.tokens == 402
    assert distance(engine, truth, [[*long, 9]]) < 5e-5 and engine.tokens == 402 + 81


def test_contexts_that_do_not_fit_together_run_one_after_the_other(files, truth):
    engine = LlamaCpp(files(), n_ctx=256)
    contexts = [[i] * 200 for i in range(5, 9)]
    assert distance(engine, truth, contexts) < 5e-5 and engine.tokens == 800
    assert distance(engine, truth, [[5] * 256], [(0, 256), (0, 255)]) < 5e-5
    assert distance(engine, truth, [[5] * 256]) < 5e-5           # and there is no cell to run its last token again
    with pytest.raises(ValueError, match="a context of 257 tokens does not fit into the cache: give n_ctx=257 or more"):
        engine.forward([[5] * 257], [(0, 257)])


def test_released_contexts_do_not_fill_the_cache(files, monkeypatch):
    monkeypatch.setattr(llamacpp, "_IDLE", 100)
    engine = LlamaCpp(files())
    engine.forward([[*range(5, 45)]], [(0, 40)])
    for i in range(20):
        ids = [*range(5, 45), *[i + 50] * 30]
        engine.forward([ids], [(0, 70)])
        engine.release([ids[:41]])
        assert engine._tokens <= 40 + 30 + 100
    engine.forward([[*range(5, 45), 7]], [(0, 41)])
    assert engine.tokens == 40 + 20 * 30 + 1            # unreleased contexts are cached


# --- under programs ---------------------------------------------------------------------------------------------------


class Words(Model):
    """Program whose tokens contain an "e" or are short."""

    def __init__(self, lm):
        super().__init__()
        self.context = lm.context("Once upon a time, there was a")

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.condition("e" in str(token) or len(str(token)) < 5)
        self.s += token
        self.context += token


class Ending(Model):
    """Program of texts that make an ending likely, by the probability of the ending after each token."""

    def __init__(self, lm):
        super().__init__()
        self.context, self.before = lm.context("The dog was"), 0.0

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.context += token
        self.s += token
        after = (self.context + " and they were happy.").log_prob_since(self.context)
        self.score(after - self.before)
        self.before = after


@pytest.fixture(scope="module")
def steered():
    """Return a function that steers each program once by transformers."""
    lms = [CachedTransformer.from_pretrained(engine="transformers") for _ in range(2)]
    return {program: steer(lm, program) for lm, program in zip(lms, (Words, Ending), strict=True)}


def steer(lm, program):
    run = smc_steer(program(lm), 6, 3, seed=1, max_steps=12)
    return sorted(map(str, run)), run.log_ml, lm.stats.tokens


@pytest.mark.parametrize("program", [Words, Ending])
def test_a_steering_run_agrees_with_transformers_at_the_same_cost(program, files, steered):
    texts, log_ml, tokens = steer(CachedTransformer.from_pretrained(files()), program)
    assert texts == steered[program][0] and log_ml == pytest.approx(steered[program][1], abs=1e-4)
    if program is Ending:                               # more is kept here of contexts with log-probabilities
        assert tokens < steered[program][2]
    else:
        assert tokens == steered[program][2]


@pytest.mark.parametrize("options", [{"n_ctx": 256}, {"cache_bytes": 1 << 16}, {"cache_type": "f16"}])
def test_a_steering_run_with_little_room_is_the_same(options, files, steered):
    texts, log_ml, _ = steer(CachedTransformer.from_pretrained(files(), **options), Words)
    assert texts == steered[Words][0] and log_ml == pytest.approx(steered[Words][1], abs=2e-3)


@pytest.mark.parametrize("kind", ["F32", *slow("F16", "Q8_0", "Q4_0")])
def test_the_engine_conforms(kind, files, model):
    cache_type, most = KINDS[kind]

    def reference(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].numpy()

    report = check_engine(
        LlamaCpp(files(kind), n_ctx=2048, cache_type=cache_type), reference if kind == "F32" else None,
        ids=range(300, 330), size=V, tolerance=most, contexts=repetitions(400, 270),
    )  # fmt: skip
    assert report.rows > 300 and report.tokens < report.whole / 2


# --- limits and faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_at_any_point_leaves_a_correct_engine(error, files, truth):
    files_of_ours = {llamacpp.__file__}
    rng = np.random.default_rng(5)
    rounds = [[rng.integers(5, V, 12).tolist() for _ in range(3)]]
    for _ in range(3):
        rounds.append(grown(rng, rounds[-1])[:5])
    engine = LlamaCpp(files(), n_ctx=256)

    def run():
        for contexts in rounds:
            engine.forward(contexts, lasts(contexts))
            engine.release(contexts[:1])

    counts = Interrupt(files_of_ours)
    with counts:
        run()
    lines = sorted(counts.seen)
    for line in lines if repetitions(1, 0) else [lines[i] for i in rng.permutation(len(lines))[:25]]:
        engine.clear()
        with Interrupt(files_of_ours, line, int(rng.integers(1, counts.seen[line] + 1)), error):
            run()
        engine.clear()
        assert distance(engine, truth, rounds[-1]) < 5e-5


def test_a_closed_or_collected_engine_is_freed(files, monkeypatch):
    freed = []
    monkeypatch.setattr(llamacpp, "_free", lambda process, c, context, model: freed.append((context, model)))
    engine = LlamaCpp(files())
    handles = engine._context, engine._model
    engine.close()
    engine.close()
    assert freed == [handles]
    with pytest.raises(ValueError, match="was closed"):
        engine.forward([[5]], [(0, 1)])
    engine = LlamaCpp(files())
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None and len(freed) == 2


def test_another_layout_is_refused(monkeypatch):
    fields = llamacpp.CONTEXT
    monkeypatch.setattr(llamacpp, "CONTEXT", {**fields, "n_batch": (8, "I", 2048)})
    with pytest.raises(ImportError, match="has 512 where n_batch was 2048.*pip install xllamacpp=="):
        llamacpp.library().block("context", llamacpp.CONTEXT)


def test_damaged_files_and_unknown_architectures_are_reported(files, model, tmp_path):
    harmed = {"empty": b"", "zip": b"PK\3\4 and more", "cut": files().read_bytes()[: files().stat().st_size // 2]}
    for name, data in harmed.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(ValueError, match=f"llama.cpp does not load .*{name}.gguf: .*It is damaged, or of an arch"):
            LlamaCpp(tmp_path / f"{name}.gguf")
    unknown = write(tmp_path / "unknown.gguf", model, byte_level(PATH, V), architecture="lama")
    with pytest.raises(ValueError, match="unknown model architecture: 'lama'"):
        LlamaCpp(unknown)
    spoiled = write(tmp_path / "nan.gguf", model, byte_level(PATH, V), spoiled="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match="does not load .*invalid data"):
        LlamaCpp(spoiled)


def test_a_model_with_sliding_windows_is_right_beyond_them(tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, sliding_window=8, query_pre_attn_scalar=16,
        initializer_range=0.3,
    )).float().eval()  # fmt: skip
    engine = LlamaCpp(gemma3(tmp_path / "gemma.gguf", model))

    def reference(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].numpy()

    contexts = repetitions(300, 40)
    check_engine(engine, reference, ids=range(5, 60), size=64, tolerance=0.02, contexts=contexts)  # GELU by a table


def test_a_model_with_recurrent_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot share the state of a model of architecture 'mamba', which is recur"):
        LlamaCpp(mamba(tmp_path / "mamba.gguf"))


def test_a_cache_that_cannot_share_prefixes_is_detected_at_loading(files, monkeypatch):
    monkeypatch.setattr(LlamaCpp, "_branch", lambda self, held, n: self._free.pop())
    with pytest.raises((ValueError, RuntimeError), match="contexts that share a prefix|llama.cpp gave up"):
        LlamaCpp(files())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache_type": "q8"}, "cache_type must be one of 'f32', 'f16', not 'q8'"),
        ({"n_ctx": 0}, "n_ctx must be"),
        ({"threads": 0}, "threads must be"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_invalid_options_are_reported(options, message, files):
    with pytest.raises(ValueError, match=message):
        LlamaCpp(files(), **options)


def test_nothing_is_printed(files, capfd):
    LlamaCpp(files()).close()
    assert capfd.readouterr() == ("", "")


def test_a_file_says_whether_its_weights_are_quantised(files):
    assert [LlamaCpp(files(kind)).quantised for kind in ("F32", "F16", "Q8_0", "Q4_0")] == [False, False, True, True]
