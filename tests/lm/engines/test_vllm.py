"""vLLM as an engine: logits equal plain forward passes of transformers, also after any failure; equal particles.

`make check-vllm` runs this file where vLLM is installed. One engine with small limits, so that tests reach them,
serves most of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.common import repetitions, wants_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytest.importorskip("numba", reason="vLLM brings it")   # before vLLM, whose engine for CPUs stumbles over it
pytest.importorskip("vllm", reason="the engine vLLM: make check-vllm")

from llmppl import CachedTransformer, ConstrainedText, Model, PromptIntersection, Regex, smc_steer
from llmppl.lm.embedded import PATH
from llmppl.lm.engines import loading
from llmppl.lm.engines import vllm as module
from llmppl.lm.engines.vllm import Rows, load
from llmppl.testing import check_engine

TEXT = "The capital of France is Paris, and that of Italy is Rome. In both cities a river divides the old town in two."
SMALL = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 40}


class Stumbling:
    """Hook of the model's last layer norm that raises on demand, and may wait in each pass."""

    error, seconds, passes = None, 0.0, 0

    def __call__(self, *_):
        self.passes += 1
        time.sleep(self.seconds)
        error, self.error = self.error, None
        if error is not None:
            raise error


def plain(folder):
    """Return a function from ids to logits by transformers in float64, one context at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].numpy()

    return logits


@pytest.fixture(scope="module")
def loaded():
    """Return (engine, tokenizer, hook of the engine) of the embedded model, with little room."""
    engine, tokenizer = load(None, disable_log_stats=False, **SMALL)
    hook = Stumbling()
    engine._llm.model_executor.driver_worker.get_model().model.norm.register_forward_hook(hook)
    yield engine, tokenizer, hook
    engine.close()


@pytest.fixture
def engine(loaded):
    loaded[0].clear()
    return loaded[0]


@pytest.fixture
def hook(loaded):
    yield loaded[2]
    loaded[2].error, loaded[2].seconds = None, 0.0


@pytest.fixture
def lm(loaded):
    return CachedTransformer(*loaded[:2])


def texts(seed, count, longest, size=4096):
    """Return `count` contexts of distinct lengths and tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(300, size, int(n)).tolist() for n in rng.integers(2, longest, count)]


def ends(contexts):
    return [(i, len(ids)) for i, ids in enumerate(contexts)]


def log_probs(logits):
    return torch.log_softmax(torch.as_tensor(np.asarray(logits)), -1).numpy()


def distance(engine, contexts, reference, asked=None):
    """Return the largest difference of log-probabilities between an engine and plain forward passes."""
    asked = asked or ends(contexts)
    found = log_probs(engine.forward(contexts, asked))
    right = log_probs(np.stack([reference(contexts[i][:n]) for i, n in asked]))
    return np.abs(found - right).max()


# --- engines of their own: before the one that the other tests share --------------------------------------------------


def test_a_real_model_answers_as_plain_forwards_do():
    """In float32, transformers and vLLM differ from float64 by up to 1e-4 for tokens of probability 1e-8."""
    wants_model("smollm2")
    lm = CachedTransformer.from_pretrained("smollm2", engine="vllm", kv_cache_memory_bytes=1 << 28, max_model_len=512)
    engine, tokenizer = lm.engine, lm.tokenizer
    reference = plain(loading.converted(loading.packaged("smollm2")))
    try:
        report = check_engine(engine, reference, ids=range(300, 308), size=49152, contexts=30, tolerance=2e-4)
        assert report.total_variation < 2e-5
        ids = tokenizer(TEXT)["input_ids"]
        assert distance(engine, [ids[n:] for n in range(0, len(ids) - 5, 7)], reference) < 1e-4
        assert engine.eos_ids and tokenizer.eos_token_id in engine.eos_ids
    finally:
        engine.close()


def test_a_model_over_two_workers_answers_as_plain_forwards_do(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(PATH).save_pretrained(tmp_path)
    engine, _ = load(tmp_path, tensor_parallel_size=2, **SMALL)
    try:
        report = check_engine(engine, plain(tmp_path), ids=range(300, 308), size=4096, contexts=30)
        assert report.tokens < report.whole
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"no_such_option": 1}, TypeError, "no_such_option"),
        ({"data_parallel_size": 2}, ValueError, "tensor_parallel_size"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 1 << 20}, ValueError, "512"),
    ],
)
def test_impossible_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        load(None, **options)


