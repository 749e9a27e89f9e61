"""Memory: keys, values and distributions stay under the budget, and what nobody holds leaves."""

import functools
import warnings

import numpy as np
import pytest
import torch
from helpers.common import repetitions
from helpers.families import VOCAB, V, at, build, check_books, error_of, family_lm, nodes_of, together
from transformers import LlamaConfig

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


LONG = LlamaConfig(
    vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
RUNS = {
    "steer": functools.partial(smc_steer, N=32, K=2, seed=1),
    "standard": functools.partial(smc_standard, N=32, seed=1),
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("slots, rows", [(350, 3), (3000, 200), (100_000, 10_000)])
def test_a_long_run_stays_under_its_budget(how, slots, rows):
    steps = repetitions(300, 120 if how == "standard" and slots == 3000 else 60)        # or the slots suffice
    budget = slots * SLOT + rows * ROW
    lm = CachedTransformer(build(LONG), VOCAB, cache_bytes=budget, max_batch_tokens=4096)
    watched = []

    def watch(step):
        if step.index % 20 == 0:
            check_books(lm)
        watched.append(lm.store.bytes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if slots == 350 else "error")
        particles = RUNS[how](Ramble(lm, range(3, 33)), max_steps=steps, on_step=watch)
    assert len(particles) > 0 and len(watched) == steps
    assert max(watched) <= lm.store.peak_bytes <= budget
    assert error_of(lm, particles[0].context) <= 1e-4
    check_books(lm)


def test_a_recomputed_context_does_not_walk_to_its_root_every_token(monkeypatch):
    walked, read = [], []
    lm = CachedTransformer(lambda ids: read.append(list(ids)) or [0.0] * V, VOCAB)
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
    run = SMC(Ramble(CachedTransformer(lambda ids: [0.0] * V, VOCAB), [0]), expand, select, seed=0)
    run.run(max_steps=30)
    assert {len(p.chooser.rng.bit_generator.seed_seq.spawn_key) for p in run.particles} == {2}


@pytest.fixture
def free(monkeypatch):
    """Return a dict of the free bytes of CUDA devices."""
    free = {torch.device("cuda:0"): 40 << 30, torch.device("cuda:1"): 10 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 << 30))
    return free


@pytest.mark.parametrize("devices, share, most", [
    ([None], None, 2), (["cpu"], None, 2), (["mps"], None, 2), (["cuda:0"], None, 20),
    (["cuda:0", "cuda:1", "cpu"], None, 5), (["cuda:0"], "0.5", 10), (["cuda:0"], "1", 20), (["cuda:0"], "4", 20),
])  # fmt: skip
def test_the_default_budget_is_half_of_the_least_free_memory_of_cuda(devices, share, most, free, monkeypatch):
    """In GiB. Processes that share a device divide its free memory."""
    if share is not None:
        monkeypatch.setenv("LLMPPL_DEVICE_SHARE", share)
    assert default_cache_bytes([each and torch.device(each) for each in devices]) == most << 30


@pytest.mark.parametrize("share", ["half", "nan", "0", "-1", ""])
def test_an_invalid_share_of_a_device_is_named(share, free, monkeypatch):
    monkeypatch.setenv("LLMPPL_DEVICE_SHARE", share)
    with pytest.raises(ValueError, match=f"variable LLMPPL_DEVICE_SHARE is '{share}'; a number such as 0.5"):
        default_cache_bytes([torch.device("cuda:0")])


def test_an_engine_names_the_devices_of_all_its_layers():
    lm = family_lm("llama")
    engine = lm.engine
    assert engine.devices == {torch.device("cpu")} and lm.store.budget == 2 << 30
    for layer, device in zip(engine.slab.layers, ("cpu", "meta"), strict=True):
        layer.keys = layer.values = torch.empty((1, 1, 1), device=device)
    engine.start(shares=False)
    assert engine.devices == {torch.device("cpu"), torch.device("meta")}


def test_a_growing_slab_keeps_its_contents():
    lm = family_lm("llama")
    contexts = [at(lm, [3, 4, 5])]
    for n in range(40):
        contexts += [at(lm, [3 + n, *range(10, 40)]), contexts[0] + lm.vocab[3 + n]]
        together([context.log_probs for context in contexts[-2:]])
    assert lm.store.evictions == 0 and len(lm.store.owners) > 1000
    assert max(error_of(lm, context + 5) for context in contexts[:20]) <= 1e-4


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


def test_rows_count_with_nodes_that_they_alone_hold_or_outlive():
    lm, rng = CachedTransformer(lambda ids: [0.0] * V, VOCAB, cache_bytes=20_000), np.random.default_rng(0)
    trunk = rng.integers(0, V, 60).tolist()
    for n in rng.integers(0, 60, 300):
        lm.at([*trunk[:n], *rng.integers(0, V, 4).tolist()]).log_probs()
        rows = [node.row.nbytes + ROW_OVERHEAD for node in nodes_of(lm) if node.row is not None]
        assert sum(rows) + NODE_OVERHEAD * len(lm.trie) == lm.store.row_bytes <= 20_000


def test_nodes_under_a_row_count_while_they_have_no_slot():
    lm = family_lm("llama")
    context = at(lm, [3, 4, 5, 6])
    context.log_probs()
    before = lm.store.row_bytes
    lm.store._evict(99, keep=[])
    assert lm.store.row_bytes == before + 4 * NODE_OVERHEAD
    (context + 7).log_probs()
    check_books(lm, [context])
