"""Memory: keys, values and distributions stay under the budget, and what nobody holds leaves."""

import gc
import warnings

import numpy as np
import pytest
import torch
from helpers.common import repetitions
from helpers.families import VOCAB, V, at, build, check_books, error_of, family_lm, model_of, nodes_of, together

from llmppl.constraints import Vocabulary
from llmppl.inference import SMC, smc_standard, smc_steer
from llmppl.inference.expansion import Copies, Distinct
from llmppl.inference.resampling import DownSample, ResampleBelow
from llmppl.lm.cache import NODE_OVERHEAD, ROW_OVERHEAD, SLOT_OVERHEAD, Node
from llmppl.lm.transformer import CachedTransformer, default_cache_bytes
from llmppl.models.model import Model

SLOT, ROW = 256 + SLOT_OVERHEAD, 4 * V + ROW_OVERHEAD                   # bytes, of "llama"


class Ramble(Model):
    """Text that goes on: every token but EOS, and a weight that makes resampling happen."""

    def __init__(self, lm, prompt):
        super().__init__()
        self.context = at(lm, prompt)
        self.mask = np.ones(V, dtype=bool)
        self.mask[list(lm.vocab.special_ids)] = False

    def step(self):
        token = self.sample(self.transformer(self.context).masked(self.mask))
        self.score(0.3 * (int(token) % 3))
        self.context = self.context + token


def toy_lm(function=lambda ids: [0.0] * V, **limits):
    """A function as a model, over the tokens of `families`."""
    return CachedTransformer(function, VOCAB, **limits)


def long_model():
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return build(config)


@pytest.mark.parametrize("how", ["steer", "standard"])
@pytest.mark.parametrize("slots, rows", [(350, 3), (700, 40), (3000, 200), (100_000, 10_000)])
def test_a_long_run_stays_under_its_budget(how, slots, rows):
    steps = 300 if how == "standard" and slots == 3000 else repetitions(300, 60)
    budget = slots * SLOT + rows * ROW
    lm = CachedTransformer(long_model(), VOCAB, cache_bytes=budget, max_batch_tokens=4096)
    watched = []

    def watch(step):
        if step.index % 20 == 0:
            check_books(lm)
        watched.append(lm.store.bytes)

    program = Ramble(lm, range(3, 33))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if slots == 350 else "error")
        if how == "steer":
            particles = smc_steer(program, 32, 2, seed=1, max_steps=steps, on_step=watch)
        else:
            particles = smc_standard(program, 32, seed=1, max_steps=steps, on_step=watch)
    assert len(particles) > 0 and len(watched) == steps
    assert max(watched) <= lm.store.peak_bytes <= budget
    assert error_of(lm, particles[0].context) <= 1e-4
    check_books(lm)


def test_a_recomputed_context_does_not_walk_to_its_root_every_token(monkeypatch):
    walked, read = [], []
    lm = toy_lm(lambda ids: read.append(list(ids)) or [0.0] * V)
    path = Node.path
    monkeypatch.setattr(Node, "path", lambda node: walked.append(node.depth) or path(node))
    contexts = [at(lm, [5, 6, 7]), at(lm, [5, 6, 8])]
    ids = [[5, 6, 7], [5, 6, 8]]
    for i in range(3, 23):
        together([context.log_probs for context in contexts])
        contexts, ids = [context + lm.vocab[i] for context in contexts], [each + [i] for each in ids]
    assert walked == [3, 3]
    assert read == [each[:n] for n in range(3, 23) for each in ids]


@pytest.mark.parametrize("expand", [Distinct(4, 2), Copies(4, 2), Copies(4)], ids=str)
def test_the_size_of_a_seed_does_not_grow_with_the_steps(expand):
    """numpy spawns a child of a child from the whole path to it, which takes time and memory at every step."""
    select = ResampleBelow(4, 1.0) if expand == Copies(4) else DownSample(4)
    run = SMC(Ramble(toy_lm(), [0]), expand, select, seed=0)
    run.run(max_steps=30)
    assert {len(p.chooser.rng.bit_generator.seed_seq.spawn_key) for p in run.particles} == {2}


