"""lm_eval: the tasks of the evaluation harness over a language model of llmppl.

    python -m llmppl.serving.lm_eval --model llmppl --model_args pretrained=smollm2,text=all --tasks lambada_openai

In Python, `lm_eval.simple_evaluate(model=Harness(lm), tasks=[...])`. With text="canonical" a continuation is the tokens
that the tokenizer writes, as in the harness itself; with text="all" it is any tokens that spell it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from llmppl.lm import CachedTransformer
from llmppl.queries import choose
from llmppl.support.arguments import one_of
from llmppl.support.runtime import Runtime
from llmppl.tasks.generation import MAX_TOKENS, Method, generate
from llmppl.tasks.many import TOGETHER

Scored = tuple[tuple[str, str], list[int], list[int]]


@register_model("llmppl")
class Harness(TemplateLM):  # type: ignore[misc]
    """Model of the harness.

    Parameters
    ----------
    pretrained : CachedTransformer, or a name for `CachedTransformer.from_pretrained`
    text : str
        "canonical" or "all".
    method : str
        Method of `generate` for the tasks that generate text; by default what a task asks for, greedy or a sample.
    together : int
        Number of requests that share batches.
    """

    def __init__(
        self,
        pretrained: CachedTransformer | str | None = None,
        *,
        text: Literal["canonical", "all"] = "canonical",
        method: Method | None = None,
        together: int = TOGETHER,
        **ignored: Any,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, CachedTransformer):
            pretrained = CachedTransformer.from_pretrained(pretrained)
        self.lm = pretrained
        self.text, self.method, self.together = (
            one_of("text", text, ("canonical", "all")),
            method,
            together,
        )
        self.tokenizer: Any = self.lm.tokenizer

    @property
    def eot_token_id(self) -> int:
        return min(self.lm.vocab.eos_ids)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))
        return ids

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        if self.text == "all":
            texts = [request.args for request in requests]
            totals = self._each([partial(_log_prob, self.lm, *each) for each in texts])
            found = [(total, greedy) for total, (_, greedy) in zip(totals, found, strict=True)]
        return found

    def _loglikelihood_tokens(
        self, requests: list[Scored], **options: Any
    ) -> list[tuple[float, bool]]:
        return self._each([partial(self._score, *ids) for _, *ids in requests])

    def _score(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        """Return the log-probability of tokens, and True if each is the most probable one."""
        longest = self.lm.engine.max_length or math.inf
        before = before[max(0, len(before) + len(after) - 1 - int(min(longest, 10**9))) :]
        context = self.lm.at(before)
        total = context.next_token().string().log_prob(after)
        for token in after:
            if int(context.log_probs().argmax()) != token:
                return total, False
            context = context + token
        return total, True

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        longest = self.lm.engine.max_length or 10**9
        windows = [
            [
                *map(
                    make_disjoint_window,
                    get_rolling_token_windows(
                        token_list=self.tok_encode(request.args[0]),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=longest,
                        context_len=1,
                    ),
                )
            ]
            for request in requests
        ]
        scores = iter(self._each([partial(self._score, *ids) for each in windows for ids in each]))
        return [sum(next(scores)[0] for _ in each) for each in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._each([partial(self._generate, *request.args) for request in requests])

    def _generate(self, prompt: str, asked: dict[str, Any]) -> str:
        greedy = not asked.get("do_sample") or asked.get("temperature") == 0
        until = asked.get("until") or []
        options: dict[str, Any] = {} if greedy else {"temperature": asked.get("temperature", 1.0)}
        return str(
            generate(
                self.lm,
                prompt,
                method=self.method or ("greedy" if greedy else "sample"),
                max_tokens=asked.get("max_gen_toks", MAX_TOKENS),
                stop=[until] if isinstance(until, str) else [each for each in until if each],
                **options,
            )
        )

    def _each(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Return the results of calls that share batches, in their order."""
        numbered = (
            (partial(_numbered, index, call), f"request {index}")
            for index, call in enumerate(calls)
        )
        return [result for _, result in sorted(Runtime().each(numbered, self.together))]


def _numbered(index: int, call: Callable[[], Any]) -> tuple[int, Any]:
    return index, call()


def _log_prob(lm: CachedTransformer, context: str, text: str) -> float:
    """Return the log-probability that a text begins with `text`, over all its tokenisations."""
    return float(choose(lm, context, [text], end="prefix").log_mass)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
