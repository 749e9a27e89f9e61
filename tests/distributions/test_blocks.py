"""Sums over blocks against numpy, draws against probabilities, and rows that stay on a device."""

import copy
import functools
import math
import weakref

import numpy as np
import pytest
import torch
from helpers.common import repetitions
from helpers.families import family_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from llmppl import (
    EOS,
    CachedTransformer,
    ConstrainedText,
    Model,
    PromptIntersection,
    Regex,
    Rule,
    Vocabulary,
    product,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import BLOCK, ArrayTable, Finite, PutTable, read_blocks
from llmppl.inference import SMC, Copies, Distinct, DownSample, ResampleBelow
from llmppl.lm.device import DeviceTable
from llmppl.lm.engines import hf
from llmppl.lm.engines.hf import Adapted

SIZES = st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])


def summed(log_weights):
    """Return the (number of blocks,) sums by numpy alone."""
    starts = range(0, len(log_weights), BLOCK)
    return np.array([np.logaddexp.reduce(log_weights[start : start + BLOCK]) for start in starts])


@st.composite
def arrays(draw):
    """Yield (n,) log-weights of very different sizes, some -inf, and a mask or None."""
    n, seed = draw(SIZES), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 2000.0]))
    array = (rng.normal(size=n) * spread).astype(draw(st.sampled_from([np.float32, np.float64])))
    array[rng.random(n) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -np.inf
    share = draw(st.sampled_from([None, 0.0, 0.02, 0.5, 1.0]))
    return array + draw(st.sampled_from([0.0, 700.0])), None if share is None else rng.random(n) < share


@given(arrays())
@settings(max_examples=repetitions(400, 80))
def test_a_table_gives_the_log_weights_and_their_sums(case):
    array, mask = case
    base = table = ArrayTable(array)
    if mask is not None:
        table = table.masked(mask)
    truth = array.astype(np.float64)
    truth = truth if mask is None else np.where(mask, truth, -np.inf)
    np.testing.assert_array_equal(table.whole(), truth)
    np.testing.assert_allclose(table.log_sums, summed(truth), rtol=1e-12, atol=1e-9)
    assert table.log_total == pytest.approx(np.logaddexp.reduce(truth), rel=1e-12, abs=1e-9)
    blocks = np.arange(len(table.log_sums))[::-1]
    padded = np.append(truth, np.full(-len(truth) % BLOCK, -np.inf)).reshape(-1, BLOCK)
    np.testing.assert_array_equal(table.read(blocks), padded[::-1])
    assert [table.at(i) for i in range(min(20, len(truth)))] == truth[:20].tolist()
    np.testing.assert_array_equal(table.whole(2.5), truth - 2.5)
    np.testing.assert_allclose(base.log_sums, summed(array.astype(np.float64)), rtol=1e-12, atol=1e-9)


def test_blocks_of_several_tables_are_read_in_the_requested_order():
    rng = np.random.default_rng(0)
    arrays = [np.full(3 * BLOCK, -np.inf) for _ in range(3)]
    arrays[0][:3], arrays[1][:700], arrays[2][:257] = (rng.normal(size=n) for n in (3, 700, 257))
    tables = [ArrayTable(arrays[0][:3]), ArrayTable(arrays[1][:700]), ArrayTable(arrays[2][:257])]
    rows, blocks = np.array([1, 0, 2, 1, 1]), np.array([2, 0, 1, 0, 2])
    truth = np.array(arrays).reshape(3, 3, BLOCK)[rows, blocks]
    np.testing.assert_array_equal(read_blocks(tables, rows, blocks), truth)


FAR = np.zeros(600)
FAR[[5, 599]] = -2000.0, -2001.0
FEW = np.isin(np.arange(600), [5, 599])


@pytest.mark.parametrize("mask", [FEW, FEW | (np.arange(600) % 2 == 0) & (FAR < 0)])
def test_allowed_values_survive_neighbours_heavier_by_e_to_the_2000(mask):
    """Check one block and several blocks: no sum is rounded to 0."""
    dist = Finite(range(600), FAR).masked(mask)
    assert dist.log_prob(5) == pytest.approx(-math.log1p(math.exp(-1.0)))
    assert dist.log_prob(599) == pytest.approx(-1.0 - math.log1p(math.exp(-1.0)))
    dense = np.ones(600, dtype=bool)
    dense[:256] = FAR[:256] < 0                         # one value in the first block, and all of the others
    dist = Finite(range(600), np.where(np.arange(600) < 256, FAR, -1990.0)).masked(dense)
    assert dist.log_prob(5) == pytest.approx(-10.0 - math.log(344 + math.exp(-10.0)))


def test_draws_have_their_probabilities_in_every_block_and_inside():
    n, draws = 700, repetitions(200_000, 20_000)
    rng = np.random.default_rng(1)
    weights = rng.gamma(0.2, size=n)
    dist = Finite(range(n), np.log(weights)).masked(rng.random(n) < 0.6)
    probs = np.exp(dist.log_probs())
    found = np.bincount([dist.sample(rng) for _ in range(draws)], minlength=n)
    assert found[probs == 0.0].sum() == 0
    large = probs * draws >= 10
    z = (found - probs * draws)[large] / np.sqrt(probs * (1 - probs) * draws)[large]
    assert np.abs(z).max() < 4.8                        # of at most 700, each beyond 4.8 sigma with probability 1.6e-6
    chi_square = float((z**2).sum())
    assert chi_square < large.sum() + 5 * math.sqrt(2 * large.sum())


def test_equal_masks_share_a_distribution_and_a_changed_mask_makes_another():
    dist = Finite(range(600), np.random.default_rng(0).normal(size=600))
    mask = np.arange(600) % 3 == 0
    first = dist.masked(mask)
    assert dist.masked(mask) is first and dist.masked(mask.copy()) is first
    before, total = first.log_probs().copy(), first.log_total()
    mask[1] = True
    second = dist.masked(mask)
    assert second is not first and second.log_total() > total
    np.testing.assert_array_equal(dist.masked(np.arange(600) % 3 == 0).log_probs(), before)


# ---- on a device: the device is a CPU here, and nothing else is otherwise


def kept(lm: CachedTransformer) -> CachedTransformer:
    """Return the lm with its rows kept as tensors."""
    lm.engine.keeps_rows = True
    return lm


@functools.cache
def large_model(V):
    config = LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def large_lm(V, **limits):
    tokens = [*(f"{i:x}.".encode() for i in range(V - 1)), b""]
    return CachedTransformer(large_model(V), Vocabulary(tokens, eos_ids=[V - 1]), **limits)


def half(vocab, seed):
    mask = np.random.default_rng(seed).random(len(vocab)) < 0.5
    mask[-1] = False
    return mask


def masks(vocab):
    """Return a mask function with two masks."""
    both = half(vocab, 0), half(vocab, 1)
    for mask in both:
        mask.setflags(write=False)
    return lambda text: both[len(text) % 2]


@pytest.mark.parametrize("V", [200, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", ["half", "one", "none", "all"])
def test_a_row_on_a_device_is_the_row_of_numpy(V, dtype, masked):
    make = functools.partial(CachedTransformer, copy.deepcopy(large_model(V)).to(dtype), large_lm(V).vocab)
    here, there = (lm.at([3, 5, V // 2]).next_token() for lm in (make(), kept(make())))
    assert isinstance(there.table(), DeviceTable) and isinstance(here.table(), ArrayTable)
    mask = {"half": half(here.support, 2), "one": np.arange(V) == 7, "none": np.arange(V) < 0, "all": np.arange(V) < V}
    a, b = here.masked(mask[masked]), there.masked(mask[masked])
    np.testing.assert_allclose(b.table().log_sums, a.table().log_sums, atol=1e-10)
    np.testing.assert_allclose(b.log_probs(), a.log_probs(), atol=1e-10)
    assert [*map(b.log_prob, (0, 7, V - 1))] == pytest.approx([*map(a.log_prob, (0, 7, V - 1))])
    twice = np.arange(V) % 3 == 0
    np.testing.assert_allclose(b.masked(twice).log_probs(), a.masked(twice).log_probs(), atol=1e-10)
    seeds = range(20 if mask[masked].any() else 0)
    draws = [[dist.sample(np.random.default_rng(seed)) for seed in seeds] for dist in (a, b)]
    assert draws[0] == draws[1]


class Where(Model):
    def __init__(self, lm, prompt):
        super().__init__()
        self.context = lm.context(prompt)

    def step(self):
        token = self.sample(self.transformer(self.context).where(lambda token: int(token) % 3 != 1))
        if token == EOS or len(self.context) > 8:
            return self.finish()
        self.context += token
        self.observe(self.transformer(self.context).string(), "AB")


PROGRAMS = {
    "plain": lambda lm: ConstrainedText(lm, "ABC", max_tokens=5),
    "mask": lambda lm: ConstrainedText(lm, "ABC", mask=masks(lm.vocab), max_tokens=5),
    "regex": lambda lm: ConstrainedText(lm, "ABC", Regex("[A-F]{2,8}"), max_tokens=5),
    "temperature": lambda lm: ConstrainedText(lm, "ABC", Regex("[A-F]{2,8}"), max_tokens=5, rule=Rule(temperature=0.7)),
    "product": lambda lm: PromptIntersection(lm, ["ABC", "B"], max_tokens=4),
    "where": lambda lm: Where(lm, "ABC"),
}
ALGORITHMS = {
    "steer": lambda model: smc_steer(model, 6, 3, seed=1),
    "copies": lambda model: smc_steer(model, 6, 3, seed=1, expand="copies"),
    "standard": lambda model: smc_standard(model, 6, seed=1),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_on_a_device_give_the_same_particles(program, algorithm):
    runs = [ALGORITHMS[algorithm](PROGRAMS[program](lm)) for lm in (family_lm("llama"), kept(family_lm("llama")))]
    texts, weights = [], []
    for run in runs:                                    # by text, since equal weights differ by rounding
        particles = sorted(zip(map(str, run), run.log_weights.tolist(), strict=True))
        texts.append([text for text, _ in particles])
        weights.append([weight for _, weight in particles])
    assert texts[0] == texts[1]
    np.testing.assert_allclose(*weights, atol=1e-9)
    assert runs[0].stats.tokens == runs[1].stats.tokens and runs[0].stats.rounds == runs[1].stats.rounds
    assert runs[0].stats.bytes_to_host == 0 < runs[1].stats.bytes_to_host


@pytest.mark.parametrize(("algorithm", "most"), [("steer", 1_000_000), ("standard", 250_000)])
def test_masked_sampling_copies_few_bytes_to_the_host(algorithm, most):
    """Check at V = 128,256 and N = 32, where the rows of a round are 16.4 MB."""
    V, N, steps = 128_256, 32, 3
    lm = kept(large_lm(V))
    model = ConstrainedText(lm, lm.at([1, 2]), mask=masks(lm.vocab), max_tokens=steps)
    run = smc_steer(model, N, 3, seed=0) if algorithm == "steer" else smc_standard(model, N, seed=0)
    stats = run.stats
    assert stats.rows > N * (steps - 1) and 0 < stats.bytes_to_host / stats.rounds < most


def test_reading_a_whole_distribution_gives_numpy_and_counts_the_copy():
    lm = kept(large_lm(1000))
    dist = lm.at([1, 2]).next_token()
    dist.table()
    before = lm.stats.bytes_to_host
    assert isinstance(dist.log_probs(), np.ndarray)
    assert lm.stats.bytes_to_host - before == 1000 * 4
    assert product(dist, dist).log_probs().shape == (1000,)


class Launches(TorchDispatchMode):
    """Counter of operations that are no views, and of the most bytes that their results held at a time."""

    def __init__(self):
        super().__init__()
        self.count, self.peak, self.held = 0, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        view = function.is_view or function is torch.ops.aten.detach.default
        if not view:
            self.count += 1
        if isinstance(made, torch.Tensor) and not view and made not in [each for each in args if each is made]:
            key = id(made)
            self.held[key] = made.numel() * made.element_size()
            weakref.finalize(made, self.held.pop, key, None)
            self.peak = max(self.peak, sum(self.held.values()))
        return made


def launches_of_a_string(n):
    """Return the number of operations of a string of n tokens, after checking its log-probability."""
    lm, truth = kept(large_lm(200)), large_lm(200)
    start, end = lm.at([1]), lm.at([1, *range(2, 2 + n)])
    with Launches() as launches:
        found = end.log_prob_since(start)
    assert found == pytest.approx(truth.at([1, *range(2, 2 + n)]).log_prob_since(truth.at([1])), abs=1e-5)
    return launches.count


def launches_of_rows(n):
    """Return the number of operations that read one block of n rows of a round, after checking the blocks."""
    lm = kept(large_lm(1000))
    dists = [lm.at([1, i]).next_token() for i in range(2, 2 + n)]
    tables, blocks = [dist.table() for dist in dists], np.arange(n) % 4
    with Launches() as launches:
        read = lm.evaluator._device.read([*zip(tables, blocks.tolist(), strict=True)])
    whole = np.array([np.append(table.whole(), np.full(24, -np.inf)) for table in tables])
    np.testing.assert_array_equal(read, whole.reshape(n, 4, BLOCK)[np.arange(n), blocks])
    return launches.count


@pytest.mark.parametrize("launches", [launches_of_a_string, launches_of_rows])
def test_the_number_of_operations_does_not_grow(launches):
    assert launches(10) == launches(40)


@pytest.mark.parametrize("N", [4, 40, 200])
@pytest.mark.parametrize("method", [lambda N: (Copies(N), ResampleBelow(N)), lambda N: (Distinct(N, 3), DownSample(N))])
def test_a_step_of_rows_has_at_most_40_operations(N, method):
    """The operations of the model, and the growth of its slab, are not counted."""
    lm = kept(large_lm(1000))
    inside = 0
    launches = Launches()

    def uncounted(function):
        def call(*arguments):
            nonlocal inside
            before = launches.count
            answer = function(*arguments)
            inside += launches.count - before
            return answer

        return call

    lm.engine.run = uncounted(lm.engine.run)
    lm.engine.reserve = uncounted(lm.engine.reserve)
    program = ConstrainedText(lm, lm.at([1, 2]), min_tokens=6, max_tokens=8)
    counts = []
    with launches:
        for _ in zip(range(4), SMC(program, *method(N), seed=0), strict=False):
            counts.append(launches.count - inside)
    assert 20 < max(np.diff(counts)) <= 40


def test_sums_of_many_rows_need_little_extra_memory():
    V, R = 128_256, 320                                 # 328 MB in float64
    lm = kept(large_lm(V))
    lm.at([1]).next_token().log_prob(2)
    rows = torch.zeros((R, V))
    with Launches() as launches:
        sums = lm.evaluator._device._log_sums([DeviceTable(lm.evaluator._device, rows, i) for i in range(R)])
    np.testing.assert_allclose(sums, math.log(BLOCK))
    assert launches.peak < 170 << 20


def test_the_ids_without_a_token_move_to_the_device_once(monkeypatch):
    vocab = Vocabulary([b"a", b"b", b"", b"c", b""], eos_ids=[4], unknown_ids=[2])
    lm = kept(CachedTransformer(large_model(200), vocab))
    sent, from_numpy = [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: sent.append(array) or from_numpy(array))
    for ids in ([0], [0, 1], [0, 1, 3]):
        assert lm.at(ids).log_probs()[2] == -math.inf
    assert sum(array is lm.evaluator._unknown for array in sent) == 1


@pytest.mark.parametrize(("device", "keeps"), [("cpu", False), ("cuda", True), ("mps", False)])
def test_rows_stay_on_cuda_devices(device, keeps, monkeypatch):
    monkeypatch.setattr(hf, "_device", lambda model: torch.device(device))
    assert hf.Recomputed(Adapted(large_model(200)), 100).keeps_rows == keeps


def test_logits_that_give_no_distribution_are_refused_on_a_device_too():
    model = large_model(200)
    lm = kept(large_lm(200))
    bias = torch.nn.Parameter(torch.full((200,), math.nan))
    model.lm_head.bias = bias
    try:
        with pytest.raises(FloatingPointError, match="NaN"):
            lm.at([1]).log_probs()
        bias.data[:] = -math.inf
        with pytest.raises(FloatingPointError, match="-inf alone"):
            lm.at([1]).log_probs()
        bias.data[:] = 3e7                              # beyond what log_z could be added to in float32
        assert np.logaddexp.reduce(lm.at([1]).log_probs()) == pytest.approx(0.0, abs=1e-9)
    finally:
        model.lm_head.bias = None


def test_a_table_with_one_changed_weight_is_whole_and_scaled():
    base = ArrayTable(np.array([0.5, -np.inf, -1.0]))
    table = PutTable(base, 1, 2.0)
    np.testing.assert_allclose(table.whole(), [0.5, 2.0, -1.0])
    np.testing.assert_allclose(table.whole(table.log_total), table.whole() - table.log_total)
    assert np.exp(table.whole(table.log_total)).sum() == pytest.approx(1.0)