@pytest.fixture
def free(monkeypatch):
    """Return a dict of the free bytes of CUDA devices."""
    free = {torch.device("cuda:0"): 40 << 30, torch.device("cuda:1"): 10 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 << 30))
    return free


@pytest.mark.parametrize(
    ("devices", "most"), [([None], 2), (["cpu"], 2), (["mps"], 2), (["cuda:0"], 20), (["cuda:0", "cuda:1", "cpu"], 5)]
)
def test_the_default_budget_is_half_of_the_least_free_memory_of_cuda(devices, most, free):
    assert default_cache_bytes([each and torch.device(each) for each in devices]) == most << 30
    assert toy_lm().store.budget == family_lm("llama").store.budget == 2 << 30


def test_an_engine_names_the_devices_of_all_its_layers():
    engine = family_lm("llama").engine
    assert engine.devices == {torch.device("cpu")}
    for layer, device in zip(engine.slab.layers, ("cpu", "meta"), strict=True):
        layer.keys = layer.values = torch.empty((1, 1, 1), device=device)
    engine.start(shares=False)
    assert engine.devices == {torch.device("cpu"), torch.device("meta")}


def test_processes_on_one_device_divide_its_free_memory(free, monkeypatch):
    device = torch.device("cuda:0")
    for share, most in [("0.5", 10 << 30), ("0.25", 5 << 30), ("1", 20 << 30), ("4", 20 << 30)]:
        monkeypatch.setenv("LLMPPL_DEVICE_SHARE", share)
        assert default_cache_bytes([device]) == most
    for share in ("half", "nan", "0", "-1", ""):
        monkeypatch.setenv("LLMPPL_DEVICE_SHARE", share)
        with pytest.raises(ValueError, match=f"variable LLMPPL_DEVICE_SHARE is '{share}'; a number such as 0.5"):
            default_cache_bytes([device])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon", "gemma3"])
def test_the_accounts_equal_the_existing_tensors_and_rows(name, dtype):
    lm = family_lm(name, dtype)
    contexts = [at(lm, [i, *range(4, 20)]) for i in range(3, 10)]
    together([context.log_probs for context in contexts])
    tensors = [tensor for layer in lm.engine.slab.layers for tensor in (layer.keys, layer.values)]
    assert len(tensors) == 4 and {tensor.shape[1] for tensor in tensors} == {len(lm.store.owners)}
    rows = sum(context.node.row.nbytes for context in contexts)
    slab = sum(t.numel() * t.element_size() for t in tensors)
    assert lm.store.bytes == slab + rows + SLOT_OVERHEAD * len(lm.store.owners) + ROW_OVERHEAD * 7
    assert rows == 7 * V * (8 if dtype == torch.float64 else 4)
    assert lm.store.slots_used == 7 * 17 and lm.store.rows_used == 7
    check_books(lm, contexts)


def test_a_growing_slab_keeps_its_contents():
    lm = family_lm("llama")
    contexts = [at(lm, [3, 4, 5])]
    for n in range(40):
        error_of(lm, contexts[-1])
        size = len(lm.store.owners)
        contexts += [at(lm, [3 + n, *range(10, 40)]), contexts[0] + lm.vocab[3 + n]]
        together([context.log_probs for context in contexts[-2:]])
        assert len(lm.store.owners) >= size
    assert lm.store.evictions == 0 and len(lm.store.owners) > 1000
    assert max(error_of(lm, context + 5) for context in contexts[:20]) <= 1e-4


def test_unreferenced_contexts_leave_the_trie_when_the_budget_is_full():
    lm = family_lm("llama", cache_bytes=40 * SLOT + 2 * ROW)
    prompt = at(lm, range(3, 13))
    prompt.log_probs()
    for i in range(3, 30):
        for j in range(3, 8):
            (prompt + lm.vocab[i] + lm.vocab[j]).log_probs()
    gc.collect()
    assert len(lm.trie) <= 41                           # slots may take the place of rows
    del prompt
    other = at(lm, range(20, 40))
    other.log_probs()
    other = at(lm, range(4, 45))
    other.log_probs()
    gc.collect()
    check_books(lm, [other])
    assert len(lm.trie) <= 41                           # slots may take the place of rows
    assert 3 not in [node.token for node in lm.trie.root.children]      # the first prompt is gone


