"""Extraction: the probability that a model writes the rest of a text, verbatim or nearly, with certain bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.distributions import NO_RULE, DecisionRule
from llmppl.lm import CachedTransformer, Context
from llmppl.models.programs import as_context
from llmppl.queries.best_first import Search, Space, Start
from llmppl.queries.compile import Edits, compile_query
from llmppl.queries.query import warn_of_seam
from llmppl.queries.sampling import Probability, bounded
from llmppl.report.tables import Rows, TableView, one_line
from llmppl.support import arguments
from llmppl.support.options import Guess


@dataclass(frozen=True, repr=False)
class Extraction(TableView):
    """Result of `extraction`: the probability of a text, `verbatim`, and of all texts within `edits` of it, `near`.

    Examples
    --------
    >>> found = extraction(lm, "Once upon a", " time there was", edits=1)
    >>> f"{found.verbatim.lower:.2f} {found.near.lower:.2f}"            # near: also " time, there was"
    '0.16 0.88'
    >>> found.verbatim.tries(0.5)
    (5, 5)
    """

    suffix: str
    edits: int
    verbatim: Probability
    near: Probability
    tries = Guess(
        "no tries: near.tries(0.5) and verbatim.tries(0.5) are the numbers for a chance of 50 %"
    )

    def _header(self) -> str:
        return f"Extraction of {one_line(repr(self.suffix))}"

    def _table(self) -> tuple[list[str], Rows]:
        within = f"within {arguments.plural(self.edits, 'edit')}"
        rows = []
        for name, p in ("verbatim", self.verbatim), (within, self.near):
            tries = dict.fromkeys(f"{n:,}" for n in p.tries(0.5))
            rows.append([f"{p.lower:.4g}", f"{p.upper:.4g}", " to ".join(tries), name])
        return ["at least", "at most", "tries for 50 %", "text"], rows


def extraction(
    lm: CachedTransformer,
    prefix: str | Context,
    suffix: str,
    *,
    edits: int | Edits = 1,
    rule: DecisionRule = NO_RULE,
    tolerance: float = 1e-3,
    max_expansions: int = 2000,
) -> Extraction:
    """Compute the probability that the model continues `prefix` by `suffix`, verbatim and within some edits.

    The event ends at a border of tokens, and any text may follow. All tokenisations count.

    Parameters
    ----------
    lm : CachedTransformer
    prefix : str or Context
    suffix : str
        Begins with the blank that follows the prefix.
    edits : int or Edits
        Insertions, deletions and substitutions of characters, at most.
    rule : Rule, or another function from a distribution to one over the same tokens
        Decision rule of the decoder, such as Rule(top_k=40).
    tolerance, max_expansions : float, int
        Limits of each search, as in `Query.probability`.

    Examples
    --------
    >>> extraction(lm, "Once upon a", " time there was", edits=1)
    Extraction of ' time there was'
    <BLANKLINE>
    at least  at most  tries for 50 %  text
      0.1558   0.1558               5  verbatim
      0.8793   0.8794               1  within 1 edit
    """
    arguments.function("rule", rule, "Rule(top_k=40)")
    context = as_context(lm, prefix)
    text = DFA.from_strings([arguments.text("suffix", suffix)])
    if isinstance(prefix, str):
        warn_of_seam(lm, prefix, [suffix], ask=True)
    found = []
    for each in (0, edits):
        compiled = compile_query(text, edits=each)
        space = Space(lm, compiled, rule, "prefix", first=compiled.continues())
        search = Search(space, "joint", batch=32, max_expansions=max_expansions)
        search.add(Start("", context, 0.0, compiled.parts[0]))
        found.append(bounded(search, tolerance, 1, 0, np.random.default_rng(0)))
    verbatim, near = found  # one event contains the other
    verbatim = replace(verbatim, upper=min(verbatim.upper, near.upper))
    near = replace(near, lower=max(verbatim.lower, near.lower))
    return Extraction(suffix, compiled.edits.max_cost, verbatim, near)
