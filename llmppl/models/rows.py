"""Rows: texts under a constraint as plain records, for a population that steps them together.

A *row* is a text with the state of its constraint. It never changes, so copies of a particle share it. A *site* is a
row that continues: the tables of its next token, under the rule, the end and the masks. `sites_of` computes those of
many rows together. Masks and moves of the constraint are remembered by its state. Weights, choices and texts are those
of `ConstrainedText.step`, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.vocabulary import Text, Token
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.distributions import NO_RULE, Mask, Rule, Table, is_greedy
from llmppl.distributions.blocks import fill_sums
from llmppl.lm.context import Context, TokenDistribution, eos_of, extended, table_with_end
from llmppl.models.choices import Choice, Noted, Sampled, State
from llmppl.models.programs import ConstrainedText, Written
from llmppl.support.graphs import Memo
from llmppl.support.runtime import ContextTooLong, request_all

MAX_MOVES = 1 << 16  # that are remembered
MAX_MASKS = 1 << 8
# attributes of a program, beside its constraint, that its next token depends on
RULES = ("rule", "end", "stop", "min_tokens", "max_tokens", "labels", "_power_", "_keeps_refused_")


def is_row(program: Any) -> bool:
    """Return True if a program can be a row: no function of the user reads its text or changes its choices."""
    return (
        type(program) is ConstrainedText
        and program.mask is None
        and program.constraint is None
        and program._guide.fits is None
        and isinstance(program.rule, Rule)
    )


class Move(NamedTuple):
    """A token in a state of the constraint.

    after : the state after it
    goes_on : True if the text neither ends with this token nor may end after it
    """

    token: Token
    after: Any
    goes_on: bool


class Rules:
    """Rules of a program for the next token: masks and moves by state."""

    def __init__(self, program: ConstrainedText) -> None:
        self.program = program
        self.guide = program._guide
        self.vocab = program.context.lm.vocab
        self.is_greedy = is_greedy(program.rule)
        self.power = program._power_
        # functions of the program, since bound methods would be a cycle that keeps the language model
        self.moves = Memo[tuple[Any, int], Move](partial(move_of, program), MAX_MOVES)
        self.masks = Memo[tuple[Any, float, bool], Mask | None](
            partial(mask_of, program), MAX_MASKS
        )
        self.stays = Memo[Any, Mask | None](partial(stays_of, program), MAX_MASKS)

    def are_of(self, program: ConstrainedText) -> bool:
        """Return True if these are the rules of another program, too."""
        own = self.program
        if program._guide is not self.guide:
            return False
        return all(getattr(program, name) == getattr(own, name) for name in RULES)

    def mask(self, row: Row) -> Mask | None:
        """Return the mask of the next token; None if all tokens may follow."""
        left = self.guide.must_end_by - row.num_tokens
        return self.masks[row.state, left, row.num_tokens < self.program.min_tokens]


def move_of(program: ConstrainedText, key: tuple[Any, int]) -> Move:
    """Return the move of a state of the constraint by a token."""
    state, id = key
    guide = program._guide
    token = guide.vocab[id]
    if guide.ends(state, token):
        return Move(token, state, False)
    after = guide.advance(state, token)
    return Move(token, after, not program.stop and not may_be_over(program, after))


def may_be_over(program: ConstrainedText, state: Any) -> bool:
    """Return True if a text may have to end in a state, whatever the model says."""
    index = program.index
    if index is None or program.end == "eos" or not index.accepts(state):
        return False
    return program.end == "prefix" or len(index.allowed(state)) == len(index.vocab.eos_ids)


def mask_of(program: ConstrainedText, key: tuple[Any, float, bool]) -> Mask | None:
    """Return the mask by the state, the number of tokens left, and True before `min_tokens`; None if all may follow."""
    state, left, is_early = key
    guide = program._guide
    num_tokens = 0
    if left < math.inf:
        num_tokens = int(guide.must_end_by - left)
    masks = [*guide.masks(state, num_tokens)]
    if is_early:
        masks.append(guide.vocab.not_eos)
    if not masks:
        return None
    if len(masks) == 1:
        return masks[0]
    found: Mask = np.logical_and.reduce(masks)
    return found


def stays_of(program: ConstrainedText, state: Any) -> Mask | None:
    """Return the tokens after which the text goes on; None if the probability of its end is that of EOS."""
    index = program.index
    if program.end == "eos" or (index is None and program.end == "boundary"):
        return None
    not_eos: Mask = program._guide.vocab.not_eos
    if index is None:
        return not_eos
    if not index.accepts(state):
        return None
    found: Mask = index.mask(state) & not_eos
    return found


@dataclass(eq=False, slots=True)
class Row:
    """Text of a particle.

    base : the program from which it descends, with all attributes that no step changes
    data, before : bytes of the text, and of that before the last step
    parent, token : the row before the last token and that token, until its context is known
    gain : log-weight of the statements since `base`; None if there was none
    ended, cut, limit, refused, death : as the attributes of the program, with underscores where it has them
    """

    base: ConstrainedText
    data: bytes
    before: bytes
    state: Any
    num_tokens: int
    noted: Noted
    known_context: Context | None
    parent: Row | None = None
    token: Token | None = None
    gain: float | None = None
    finished: bool = False
    ended: str = ""
    cut: bool = False
    limit: str = ""
    refused: str = ""
    death: str | None = None

    @classmethod
    def of(cls, program: ConstrainedText) -> Row:
        """Return the row of a program."""
        return cls(
            program,
            bytes_of(program.s),
            bytes_of(program._before_),
            program.state,
            program.num_tokens,
            program._noted_,
            program.context,
            finished=program.finished,
            ended=program.ended,
            cut=program.cut,
            limit=program._limit_,
            refused=program._refused_,
            death=program._death_,
        )

    @property
    def context(self) -> Context:
        """Context after the last token."""
        if self.known_context is None:
            set_contexts([self])
        assert self.known_context is not None
        return self.known_context

    def program(self, log_weight: float, stream: State) -> ConstrainedText:
        """Return the program with this text."""
        particle = self.base._spawn_(Sampled(stream))
        attribution = particle._attribution_
        if self.gain is not None:
            label = particle.labels["sample"]
            attribution = {**attribution, label: attribution.get(label, 0.0) + self.gain}
        vars(particle).update(
            s=Text(self.data),
            state=self.state,
            num_tokens=self.num_tokens,
            context=self.context,
            _before_=Text(self.before),
            _noted_=self.noted,
            _attribution_=attribution,
            _cut_=self.cut,
            _refused_=self.refused,
            _log_weight_=log_weight,
            _log_twist_=0.0,
        )
        # a step does not set the following either, unless something happens
        if self.finished:
            particle.finished = True
        if self.ended:
            particle.ended = self.ended
        if self.limit:
            particle._limit_ = self.limit
        if self.death is not None:
            particle._death_ = self.death
        return particle


def set_contexts(rows: Sequence[Row]) -> None:
    """Find the contexts of rows that do not know theirs. Those of their parents are known."""
    missing = [row for row in rows if row.known_context is None]
    pairs = [
        (row.parent.context, int(row.token))
        for row in missing
        if row.parent and row.token is not None
    ]
    for row, context in zip(missing, extended(pairs), strict=True):
        row.known_context = context
        row.parent = None


class Site:
    """Row that continues, and the tables of its next token.

    dist, target : tables of the model's token under the rule, and of the token or the end
    proposal : table of the allowed ones, from which the token is drawn
    """

    __slots__ = ("row", "rules", "stays", "dist", "target", "proposal", "is_masked", "_gain")

    def __init__(self, row: Row, rules: Rules, table: Table) -> None:
        self.row = row
        self.rules = rules
        self.stays = rules.stays[row.state]
        self.dist = self.target = self.proposal = table
        self.is_masked = False
        self._gain: float | None = None

    def restrict(self) -> None:
        """Restrict the proposal to the allowed tokens."""
        rules = self.rules
        mask = rules.mask(self.row)
        if mask is not None:
            self.proposal = self.proposal.masked(mask)
            self.is_masked = True
        if rules.is_greedy and self.proposal.log_total > -math.inf:
            self.dist = self.target = self.proposal = changed(
                rules.program.rule, rules, self.proposal
            )
        if rules.power != 1.0:
            self.proposal = changed(
                lambda dist: dist.tempered(1 / rules.power), rules, self.proposal
            )

    @property
    def weighs(self) -> bool:
        """True if a statement weighs the draw, even by 0."""
        if self.rules.is_greedy:
            return bool(self._gain)
        ends = self.stays is not None and self.rules.program.end == "prefix"
        return self.is_masked or ends or bool(self._gain)

    def gain(self, index: int) -> float:
        """Return the log-weight of drawing the token at `index`, and of the end of the text. It is equal for all."""
        if self._gain is None:
            gain = 0.0
            power = self.rules.power
            if power != 1.0:
                log_p = self.target.at(index) - self.target.log_total
                gain = power * log_p - (self.proposal.at(index) - self.proposal.log_total)
            elif self.proposal is not self.target:
                gain = self.proposal.log_total - self.target.log_total
            if (
                self.stays is not None
                and self.rules.program.end == "prefix"
                and not self.rules.is_greedy
            ):
                gain += power * (self.target.log_total - self.dist.log_total)
            self._gain = gain
        return self._gain


def changed(rule: Callable[[Any], Any], rules: Rules, table: Table) -> Table:
    """Return the table of a distribution of tokens under a rule."""
    found: Table = rule(TokenDistribution(rules.vocab, lambda: table)).table()
    return found


def sites_of(rows: Sequence[Row], rules: Rules) -> tuple[dict[Row, Site], dict[Row, Row]]:
    """Return the sites of rows that have not finished, and the rows after a step without a token, dead or cut."""
    set_contexts(rows)
    going = list[Row]()
    ended = dict[Row, Row]()
    for row in rows:
        try:
            row.context.check_length()
            going.append(row)
        except ContextTooLong as error:
            ended[row] = begun(row, limit=str(error), cut=True)
    sites = dict[Row, Site]()
    program = rules.program
    for site in with_tables(going, rules):
        row = site.row
        if site.proposal.log_total > -math.inf:
            sites[row] = site
            continue
        more = []
        if row.num_tokens < program.min_tokens:
            more.append(f"min_tokens={program.min_tokens}")
        ended[row] = begun(
            row, death=program._guide.dead_end(row.state, row.num_tokens, program.rule, more)
        )
    return sites, ended


def with_tables(rows: Sequence[Row], rules: Rules) -> list[Site]:
    """Return the sites of some rows, with their tables."""
    if not rows:
        return []
    nodes = [(row.context.node,) for row in rows]
    tables = request_all(rules.program.context.lm.evaluator, nodes)
    rule = rules.program.rule
    if rule is not NO_RULE and not rules.is_greedy:
        tables = [changed(rule, rules, table) for table in tables]
    sites = [Site(row, rules, table) for row, table in zip(rows, tables, strict=True)]
    ending = [
        (site, site.stays, site.dist.masked(site.stays)) for site in sites if site.stays is not None
    ]
    fill_sums([kept for _, _, kept in ending])
    for site, stays, kept in ending:
        site.target = site.proposal = table_with_end(
            site.dist, kept, stays, eos_of(rules.vocab), rules.program.end
        )
    for site in sites:
        site.restrict()
    fill_sums([site.proposal for site in sites])
    return sites


class Drawn:
    """Row after a token that goes on. It is made if a selection keeps it."""

    __slots__ = ("site", "move", "row")
    finished = False
    limit = ""
    death = None

    def __init__(self, site: Site, move: Move) -> None:
        self.site = site
        self.move = move
        self.row: Row | None = None

    def made(self) -> Row:
        """Return the row, the same one each time."""
        if self.row is None:
            self.row = next_row(self.site, self.move)
        return self.row


Maker = Row | Drawn


def row_of(maker: Maker) -> Row:
    """Return the row of a candidate."""
    return maker.made() if isinstance(maker, Drawn) else maker


def begun(row: Row, limit: str = "", cut: bool = False, death: str | None = None) -> Row:
    """Return the row after a step that ended before its token."""
    return replace(
        row,
        noted=Noted(row.noted),
        before=row.data,
        limit=limit,
        cut=cut,
        death=death,
        finished=True,
    )


def after(site: Site, index: int) -> tuple[Maker, float]:
    """Return the row after the token at `index`, and the log-weight that the step adds; -inf if it dies."""
    row = site.row
    rules = site.rules
    move = rules.moves[row.state, index]
    gain = site.gain(index)
    if move.goes_on and row.num_tokens + 1 != rules.program.max_tokens:
        return Drawn(site, move), gain
    new = next_row(site, move)
    if rules.guide.ends(row.state, move.token):
        new.known_context = row.known_context
        new.parent = None
    written = Written(row.data, row.num_tokens, row.state)
    text = rules.program._continued(written, move.token, lambda: new.context)
    new.data = text.data
    new.num_tokens = text.num_tokens
    new.state = text.state
    new.cut = text.cut
    new.refused = text.refused
    if text.death is not None:
        new.death = text.death[1]
        new.finished = True
        return new, -math.inf
    new.ended = text.ended
    new.finished = text.ended != ""
    return new, gain


def next_row(site: Site, move: Move) -> Row:
    """Return the row after a token, if the text goes on."""
    row = site.row
    gain = row.gain
    if site.weighs:
        gain = (gain or 0.0) + (site._gain or 0.0)
    noted = Noted(Noted(row.noted), Choice(move.token, 0.0))
    data = row.data + move.token.bytes
    return Row(
        row.base, data, row.data, move.after, row.num_tokens + 1, noted, None, row, move.token, gain
    )