def test_models_in_their_own_processes_coexist_and_a_death_is_reported():
    first, second = (load(None, distributed_executor_backend="mp", **SMALL)[0] for _ in range(2))
    contexts, reference = texts(7, 12, 60), plain(PATH)
    assert distance(first, contexts, reference) < 1e-4
    assert distance(second, contexts, reference) < 1e-4
    (worker,) = first._llm.model_executor.workers
    os.kill(worker.proc.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="vLLM's engine died .*: load the model again"):
            first.forward(contexts, ends(contexts))
        first.clear()
    first.close()
    second.clear()
    assert distance(second, contexts, reference) < 1e-4
    second.close()
    with pytest.raises(RuntimeError, match="is closed: load the model again"):
        second.forward(contexts, ends(contexts))


# --- right ------------------------------------------------------------------------------------------------------------


def test_it_answers_as_plain_forwards_do(engine):
    """This includes 300 contexts of which 8 fit together, interrupts at any moment, threads and the longest context."""
    report = check_engine(engine, plain(PATH), ids=range(300, 310), size=4096, contexts=repetitions(300, 60))
    assert report.distance < 1e-4 and report.tokens < report.whole
    assert engine._llm.get_num_unfinished_requests() == 0


def test_a_prompt_longer_than_a_pass_and_places_on_the_way(engine):
    """A pass reads 128 tokens. The row of a context that takes three passes comes from the last one."""
    (ids,) = texts(0, 1, 3)
    ids = ids + texts(1, 1, 3)[0] * 110
    asked = [(0, n) for n in (200, 1, 31, 32, 33, len(ids), 129)]
    assert distance(engine, [ids], plain(PATH), asked) < 1e-4


class EveryOther(Model):
    """Program in which each second token contains an e."""

    def __init__(self, lm):
        super().__init__()
        self.context, self.count = lm.context("Once upon a time"), 0

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.context, self.count = self.context + token, self.count + 1
        self.text = str(self.context.text)
        self.condition(self.count % 2 == 1 or "e" in str(token))


PROGRAMS = {
    "condition": EveryOther,
    "regex": lambda lm: ConstrainedText(lm, "The dog was", Regex(r" [a-z ]{20,40}\."), max_tokens=30),
    "intersection": lambda lm: PromptIntersection(lm, ["My favorite writer is", "My favorite physicist is"]),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_same_seed_gives_the_same_particles_as_transformers(lm, program):
    lms = CachedTransformer.from_pretrained(engine="transformers"), lm
    runs = [smc_steer(program(each), N=6, K=3, seed=3, max_steps=12) for each in lms]
    assert [str(particle) for particle in runs[0]] == [str(particle) for particle in runs[1]]
    assert abs(runs[0].log_ml - runs[1].log_ml) < 1e-4


# --- what it counts ---------------------------------------------------------------------------------------------------


def scheduled(engine):
    """Return the number of prompt tokens that vLLM's scheduler looked up and did not find."""
    values = {metric.name: getattr(metric, "value", None) for metric in engine._llm.get_metrics()}
    return values["vllm:prefix_cache_queries"] - values["vllm:prefix_cache_hits"]


def test_stats_count_the_tokens_that_the_scheduler_counts(engine):
    before, told = scheduled(engine), engine.tokens
    start = texts(2, 1, 3)[0] * 35
    first = [start + ids for ids in texts(3, 20, 40)]
    engine.forward(first, ends(first))
    once = engine.tokens - told
    engine.forward(first, ends(first))
    again = engine.tokens - told - once
    assert once + again == scheduled(engine) - before
    assert again < once < sum(map(len, first))
    assert len(first) <= again                          # the last token of each is always run


def test_a_prefix_runs_once_except_for_its_last_block(engine):
    start = list(range(300, 300 + 96))                  # three blocks of 32
    engine.forward([start + [7]], [(0, 97)])
    before = engine.tokens
    contexts = [start + [300 + i] for i in range(10)]
    engine.forward(contexts, ends(contexts))
    assert engine.tokens - before == 10


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_round_leaves_nothing_in_the_scheduler(engine, hook):
    contexts = texts(4, 60, 100)
    hook.seconds = 0.05

    def interrupt(*_):
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for moment in (0.001, 0.03, 0.12, 0.3):
            before = hook.passes
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, moment)
                engine.forward(contexts, ends(contexts))
            engine.clear()
            assert engine._llm.get_num_unfinished_requests() == 0
            assert hook.passes - before < 12            # of the 30 that the round would take
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    hook.seconds = 0.0
    assert distance(engine, contexts, plain(PATH)) < 1e-4


