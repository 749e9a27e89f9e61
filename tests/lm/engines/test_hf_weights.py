"""Changes of weights: after each kind of change, a language model answers as a new one."""

import copy
import functools
import gc
import threading

import numpy as np
import pytest
import torch
from helpers.fire import in_threads
from helpers.tiny import cold_lm, table_lm, tiny_model, tiny_vocab

from llmppl import CachedTransformer, ConstrainedText, Regex, smc_steer
from llmppl.lm.engine import Engine
from llmppl.lm.engines.hf_weights import Weights


def own_lm(**limits):
    """Return a language model whose weights no other test shares."""
    return CachedTransformer(copy.deepcopy(tiny_model()), tiny_vocab(), **limits)


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def replace_data_twice(model):
    """Replace `data` twice; the second time, memory at the first address may be free again."""
    gc.collect()
    head = model.lm_head.weight
    head.data = -head.data
    head.data = head.data * 2
    head.data = head.data.clone()


def step_of_an_optimizer(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([[0, 1, 2]]), labels=torch.tensor([[0, 1, 2]])).loss.backward()
    optimizer.step()


def scale_in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def load(model, assign=False):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=assign)


def another_head(model):
    head = torch.nn.Linear(16, 6, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    model.lm_head = head


def another_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


CHANGES = [
    replace_data, replace_data_twice, step_of_an_optimizer, scale_in_place, load, functools.partial(load, assign=True),
    another_head, another_parameter,
]  # fmt: skip


def by_hand(model, ids):
    with torch.inference_mode():
        return torch.log_softmax(model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1).numpy()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_takes_effect_at_the_next_call(change):
    lm = own_lm()
    contexts = [lm.context("a"), lm.context("a") + lm.vocab[1], lm.context("abc"), lm.context("b")]
    before = [context.log_probs().copy() for context in contexts]
    string = contexts[0].next_token().string()
    string.log_prob([1, 2]), string.log_prob("bc")
    for first in (True, False):
        change(lm.model)
        for context, old in zip(contexts, before, strict=True):
            new = by_hand(lm.model, [*map(int, context.tokens)])
            assert not first or np.abs(new - old).max() > 1e-3
            np.testing.assert_allclose(context.log_probs(), new, atol=1e-12)
            np.testing.assert_allclose(context.next_token().log_probs(), new, atol=1e-12)
        by_tokens = contexts[0].log_probs()[1] + contexts[1].log_probs()[2]
        assert contexts[0].next_token().string().log_prob([1, 2]) == pytest.approx(by_tokens)
        assert not lm.model.training


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_after_a_change_equals_that_of_a_new_lm(change):
    def run(lm):
        program = ConstrainedText(lm, "a", Regex("(a|bc|d)*"), end="eos", complete=False, max_tokens=8)
        particles = smc_steer(program, 4, 3, seed=1)
        return [str(p) for p in particles], particles.log_weights, particles.stats.tokens

    lm = own_lm()
    run(lm)
    change(lm.model)
    (texts, log_weights, tokens), (other, others, num) = run(lm), run(CachedTransformer(lm.model, tiny_vocab()))
    assert texts == other and tokens == num
    np.testing.assert_allclose(log_weights, others, rtol=1e-9)
    assert run(lm)[2] == 0                              # nothing has changed since


def test_nothing_is_dropped_while_the_weights_stay():
    lm = own_lm()
    lm.context("abc").log_probs()
    tokens = lm.stats.tokens
    for parameter in lm.model.parameters():
        parameter.requires_grad_(False)
    lm.model.train()
    lm.model.eval()
    by_hand(lm.model, [0, 1])
    lm.context("abc").log_probs()
    assert lm.stats.tokens == tokens and lm.engine.version() == lm.engine.version()


def test_the_watch_over_the_weights_keeps_no_replaced_weights_alive():
    import weakref

    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    weights, old = Weights(model), weakref.ref(model[0].weight.untyped_storage())
    model[0].weight.data = torch.zeros(3, 3)
    assert old() is None and weights.version() == weights.version() == 1


def test_inference_tensors_are_watched_by_their_addresses_and_cleared_by_hand():
    with torch.inference_mode():
        model = copy.deepcopy(tiny_model())
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.lm_head = torch.nn.Linear(16, 6, bias=False, dtype=torch.float64)
    lm = CachedTransformer(model, tiny_vocab())
    context = lm.context("ab")
    context.log_probs()
    with torch.inference_mode():
        model.lm_head.weight.mul_(-1)
    lm.clear()
    np.testing.assert_allclose(context.log_probs(), by_hand(model, [*map(int, context.tokens)]), atol=1e-12)
    another_head(model)
    np.testing.assert_allclose(context.log_probs(), by_hand(model, [*map(int, context.tokens)]), atol=1e-12)


def test_clear_handles_changes_that_torch_does_not_count():
    lm = own_lm()
    context = lm.context("ab")
    context.log_probs()
    lm.model.lm_head.weight.data.mul_(-1)
    lm.clear()
    np.testing.assert_allclose(context.log_probs(), by_hand(lm.model, [*map(int, context.tokens)]), atol=1e-12)
    longer = context + "c"
    assert longer.text == "abc" and lm.store.slots_used == len(context)
    longer.log_probs()
    assert lm.store.slots_used == len(longer)


def test_clear_works_for_functions_and_custom_engines_too():
    scale = [1.0]

    class Scaled(Engine):
        cleared = 0

        def forward(self, contexts, asked):
            self.tokens += len(asked)
            return np.stack([scale[0] * np.arange(3.0) for _ in asked])

        def clear(self):
            self.cleared += 1

    for lm in table_lm(lambda ids: scale[0] * np.arange(3.0)), CachedTransformer(Scaled(), table_lm(min).vocab):
        scale[0] = 1.0
        context = lm.context("a")
        first = context.log_probs()
        scale[0] = 2.0
        assert (context.log_probs() == first).all()     # they cannot be watched
        lm.clear()
        expected = 2.0 * np.arange(3.0) - np.logaddexp.reduce(2.0 * np.arange(3.0))
        np.testing.assert_allclose(context.log_probs(), expected, atol=1e-12)
    assert lm.engine.cleared == 2                       # one when it was taken


def test_a_changed_version_of_an_engine_drops_old_answers():
    class Served(Engine):
        number = 0

        def forward(self, contexts, asked):
            return np.stack([np.arange(3.0) * (1 + self.number) for _ in asked])

        def version(self):
            return self.number

    lm = CachedTransformer(Served(), table_lm(min).vocab)
    context = lm.context("a")
    first = context.log_probs()
    lm.engine.number = 1
    assert context.log_probs()[0] < first[0]


def test_a_change_and_a_clear_are_right_while_other_threads_ask():
    lm, texts = own_lm(), ["a", "ab", "abc", "ba", "cab"]
    go_on = threading.Event()

    def ask():
        while not go_on.is_set():
            for text in texts:
                rows = lm.context(text).log_probs()
                assert abs(np.exp(rows).sum() - 1.0) < 1e-9

    def change():
        try:
            for _ in range(20):
                scale_in_place(lm.model)
                for text in texts:
                    lm.context(text).log_probs()
                lm.clear()
        finally:
            go_on.set()

    in_threads([ask, ask, change])
    for text in texts:
        context = lm.context(text)
        np.testing.assert_allclose(context.log_probs(), by_hand(lm.model, [*map(int, context.tokens)]), atol=1e-9)


def test_an_interrupted_clear_is_finished_by_the_next_call(monkeypatch):
    lm = own_lm()
    context = lm.context("ab")
    context.log_probs()
    scale_in_place(lm.model)
    renew = lm.trie.renew

    def interrupted():
        monkeypatch.setattr(lm.trie, "renew", renew)
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.trie, "renew", interrupted)
    with pytest.raises(KeyboardInterrupt):
        context.log_probs()
    np.testing.assert_allclose(context.log_probs(), by_hand(lm.model, [*map(int, context.tokens)]), atol=1e-12)


def test_a_step_may_clear_and_the_run_continues():
    lm = cold_lm()
    program = ConstrainedText(lm, "a", Regex("(a|bc|d)*"), end="eos", complete=False, max_tokens=6)
    whole = smc_steer(program, 4, 3, seed=2)
    again = smc_steer(program, 4, 3, seed=2, on_step=lambda step: lm.clear())
    assert [str(p) for p in again] == [str(p) for p in whole] and again.stats.tokens >= whole.stats.tokens
    np.testing.assert_allclose(again.log_weights, whole.log_weights, rtol=1e-9)
