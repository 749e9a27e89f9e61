"""A constraint in other libraries' decoding: masked logits, for `generate` of transformers and for vLLM.

This is *local masking*: each token is drawn from the model's distribution cut to what fits. It keeps texts in the
language, and draws them from another distribution than the model's, given the language: what a token leads to is not
weighed (docs/local-and-global.md). `ConstrainedText` with `smc_steer` weighs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import Vocabulary
from llmppl.support import arguments

_ENDED = object()                                       # the state of a text that an eos has ended


class ConstraintLogitsProcessor:
    """Cuts logits to the tokens with which a text can stay in the language of a constraint: local masking.

    `model.generate(..., logits_processor=[processor])` calls it with rows of ids and their logits. A row goes on with
    a row of the last call if it is that row and one more token that fits; so beams may be reordered. Any other row is a
    prompt, behind which a text begins, whatever it holds and however it is padded. Assisted decoding, which goes back,
    is not supported. A row that has ended may only end again.

    Parameters
    ----------
    constraint : Regex, Grammar, JsonSchema, type, list of str, index or recognizer
    tokenizer : transformers tokenizer, or Vocabulary
    eos_ids : int or iterable of int
        Tokens that end a text besides the tokenizer's own, such as `model.generation_config.eos_token_id`.
    """

    def __init__(self, constraint: Any, tokenizer: Any, *, eos_ids: int | Iterable[int] = ()) -> None:
        if isinstance(tokenizer, Vocabulary):
            vocab = tokenizer
        elif hasattr(tokenizer, "convert_ids_to_tokens"):
            vocab = Vocabulary.from_tokenizer(tokenizer, [eos_ids] if isinstance(eos_ids, int) else eos_ids)
        else:
            given = arguments.kind(tokenizer)
            raise TypeError(f"tokenizer must be a transformers tokenizer or a Vocabulary, not {given}")
        index = index_of(constraint, vocab)
        if index is None:
            raise TypeError(
                f"constraint must say which tokens fit, as Regex(...) does, and not be {arguments.kind(constraint)}"
            )
        self.vocab, self.index = vocab, index
        self._states: dict[bytes, Any] = {}             # of the last call's rows, by their ids

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """(B, n) logits, -inf at what does not fit after the (B, T) `input_ids`; a ValueError where nothing fits."""
        rows = np.ascontiguousarray(input_ids.cpu().numpy(), np.int64)
        states = []
        for row in rows:
            before, token = self._states.get(row[:-1].tobytes()), int(row[-1])
            goes_on = before is not None and self._fits(before, token)
            states.append(self._after(before, token) if goes_on else self.index.start)
        self._states = {row.tobytes(): state for row, state in zip(rows, states, strict=True)}
        return self._masked(states, scores)

    def of_request(self) -> Callable[[Sequence[int], Any], Any]:
        """A function of the ids that a text has so far, without its prompt, and the (n,) logits of the next.

        It is for one text: what a server asks for each request, as `AdapterLogitsProcessor` of vLLM does.
        """
        read, state = 0, self.index.start

        def process(output_ids: Sequence[int], logits: Any) -> Any:
            nonlocal read, state
            for token in output_ids[read:]:
                state = self._after(state, int(token))
            read = len(output_ids)
            return self._masked([state], logits[None])[0]

        return process

    def _after(self, state: Any, token: int) -> Any:
        """The state after one token more; a ValueError if it does not fit."""
        if state is _ENDED or (token in self.vocab.eos_ids and self.index.accepts(state)):
            return _ENDED
        return self.index.advance(state, token)

    def _fits(self, state: Any, token: int) -> bool:
        """Whether `token` can have been drawn after `state`; behind an end comes what the decoder pads with."""
        return state is _ENDED or (token < len(self.vocab) and bool(self.index.mask(state)[token]))

    def _masked(self, states: Sequence[Any], scores: Any) -> Any:
        import torch

        fits = np.zeros(tuple(scores.shape), bool)
        for row, state in zip(fits, states, strict=True):
            mask = self.vocab.only_eos if state is _ENDED else self.index.mask(state)
            row[: len(mask)] = mask[: len(row)]
        masked = scores.masked_fill(~torch.from_numpy(fits).to(scores.device), -torch.inf)
        dead = torch.isneginf(masked).all(-1).nonzero().flatten().tolist()
        if dead:
            raise ValueError(
                f"row {dead[0]}: no token that {self.index!r} allows has a probability above 0: another processor has "
                "left none of them, or the model has none"
            )
        return masked
