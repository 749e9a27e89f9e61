"""The choice among texts, compared with an enumeration of every token sequence by plain forward passes."""

import math

import numpy as np
import pytest
from helpers import tiny
from helpers.queries import truth

from llmppl import Rule
from llmppl.queries.choice import choose

LM = tiny.cold_lm_with_bos(6, 0)


@pytest.mark.parametrize("end", ["boundary", "eos", "prefix"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.9}])
@pytest.mark.parametrize("prefix", ["a", "b c"])
def test_probabilities_are_those_of_an_enumeration(end, rule, prefix):
    texts = ["ab", "ba", "c c", "bb c"] + ["abc"] * (end != "prefix")
    words = {prefix + each for each in texts}
    expected, _, _ = truth(LM, words, [prefix], end=end, rule=rule, order="conditional")
    if not expected:
        with pytest.raises(ValueError, match="no option has a positive probability"):
            choose(LM, prefix, texts, end=end, rule=Rule(**rule))
        return
    totals = np.array([expected.get((prefix, prefix + each), 0.0) for each in texts])
    p = totals / totals.sum()
    found = choose(LM, prefix, texts, end=end, rule=Rule(**rule), tolerance=0.0, max_expansions=10**6)
    np.testing.assert_allclose([found[each] for each in texts], p, atol=1e-7)
    assert math.exp(found.log_mass) == pytest.approx(totals.sum(), rel=1e-6)
    assert found.best == texts[int(np.argmax(p))]
    early = choose(LM, prefix, texts, end=end, rule=Rule(**rule), max_expansions=2)
    of_each = {share.value: share for share in early.shares}
    assert all(of_each[text].lower - 1e-9 <= q <= of_each[text].upper + 1e-9 for text, q in zip(texts, p, strict=True))
