"""A constraint as a logits processor, for `generate` of transformers and for vLLM.

This is *local masking*: each token is drawn from the model's distribution, restricted to the tokens that fit. The texts
are in the language, but not distributed as the model conditioned on the language, because the continuations of a token
are not weighed (docs/local-and-global.md). `ConstrainedText` with `smc_steer` weighs them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import Vocabulary
from llmppl.support import arguments

_ENDED = object()  # state of a text after its eos


class ConstraintLogitsProcessor:
    """Logits processor that masks the tokens with which a text leaves the language of a constraint.

    `model.generate(..., logits_processor=[processor])` calls it with rows of ids and their logits. A row continues a
    row of the last call if it is that row plus one token that fits, so beams may be reordered. Any other row is a
    prompt, padded or not, after which a text begins. A row that has ended may only end again. Assisted decoding, which
    takes tokens back, is not supported. A model with another number of tokens raises a ValueError at the first call.

    Parameters
    ----------
    constraint : Regex, Grammar, JsonSchema, type, list of str, index or recognizer
    tokenizer : transformers tokenizer, or Vocabulary
    eos_ids : int or iterable of int
        Tokens that end a text, besides the tokenizer's own, such as `model.generation_config.eos_token_id`.
    max_tokens : int, optional
        The text is complete after at most as many tokens, without its end. `max_new_tokens` of `generate` would cut it.

    Examples
    --------
    >>> processor = ConstraintLogitsProcessor(Regex(" (happy|sad)"), lm.vocab)
    >>> scores = processor(torch.tensor([[1, 2]]), torch.zeros(1, len(lm.vocab)))
    >>> [str(lm.vocab[i]) for i in scores[0].isfinite().nonzero()[:, 0].tolist()]
    [' ', ' s', ' h', ' ha', ' sa', ' happ', ' happy', ' sad']
    """

    def __init__(
        self,
        constraint: Any,
        tokenizer: Any,
        *,
        eos_ids: int | Iterable[int] = (),
        max_tokens: int | None = None,
    ) -> None:
        if isinstance(tokenizer, Vocabulary):
            vocab = tokenizer
        elif hasattr(tokenizer, "convert_ids_to_tokens"):
            vocab = Vocabulary.from_tokenizer(
                tokenizer, [eos_ids] if isinstance(eos_ids, int) else eos_ids
            )
        else:
            kind = arguments.shown(tokenizer)
            raise TypeError(
                f"tokenizer must be a transformers tokenizer or a Vocabulary, not {kind}"
            )
        index = index_of(constraint, vocab)
        if index is None:
            raise TypeError(
                f"constraint must give masks of tokens, as Regex(...) does, and not be {arguments.shown(constraint)}"
            )
        self.vocab = vocab
        self.index = index
        self._start = index.start, arguments.optional_count("max_tokens", max_tokens)
        if not self._mask(self._start).any():
            raise ValueError(f"{index!r}: no text ends within max_tokens={max_tokens}")
        self._states: dict[bytes, Any] = {}  # by the ids of each row of the last call

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the (B, n) `scores` with -inf at tokens that do not fit after the (B, T) `input_ids`.

        Raises a ValueError if no token fits, and if the ids or the scores are those of another tokenizer.
        """
        rows = np.ascontiguousarray(input_ids.cpu().numpy(), np.int64)
        states = []
        for row in rows:
            before = self._states.get(row[:-1].tobytes())
            token = int(row[-1])
            continues = before is not None and self._fits(before, token)
            states.append(self._advance(before, token) if continues else self._start)
        self._states = {row.tobytes(): state for row, state in zip(rows, states, strict=True)}
        return self._masked(states, scores)

    def of_request(self) -> Callable[[Sequence[int], Any], Any]:
        """Return `process(output_ids, logits)` for one text, as `AdapterLogitsProcessor` of vLLM needs for a request.

        `output_ids` are the ids so far without the prompt, `logits` the (n,) logits of the next token.
        """
        num_read = 0
        state = self._start

        def process(output_ids: Sequence[int], logits: Any) -> Any:
            nonlocal num_read, state
            for token in output_ids[num_read:]:
                state = self._advance(state, int(token))
            num_read = len(output_ids)
            return self._masked([state], logits[None])[0]

        return process

    def _advance(self, state: Any, token: int) -> Any:
        """Return the state after `token`; ValueError if it does not fit."""
        if state is _ENDED:
            return state
        inside, left = state
        if token in self.vocab.eos_ids and self.index.accepts(inside):
            return _ENDED
        return self.index.advance(inside, token), left and left - 1

    def _fits(self, state: Any, token: int) -> bool:
        """Return whether `token` can have been drawn after `state`. After the end, decoders pad with any token."""
        return state is _ENDED or (token < len(self.vocab) and bool(self._mask(state)[token]))

    def _mask(self, state: Any) -> Any:
        if state is _ENDED:
            return self.vocab.only_eos
        inside, left = state
        if left is None:
            return self.index.mask(inside)
        mask = self.index.mask_within(inside, left)
        return mask if left else mask & self.vocab.only_eos

    def _masked(self, states: Sequence[Any], scores: Any) -> Any:
        import torch

        size = len(self.vocab)
        num_scores = scores.shape[-1]
        if abs(num_scores - size) > max(128, size // 32):  # heads are padded, or lack added tokens
            raise ValueError(
                f"the model scores {num_scores:,} tokens, and the tokenizer of this processor has {size:,}: give the "
                "tokenizer of the model"
            )
        fits = np.zeros(tuple(scores.shape), bool)
        for row, state in zip(fits, states, strict=True):
            mask = self._mask(state)
            row[: len(mask)] = mask[: len(row)]
        masked = scores.masked_fill(~torch.from_numpy(fits).to(scores.device), -torch.inf)
        dead = torch.isneginf(masked).all(-1).nonzero().flatten().tolist()
        if dead:
            raise ValueError(
                f"row {dead[0]}: no token that {self.index!r} allows has a probability above 0: another processor has "
                "removed them, or the model rules them out"
            )
        return masked