def test_contexts_without_slot_or_row_leave_at_once():
    lm = family_lm("llama", cache_bytes=0)
    prompt = at(lm, range(3, 13))
    size = len(lm.trie)
    fork = prompt + lm.vocab[5] + lm.vocab[6]
    assert (size, len(lm.trie)) == (10, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fork.log_probs()
    del fork
    assert len(lm.trie) == size


def test_after_a_run_the_trie_holds_the_prompt_and_cached_contexts():
    lm = family_lm("llama", cache_bytes=30 * SLOT + 4 * ROW)
    prompt = at(lm, range(3, 13))
    smc_standard(Ramble(lm, range(3, 13)), 8, seed=0, max_steps=15)
    gc.collect()
    assert len(lm.trie) <= 10 + 30 + 4
    check_books(lm, [prompt])


def test_scoring_a_string_keeps_rows_only_for_contexts_without_slots():
    lm = family_lm("llama")
    start, end = at(lm, [3]), at(lm, range(3, 20))
    assert end.log_prob_since(start) < 0.0
    assert lm.store.slots_used == 16 and lm.store.rows_used == 1        # the last token is not read
    check_books(lm, [start, end])


def test_a_slab_grows_rarely_and_by_many_slots():
    """Each growth copies the slab, and each search for what to give up looks at every slot."""
    lm = family_lm("llama", cache_bytes=400 * SLOT)
    grown, searched, store = [], [], lm.store
    reserve, evict = lm.engine.reserve, store._evict
    lm.engine.reserve = lambda slots: grown.append(slots) or reserve(slots)
    store._evict = lambda wanted, keep: searched.append(wanted) or evict(wanted, keep)
    for n in range(900):                                # one token more each time
        context = at(lm, [3 + n % 40, 3 + n // 40])
        context.log_probs()
    assert len(store.owners) == 400 - 400 // 8 and len(grown) <= 10 and 0 < len(searched) <= 20
    check_books(lm, [context])


def test_the_least_recently_used_row_is_dropped_first():
    asked, vocab = [], Vocabulary([b"a", b"b", b"c", b"d", b"e", b""], eos_ids=[5])

    def function(ids):
        asked.extend(ids)
        return [0.0] * 6

    lm = CachedTransformer(function, vocab, cache_bytes=3 * (48 + ROW_OVERHEAD + NODE_OVERHEAD))
    contexts = [lm.context(letter) for letter in "abcde"]
    for i in (0, 1, 2, 0, 3, 1, 4, 0):                  # room for three: 1 goes for 3, 2 for 1, 0 for 4, 3 for 0
        contexts[i].log_probs()
    assert asked == [0, 1, 2, 3, 1, 4, 0]
    assert [context.node.row is not None for context in contexts] == [True, True, False, False, True]


def test_a_row_counts_with_the_nodes_that_it_alone_holds():
    size = 8 * V + ROW_OVERHEAD + 300 * NODE_OVERHEAD
    lm = toy_lm(cache_bytes=4 * size)
    for n in range(20):
        lm.at([n] + 299 * [5]).log_probs()
        assert lm.store.row_bytes == min(n + 1, 4) * size
    assert lm.store.peak_bytes == 4 * size and len(lm.trie) <= 5 * 300


def test_nodes_that_outlive_an_evicted_row_still_count():
    lm, rng = toy_lm(cache_bytes=20_000), np.random.default_rng(0)
    trunk = rng.integers(0, V, 60).tolist()
    for n in rng.integers(0, 60, 300):
        lm.at([*trunk[:n], *rng.integers(0, V, 4).tolist()]).log_probs()
        rows = [node.row for node in nodes_of(lm) if node.row is not None]
        size = sum(row.nbytes + ROW_OVERHEAD for row in rows) + NODE_OVERHEAD * len(lm.trie)
        assert size == lm.store.row_bytes <= 20_000


def test_a_row_larger_than_the_budget_is_not_kept():
    lm = CachedTransformer(model_of("llama"), Vocabulary([bytes([i]) for i in range(V)]), cache_bytes=ROW - 1)
    context = at(lm, [3, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error_of(lm, context) <= 1e-4
    assert lm.store.rows_used == 0
    check_books(lm, [context])
