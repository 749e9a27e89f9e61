"""Results of queries: a Match is a string with its probability, Matches the iterator over them, MatchList a table."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmppl.constraints import Edit
from llmppl.constraints.vocabulary import Text, Token
from llmppl.lm import CachedTransformer
from llmppl.report.progress import Bar
from llmppl.report.tables import Rows, TableView, one_line
from llmppl.support.arguments import count
from llmppl.support.runtime import Stats


@dataclass(frozen=True)
class Match:
    """String of the language with its probability under the model.

    `text` is the whole string, with `prefix`. `tokens` are those after the prefix; if `log_prob` sums over several
    spellings, those of the most probable one.

    Attributes
    ----------
    log_prob : float
        Log-probability of the part after the prefix given the prefix, under the decision rule. It includes the end of
        the text if the query requires one.
    log_prob_upper : float
        Upper bound of the true value; above `log_prob` only if improbable spellings were not summed.
    log_joint : float
        `log_prob` plus the log-probability of the prefix's tokens without any rule. The first token of a context is not
        counted, unless a prefix is the empty context and the model reads that.
    log_weight : float
        Importance weight of a sample; 0 otherwise.
    edits : tuple of Edit
        Edits that make the part after the prefix from the nearest string of the pattern; places count from its start.

    Examples
    --------
    >>> match = next(search(lm, "He was (happy|sad)", prefix="He was"))
    >>> match.text, match.tokens, round(match.log_prob, 2)
    ('He was happy', (Token(634, ' happy'),), -5.6)
    """

    text: Text
    prefix: str
    tokens: tuple[Token, ...]
    log_prob: float
    log_prob_upper: float
    log_joint: float
    log_weight: float = 0.0
    edits: tuple[Edit, ...] = ()

    def __str__(self) -> str:
        return str(self.text)

    def __repr__(self) -> str:
        said = f"{str(self.text)!r}, log_prob={self.log_prob:.3f}, {len(self.tokens)} tokens"
        if self.log_weight:
            said += f", log_weight={self.log_weight:.3f}"
        if self.edits:
            said += f", {len(self.edits)} edits"
        return f"Match({said})"

    def as_dict(self) -> dict[str, Any]:
        """Return the match as a dict for JSON; tokens as ids."""
        return {
            **vars(self),
            "text": str(self.text),
            "tokens": [*map(int, self.tokens)],
            "edits": [edit._asdict() for edit in self.edits],
        }


class MatchList(TableView, list[Match]):
    """List of matches. Its repr is a table, also in a notebook; `note` says why there are no more.

    Examples
    --------
    >>> search(lm, "He was (happy|sad)", prefix="He was").take(5)
    2 matches: there are no others
    <BLANKLINE>
    log prob  tokens  text
      -5.601       1  He was happy
      -6.039       1  He was sad
    """

    note = ""

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each match."""
        return [match.as_dict() for match in self]

    def _header(self) -> str:
        noun = "match" if len(self) == 1 else "matches"
        return f"{len(self)} {noun}{self.note}"

    def _table(self) -> tuple[list[str], Rows]:
        """Return heads and rows; columns of weights and edits only if some match has them."""
        columns: dict[str, Callable[[Match], str]] = {
            "log prob": lambda match: f"{match.log_prob:.3f}"
        }
        if any(match.log_weight for match in self):
            columns["log weight"] = lambda match: f"{match.log_weight:.3f}"
        if any(match.edits for match in self):
            columns["edits"] = lambda match: str(len(match.edits))
        columns |= {"tokens": lambda match: str(len(match.tokens)), "text": one_line}
        rows = []
        for match in self:
            rows.append([show(match) for show in columns.values()])
        return list(columns), rows


class Matches(Iterator[Match]):
    """Iterator over the matches of a query, as they are found; `num_matches` counts those returned so far.

    Examples
    --------
    >>> matches = search(lm, "He was (happy|sad)", prefix="He was")
    >>> next(matches).text, matches.complete
    ('He was happy', False)
    >>> [match.text for match in matches], matches.complete
    (['He was sad'], True)
    """

    def __init__(
        self,
        lm: CachedTransformer,
        matches: Iterator[Match],
        progress: bool | None,
        search: Any = None,
    ) -> None:
        self._lm = lm
        self._matches = matches
        self._search = search
        self._before = replace(lm.stats)
        self.num_matches = 0
        # its text is read again and again
        self._bar = Bar(progress, None, lambda matches: matches, "match")

    def __next__(self) -> Match:
        with self._bar as show:  # shown only during the search
            show(self.num_matches, self)
            match = next(self._matches)
            self.num_matches += 1
            show(self.num_matches, self)
        return match

    def take(self, n: int) -> MatchList:
        """Return the next `n` matches, or fewer if there are no more."""
        found = MatchList(itertools.islice(self, count("n", n, least=0)))
        if len(found) < n and self._search is not None:
            found.note = ": there are no others"
            if not self.complete:
                most = f"{self._search.open_mass():.2g} at most"
                found.note = f": max_expansions was reached; others have probability {most}"
        return found

    @property
    def stats(self) -> Stats:
        """Counts of the language model since the query began."""
        return self._lm.stats - self._before

    @property
    def expansions(self) -> int:
        """Number of next-token distributions that were computed."""
        return self.stats.rows if self._search is None else self._search.expansions

    @property
    def complete(self) -> bool:
        """True if every match was found."""
        return self._search is not None and not self._search.heap

    def __str__(self) -> str:
        return f"{self.expansions} expansions"

    def __repr__(self) -> str:
        return f"<Matches: {self.num_matches} so far, {self.expansions} expansions; {self.stats}>"
