"""Truth of queries: every token sequence of every word, with its probability by plain forward passes in numpy."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from helpers.tiny import log_probs_by_hand
from llmppl import CachedTransformer


def ruled(p: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> np.ndarray:
    """Return the probabilities `p`, (V,), after a decision rule, by its definition."""
    p = p ** (1.0 / temperature)
    order = np.argsort(-p, kind="stable")
    p[order[len(p) if top_k is None else top_k :]] = 0.0
    p /= p.sum()
    if top_p is not None:
        p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0.0
    return p / p.sum()


def probs(lm: CachedTransformer, ids: Sequence[int], rule: dict | None = None) -> np.ndarray:
    """Return the (V,) probabilities of the next token under a rule."""
    if isinstance(lm.model, torch.nn.Module):
        return ruled(np.exp(log_probs_by_hand(lm, ids)), **rule or {})
    p = np.exp(lm.model(list(ids)))
    return ruled(p / p.sum(), **rule or {})


def truth(
    lm: CachedTransformer, words: Iterable[str], prefixes: Iterable[str], *, end: str = "boundary",
    canonical: bool = False, rule: dict | None = None, max_tokens: int | None = None, order: str = "joint",
) -> tuple[dict, dict, float]:  # fmt: skip
    """Return {(prefix, word): probability}, {(prefix, word, ids): probability}, and that of `Query.probability`.

    `words` are the whole texts that match.
    """
    eos, data, wholes = list(lm.vocab.eos_ids), lm.vocab.tokens, {word.encode() for word in words}
    of_strings, of_tokens, event, given = {}, {}, 0.0, 0.0

    def walk(prefix, before, ids, p, over):
        nonlocal event
        whole = prefix.encode() + b"".join(data[i] for i in ids)
        dist = probs(lm, (*before, *ids), rule) if before or ids else np.ones(len(data))
        inside = [i for i, piece in enumerate(data) if piece and any(word.startswith(whole + piece) for word in wholes)]
        own = not canonical or (*before, *ids) == tuple(map(int, lm.context(whole.decode(errors="ignore")).tokens))
        if whole in wholes and own:
            ending = {"eos": dist[eos].sum(), "prefix": 1.0, "boundary": np.delete(dist, inside).sum()}[end]
            if p * ending > 0.0:
                word = whole.decode()
                of_tokens[prefix, word, ids] = p * ending
                of_strings[prefix, word] = of_strings.get((prefix, word), 0.0) + p * ending
                event += p * ending * (not over or end != "prefix")
            over = True
        for i in inside if len(ids) != max_tokens else ():
            if p * dist[i] > 0.0:
                walk(prefix, before, (*ids, i), p * dist[i], over)

    for prefix in prefixes:
        before = tuple(map(int, lm.context(prefix).tokens))
        base = np.prod([probs(lm, before[:i])[before[i]] for i in range(1, len(before))])
        given += base
        walk(prefix, before, (), base if order == "joint" else 1.0, False)
    return of_strings, of_tokens, event / given


def check(matches: list, expected: dict, order: str = "joint") -> None:
    """Check that matches are the expected strings or token sequences, with their probabilities, in that order."""
    size = len(next(iter(expected), ()))
    keys = [(match.prefix, str(match), tuple(map(int, match.tokens)))[:size] for match in matches]
    assert len(set(keys)) == len(keys) and set(keys) == set(expected)
    values = np.exp([match.log_joint if order == "joint" else match.log_prob for match in matches])
    np.testing.assert_allclose(values, [expected[key] for key in keys], rtol=1e-6)
    np.testing.assert_allclose(values, sorted(expected.values(), reverse=True), rtol=1e-6)
    upper, lower = np.array([(match.log_prob_upper, match.log_prob) for match in matches]).reshape(-1, 2).T
    assert (lower <= upper + 1e-12).all() and (upper <= lower + 1e-7).all()