def test_an_exception_of_the_model_propagates_and_unwritten_blocks_are_not_read(engine, hook):
    contexts = texts(5, 20, 100)
    for error in (RuntimeError("out of memory"), ZeroDivisionError("in a layer")):
        hook.error = error
        with pytest.raises(type(error), match=str(error)):
            engine.forward(contexts, ends(contexts))
        assert engine._llm.get_num_unfinished_requests() == 0
        assert distance(engine, contexts, plain(PATH)) < 1e-4


def test_a_second_model_in_this_process_is_refused(engine):
    """The end of the second model would break the first."""
    with pytest.raises(RuntimeError, match='close that engine first .* distributed_executor_backend="mp"'):
        load(None, **SMALL)
    contexts = texts(6, 10, 60)
    assert distance(engine, contexts, plain(PATH)) < 1e-4


def test_a_context_longer_than_the_model_reads_is_refused(lm):
    assert lm.engine.max_length == 255                  # vLLM keeps room for one more
    lm.at([300] * 255).log_probs()
    with pytest.raises(ValueError, match="255"):
        lm.at([300] * 256).log_probs()


# --- the logits processor ---------------------------------------------------------------------------------------------


def test_both_interfaces_of_vllm_take_the_marked_rows(engine):
    """A batch has four requests, two of them marked. The first interface moves one, the second names slots."""
    logits = torch.arange(12.0).reshape(4, 3)
    params = [SimpleNamespace(extra_args=extra) for extra in ({"llmppl": 1}, None, {"llmppl": 0}, {})]
    first, second = Rows(None), Rows(None)
    added = [(place, each, [], []) for place, each in enumerate(params)]
    first.update_state(SimpleNamespace(removed=[], added=added, moved=[(2, 3, module.MoveDirectionality.SWAP)]))
    assert first.apply(logits) is logits
    np.testing.assert_array_equal(module._take(None, 2, True), logits.numpy()[[3, 0]])
    for slot, each in zip((5, 1, 9, 2), params, strict=True):
        second.add_request(slot, each)
    second.apply(logits, SimpleNamespace(idx_mapping_np=np.array([9, 2, 5, 1])))
    np.testing.assert_array_equal(module._take(None, 2, True), logits.numpy()[[0, 2]])
    assert module._take(None, 0, True) is None


# --- a constraint in its own decoding ---------------------------------------------------------------------------------

YEARS = " [0-9]{1,2} years old and (happy|sad)[.]"
DECODING = f"""
import json
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from llmppl import ConstraintLogitsProcessor, Regex

class Years(AdapterLogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self.processor = ConstraintLogitsProcessor(Regex({YEARS!r}), tokenizer)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return self.processor.of_request() if (params.extra_args or {{}}).get("years") else None

llm = LLM({str(PATH)!r}, dtype="float32", logits_processors=[Years], kv_cache_memory_bytes=1 << 24, **{SMALL})
free = SamplingParams(max_tokens=9, seed=0)
bound = SamplingParams(max_tokens=25, seed=0, n=3, extra_args={{"years": True}})
prompts = ["Tim was", "One day, the old king was", "She was", "The dog was", "A bird was", "He was"]
found = llm.generate(prompts, [bound, free, bound, bound, free, bound], use_tqdm=False)
print("\\n" + json.dumps([[each.text for each in one.outputs] for one in found]))
"""


def test_requests_with_a_constraint_keep_to_it_beside_others():
    """14 texts of unequal lengths, eight at a time, so that requests come, go and change their indices."""
    process = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = subprocess.run([sys.executable, "-c", DECODING], env=process, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    texts = json.loads(result.stdout.splitlines()[-1])
    assert all(re.fullmatch(YEARS, text) for i in (0, 2, 3, 5) for text in texts[i]) and len(texts[0]) == 3
    assert not any(re.match(" [0-9]", text) for i in (1, 4) for text in texts[i])
