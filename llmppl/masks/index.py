"""TokenIndex: which tokens of a vocabulary may follow, in every state of a recognizer.

The one idea: one walk of the vocabulary's trie beside a recognizer (`llmppl.masks.trie`) finds every token that may
follow a state, and it is made once for each state that is met.

Words. A *mask* holds a bool for every token of the vocabulary, a *set* is what a mask says: states
with equal sets share one mask. The *end* is the state after an eos token. A *dead end* is a state in which the text is
not finished and no token fits, though bytes would: it can be there only if the vocabulary lacks single bytes.

Sources: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models": Algorithm 3 is the walk for one
token, which the trie makes for all of them at once; Algorithm 4 is `TokenIndex.build_all`.
"""

from __future__ import annotations

import math
import zipfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llmppl.arguments import count
from llmppl.exclusive import Turn, in_turn
from llmppl.masks.constraint import Bools, Index, Ints, Recognizer, State, TabledRecognizer, VocabularyLike
from llmppl.masks.trie import Numbered, Reached, Tabled, Trie, fingerprint, trie_of, walk_state
from llmppl.shared import Shared

__all__ = ["END", "TokenIndex", "WholeIndex"]

FORMAT = 1                                          # of saved files
MASK_BYTES = 1 << 26                                # of masks kept as bools; the others are kept as bits or ids
NUMBERED = 1 << 16                                  # states without a table that are kept with their steps
SEARCHED = 100_000                                  # states without a table that an end is looked for in


class _End:
    """The state after an eos token: the text is over, and nothing may follow."""

    def __repr__(self) -> str:
        return "END"

    def __reduce__(self) -> str:                    # copies and pickles are the same object
        return "END"


END = _End()


class _Set:
    """What a mask says: sorted int32 ids, or where those take more room, or it is found so, a bit for every token."""

    __slots__ = ("key", "mask")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.mask: Bools | None = None


class Built(Protocol):
    """What a recognizer that knows better than rows of states builds of a vocabulary."""

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...


@runtime_checkable
class Builds(Protocol):
    """A recognizer that builds what masks need in its own way."""

    def read_all(self, trie: Trie, most: int, /) -> Built: ...


class TokenIndex(Index):
    """For every state of a recognizer, which tokens of a vocabulary may follow, and where they lead.

    A token may follow if some accepted string goes on with its bytes, so a mask always holds all tokens that fit and
    never forces a canonical one. States are the recognizer's own, and END after an eos token. Copies are the index
    itself; masks are computed when first asked for, by one thread at a time for all indices of a Regex, DFA or Grammar.

    Parameters
    ----------
    recognizer : Recognizer
        A Regex, a DFA, a Grammar, or anything with `start`, `step` and `accepts`.
    vocab : VocabularyLike

    Raises
    ------
    TypeError
        If `recognizer` is none, such as a str.
    ValueError
        If the recognizer accepts nothing, or no sequence of tokens spells anything that it accepts. (The second is
        looked for in some hundred states only, and only if the vocabulary lacks single bytes.)
    """

    def __init__(self, recognizer: Recognizer | TabledRecognizer, vocab: VocabularyLike) -> None:
        if not all(hasattr(recognizer, name) for name in ("start", "step", "accepts")):
            raise TypeError(_no_recognizer(recognizer))
        self.recognizer = recognizer
        self.vocab = vocab
        self.trie = trie_of(vocab)
        self.start: State = recognizer.start
        self.end = END
        tabled = isinstance(recognizer, TabledRecognizer)
        self._graph: Tabled | Numbered = Tabled(recognizer) if tabled else Numbered(recognizer)  # type: ignore[arg-type]
        self._tabled = tabled
        self._token_mask = None if tabled else getattr(recognizer, "token_mask", None)
        self._token_step = None if tabled else getattr(recognizer, "token_step", None)
        self._eos = np.array(sorted(vocab.eos_ids), np.int32)
        self._sets: dict[State, _Set] = {}          # by state
        self._distinct: dict[bytes, _Set] = {}
        self._packed: dict[tuple[bytes, bool], _Set] = {}
        self._unpacked: deque[_Set] = deque()
        self._within: dict[tuple[State, float], _Set] = {}
        self._steps: dict[tuple[State, int], State] = {}
        self._reached: Reached | None = None
        self._distances = np.zeros(0)
        self._accept_memo: dict[State, float] = {}
        self._whole: WholeIndex | None = None
        turn = getattr(recognizer, "_turn", None)
        self._turn = turn if isinstance(turn, Turn) else Turn()
        if self.start is None or (tabled and self.start == 0):
            raise ValueError(f"{self._name} accepts no string at all")
        self._refuse_gaps()

    @property
    def _name(self) -> str:
        name = repr(self.recognizer)
        return type(self.recognizer).__name__ if name.startswith("<") else name

    def __repr__(self) -> str:
        return f"TokenIndex({self._name}, {len(self.trie.tokens)} tokens, {len(self._sets)} masks)"

    def mask(self, state: State) -> Bools:
        """Tokens that may follow `state`.

        Parameters
        ----------
        state : hashable, from `start`, `advance` or `after`

        Returns
        -------
        (V,) bool ndarray, read-only
            True at v if some accepted string continues `state` with the bytes of token v; at an eos iff `state`
            accepts; nowhere at END, at a dead end, and at tokens without bytes. States with equal sets share one.

        Raises
        ------
        ValueError
            If `state` is not one of this index, as far as that can be told.
        """
        found = self._sets.get(state)
        if found is None:
            found = self._find(state)
        mask = found.mask                           # read once: another thread may take it away
        return mask if mask is not None else self._unpack(found)

    def allowed(self, state: State) -> npt.NDArray[np.int64]:
        """Tokens that may follow `state`: (n,) int64 ndarray of ids, ascending, read-only."""
        found = self._sets.get(state) or self._find(state)
        if self._narrow(found):
            ids = np.frombuffer(found.key, np.int32).astype(np.int64)
        else:
            ids = np.flatnonzero(self.mask(state))
        ids.flags.writeable = False
        return ids

    def accepts(self, state: State) -> bool:
        """Whether the text may end in `state`; at END it has."""
        return state is END or bool(self.recognizer.accepts(self._checked(state)))

    def advance(self, state: State, token: int) -> State:
        """The state after `token`; END after an eos.

        Raises
        ------
        ValueError
            If `token` may not follow `state`, or is not in the vocabulary.
        """
        key = (state, token)
        found = self._steps.get(key)
        if found is None:
            data = self.trie.tokens[token] if 0 <= token < len(self.trie.tokens) else b""
            found = self._advance(state, token, data)
            if len(self._steps) > NUMBERED:
                self._steps.clear()
            self._steps[key] = found
        return found

    def after(self, text: str | bytes) -> State:
        """The state after a text that is already there, of which no token need be known.

        Raises
        ------
        ValueError
            If no accepted string begins with `text`; names the place and the byte.
        """
        data = text if isinstance(text, bytes) else getattr(text, "bytes", None) or text.encode()
        state, at = self._read(self.start, data)
        if at < len(data):
            raise ValueError(
                f"{self._name}: byte {at} of the text, {data[at : at + 1]!r} {_after(data[:at])}, leaves the language: "
                f"{self._wishes(state)}"
            )
        return state

    def next_bytes(self, state: State) -> bytes:
        """The bytes that may follow `state`, ascending; b"" if none may."""
        if state is END:
            return b""
        state = self._checked(state)
        return bytes(byte for byte in range(256) if self._step(state, byte) is not None)

    def tokens_to_accept(self, state: State) -> float:
        """The least number of tokens from `state` to one that accepts, an eos not counted; inf if there is no way.

        For a tabled recognizer all states are looked at together, once. For others the states are searched in turn,
        which is slow where a state has many successors.

        Raises
        ------
        ValueError
            If the recognizer has no table, and the search has met a hundred thousand states.
        """
        if state is END:
            return 0
        state = self._checked(state)
        if not self._tabled:
            return self._search_acceptance(state)
        distances, row_of = self._graph_distances(int(state))
        found = float(distances[row_of[state]])
        return int(found) if math.isfinite(found) else found

    def mask_within(self, state: State, n: float) -> Bools:
        """Tokens after which the text can still be finished with n - 1 tokens more, an eos not counted.

        With `n` infinite only the tokens are missing that lead to where no sequence of tokens can finish. The mask at
        an eos is that of `mask`.

        Returns
        -------
        (V,) bool ndarray, read-only
        """
        if state is END:
            return self.mask(END)
        found = self._within.get((state, n))
        if found is None:
            found = self._find_within(state, n)
        mask = found.mask
        return mask if mask is not None else self._unpack(found)

    def build_all(self, max_states: int = 1_000_000) -> WholeIndex | Built:
        """The sets and steps of all states that tokens reach from the start (Algorithm 4), as compact arrays.

        A grammar has states without number where it nests. What is built for it is the vocabulary read from every place
        where its lexer may stand (Sec. 4.2), with `len` and `nbytes`; masks then only take runs of the parser, whose
        results are kept by the states on top of its stack.

        Raises
        ------
        ValueError
            If there are more than `max_states` states, or places of the lexer; if a grammar has a postlex.
        """
        max_states = count("max_states", max_states)
        if isinstance(self.recognizer, Builds):
            return self.recognizer.read_all(self.trie, max_states)
        return self._build_rows(max_states)

    @in_turn
    def _build_rows(self, max_states: int) -> WholeIndex:
        if self._whole is not None:
            return self._whole
        if self._tabled:
            self.recognizer.explore()  # type: ignore[union-attr]
        small = np.uint16 if self._tabled and len(self._graph.table) <= 1 << 16 else np.int32
        states: list[State] = []
        accepting: list[bool] = []
        sets: list[_Set] = []
        nexts: list[Ints] = []
        sizes: list[Ints] = []
        reached = Reached(self._graph, self.trie, max_states)

        def take(first: int, ids: Ints, rows: Ints, begin: Ints) -> None:
            last: dict[int, tuple[Ints, bool, _Set]] = {}  # by size: neighbours are often equal
            numbers = reached.states[first : first + begin.size - 1].tolist()
            for number, a, b in zip(numbers, begin[:-1].tolist(), begin[1:].tolist(), strict=True):
                state = self._graph.state(number)
                accepts = bool(self.recognizer.accepts(state))
                seen = last.get(b - a)
                if seen is None or seen[1] != accepts or not np.array_equal(seen[0], ids[a:b]):
                    seen = last[b - a] = ids[a:b], accepts, self._share(ids[a:b], accepts)
                self._sets[state] = seen[2]
                states.append(state)
                accepting.append(accepts)
                sets.append(seen[2])
            nexts.append(rows.astype(small))
            sizes.append(np.diff(begin))

        reached.on_rows = take
        reached.reach(self._graph.number(self.start))
        begin = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        self._whole = WholeIndex(self, states, np.array(accepting), sets, begin, np.concatenate(nexts))
        return self._whole

    def save(self, path: str | Path) -> None:
        """Write the whole index to a file, from which `load` makes it again without the recognizer.

        Raises
        ------
        TypeError
            If the recognizer is not tabled: its states cannot be written.
        """
        if not self._tabled:
            raise TypeError(f"only the index of a recognizer with a table can be saved (a Regex, a DFA), not {self!r}")
        whole = self._build_rows(1_000_000)
        recognizer: Any = self.recognizer
        seen = np.zeros(len(recognizer.table), bool)
        new = np.array([self.start])
        while new.size:
            seen[new] = True
            targets = np.unique(recognizer.table[new])
            new = targets[~seen[targets] & (targets > 0)]
        size = int(np.flatnonzero(seen)[-1]) + 1
        distinct = {found.key: i for i, found in enumerate(dict.fromkeys(whole._sets))}
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                format=FORMAT,
                name=self._name,
                vocabulary=fingerprint(self.vocab),
                start=self.start,
                table=np.where(seen[:size, None], recognizer.table[:size], 0),
                accepting=recognizer.accepting[:size] & seen[:size],
                states=np.array(whole.states, np.int32),
                which=np.array([distinct[found.key] for found in whole._sets], np.int32),
                sets=np.frombuffer(b"".join(distinct), np.uint8),
                set_sizes=np.array([len(key) for key in distinct], np.int64),
                begin=whole._begin,
                next=whole._next,
            )

    @classmethod
    def load(cls, path: str | Path, vocab: VocabularyLike, recognizer: TabledRecognizer | None = None) -> TokenIndex:
        """The index that was saved; nothing is computed again.

        Raises
        ------
        ValueError
            If the file holds no index, or one of another vocabulary, or, where `recognizer` is given, of another
            recognizer.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                data = {key: file[key] for key in file.files}
            name, start, written = str(data["name"]), int(data["start"]), int(data["format"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} holds no saved TokenIndex ({error})") from None
        if written != FORMAT:
            raise ValueError(f"{path} is of format {written}, and this version reads {FORMAT}: save the index again")
        stored = _Stored(name, start, data["table"], data["accepting"])
        if recognizer is not None and not _same_language(stored, recognizer):
            raise ValueError(f"{path} is the index of {name}, which is not the language of {recognizer!r}")
        if fingerprint(vocab) != str(data["vocabulary"]):
            raise ValueError(
                f"{path} is the index of {name} over another vocabulary than this one of {len(vocab.tokens)} tokens"
            )
        index = cls(stored, vocab)
        ends = np.cumsum(data["set_sizes"]).tolist()
        keys = data["sets"].tobytes()
        distinct = [_Set(keys[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        index._distinct.update((found.key, found) for found in distinct)
        sets = [distinct[i] for i in data["which"].tolist()]
        states = data["states"].tolist()
        index._sets.update(zip(states, sets, strict=True))
        accepting = data["accepting"][data["states"]]
        index._whole = WholeIndex(index, states, accepting, sets, data["begin"], data["next"])
        return index

    # ---- what the above is made of

    def _checked(self, state: State) -> State:
        """`state`, if it can be one of this index."""
        if self._tabled:
            self._graph.number(state)
        return state

    @in_turn
    def _find(self, state: State) -> _Set:
        if state is END:
            return self._share(np.zeros(0, np.int32), False)
        state = self._checked(state)
        try:
            accepts = bool(self.recognizer.accepts(state))
            mask = None if self._token_mask is None else self._token_mask(state, self.trie)
            if isinstance(mask, bytes):
                found = self._sets[state] = self._packed.get((mask, accepts)) or self._share_packed(mask, accepts)
                return found
            if mask is None:
                ids, _ = self._walk(state)
            else:
                ids = np.flatnonzero(mask).astype(np.int32)
        except Exception as error:
            error.add_note(f"in TokenIndex.mask of the state {state!r}; is it one of {self!r}?")
            raise
        if not self._tabled and len(self._sets) > NUMBERED:
            self._sets.clear()
        found = self._sets[state] = self._share(ids, accepts)
        return found

    @in_turn
    def _find_within(self, state: State, n: float) -> _Set:
        state = self._checked(state)
        ids, ends = self._walk(state)
        if self._tabled:
            distances, row_of = self._graph_distances(int(state))
            fits = distances[row_of[ends]] <= n - 1
        else:
            targets, where = np.unique(ends, return_inverse=True)
            states = [self._graph.state(target) for target in targets.tolist()]
            fits = np.array([self._search_acceptance(target) <= n - 1 for target in states], bool)[where]
        if len(self._within) > 4096:
            self._within.clear()
        found = self._within[state, n] = self._share(ids[fits], self.accepts(state))
        return found

    def _walk(self, state: State) -> tuple[Ints, Ints]:
        if isinstance(self._graph, Numbered) and len(self._graph.states) > NUMBERED:
            self._graph = Numbered(self.recognizer)
        return walk_state(self._graph, self.trie, self._graph.number(state))

    def _share(self, ids: Ints, accepts: bool) -> _Set:
        """The set of `ids`, and eos if `accepts`; there is one of each content."""
        V = len(self.trie.tokens)
        if accepts:
            ids = np.concatenate([ids, self._eos])
        mask = None
        if ids.size * 32 < V:
            key = np.sort(ids).tobytes()
        else:
            mask = np.zeros(V, bool)
            mask[ids] = True
            key = np.packbits(mask).tobytes()
        found = self._distinct.get(key)
        if found is None:
            found = self._distinct[key] = _Set(key)
            if mask is not None:
                self._hold(found, mask)
        return found

    def _share_packed(self, bits: bytes, accepts: bool) -> _Set:
        """The same of a mask that is given as bits."""
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.trie.tokens)).view(bool)
        mask[self._eos] = accepts
        key = np.packbits(mask).tobytes() if accepts else bits
        found = self._packed[bits, accepts] = self._distinct.setdefault(key, _Set(key))
        self._hold(found, mask)
        return found

    def _narrow(self, found: _Set) -> bool:
        return len(found.key) * 8 < len(self.trie.tokens)

    @in_turn
    def _unpack(self, found: _Set) -> Bools:
        V = len(self.trie.tokens)
        if self._narrow(found):
            mask = np.zeros(V, bool)
            mask[np.frombuffer(found.key, np.int32)] = True
        else:
            mask = np.unpackbits(np.frombuffer(found.key, np.uint8), count=V).view(bool)
        return self._hold(found, mask)

    def _hold(self, found: _Set, mask: Bools) -> Bools:
        """Keep a set's mask unpacked, while there is room."""
        mask.flags.writeable = False
        self._unpacked.append(found)
        found.mask = mask
        while len(self._unpacked) * mask.size > MASK_BYTES and len(self._unpacked) > 1:
            self._unpacked.popleft().mask = None
        return mask

    def _step(self, state: State, byte: int) -> State | None:
        found = self.recognizer.step(state, byte)
        return None if self._tabled and found == 0 else found

    def _read(self, state: State, data: bytes) -> tuple[State, int]:
        """The state after as much of `data` as fits, and how much that is."""
        for at, byte in enumerate(data):
            found = self._step(state, byte)
            if found is None:
                return state, at
            state = found
        return state, len(data)

    @in_turn
    def _advance(self, state: State, token: int, data: bytes) -> State:
        if state is END:
            raise self._refused(state, token)
        state = self._checked(state)
        if not data:
            if token in self._eos and self.accepts(state):
                return END
            raise self._refused(state, token)
        if self._token_step is not None:
            found = self._token_step(state, data)
        else:
            last, at = self._read(state, data)
            found = last if at == len(data) else None
        if found is None:
            raise self._refused(state, token)
        return found

    def _refused(self, state: State, token: int) -> ValueError:
        V = len(self.trie.tokens)
        if not 0 <= token < V:
            return ValueError(f"token {token} is not in this vocabulary, whose ids are 0 to {V - 1}")
        data = self.trie.tokens[token]
        what = f"token {int(token)} ({'eos' if token in self._eos else repr(data) if data else 'special'})"
        if state is END:
            return ValueError(f"{what} cannot follow: an eos has ended the text")
        head = f"{self._name}: {what} cannot follow state {_short(state)}"
        if data:
            last, at = self._read(state, data)
            where = f"{f'after {data[:at]!r} ' if at else ''}{self._wishes(last)}, not {data[at : at + 1]!r}"
        else:
            where = self._wishes(state)
        ids = self.allowed(state).tolist()
        some = [f"{i} ({self.trie.tokens[i]!r})" if self.trie.tokens[i] else f"{i} (eos)" for i in ids[:4]]
        return ValueError(f"{head}: {where}. Tokens that can: {', '.join(some) or 'none'}{', ...' * (len(ids) > 4)}")

    def _wishes(self, state: State) -> str:
        wanted = self.next_bytes(state)
        ends = ", or the text must end" if self.accepts(state) else ""
        return f"the next byte must be one of {_ranges(wanted)}{ends}" if wanted else "the text must end"

    def _refuse_gaps(self) -> None:
        """Raise a ValueError if no tokens spell an accepted string: the start must lead to a state that accepts."""
        if self.trie.complete or self.accepts(self.start):
            return
        stack: list[tuple[State, bytes]] = [(self.start, b"")]
        seen = {self.start}
        gap: tuple[State, bytes] | None = None
        while stack:
            state, text = stack.pop()
            ids, ends = self._walk(state)
            _, where = np.unique(ends, return_index=True)
            if not where.size and gap is None:
                gap = state, text
            for i in where.tolist():
                target, data = self._graph.state(int(ends[i])), text + self.trie.tokens[ids[i]]
                if self.recognizer.accepts(target):
                    return
                if target not in seen:
                    seen.add(target)
                    stack.append((target, data))
            if len(seen) > 200:
                return
        if gap is None:
            raise ValueError(f"{self._name}: no sequence of tokens of this vocabulary spells a string that it accepts")
        state, text = gap
        wanted, tokens = self.next_bytes(state), [token for token in self.trie.tokens if token]
        begin = sum(token[0] in wanted for token in tokens)
        raise ValueError(
            f"{self._name} {_after(text)}: the next byte must be one of {_ranges(wanted)}, and none of the "
            f"{len(tokens)} tokens of this vocabulary "
            + (f"fits, though {begin} begin{'s' * (begin == 1)} with one." if begin else "begins with one.")
        )

    @in_turn
    def _graph_distances(self, state: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
        """Tokens to acceptance by row, and the row of every state's number."""
        reached, self._reached = self._reached, None    # taken away while it changes
        if reached is None:
            self.recognizer.explore()  # type: ignore[union-attr]
            reached = Reached(self._graph, self.trie, math.inf)
        if state >= reached.row_of.size or reached.row_of[state] < 0:
            reached.reach(state)
            accepting = self.recognizer.accepting[reached.states[: reached.num]]  # type: ignore[union-attr]
            self._distances = reached.distances(accepting)
        self._reached = reached
        return self._distances, reached.row_of

    @in_turn
    def _search_acceptance(self, state: State) -> float:
        """`tokens_to_accept` for a recognizer without a table, level by level from `state`."""
        if state in self._accept_memo:
            return self._accept_memo[state]
        level, seen, depth = [state], {state}, 0
        while level and not any(self.recognizer.accepts(each) for each in level):
            below: dict[State, None] = {}
            for each in level:
                _, ends = self._walk(each)
                below.update((self._graph.state(end), None) for end in np.unique(ends).tolist())
            level = [each for each in below if each not in seen]
            seen.update(level)
            depth += 1
            if len(seen) > SEARCHED:
                raise ValueError(f"{self._name}: no end found within {depth} tokens and {len(seen)} states")
        if len(self._accept_memo) > NUMBERED:
            self._accept_memo.clear()
        found = self._accept_memo[state] = depth if level else math.inf
        return found


@dataclass(frozen=True, eq=False, repr=False)
class WholeIndex(Shared):
    """All states that tokens reach from the start, as rows: the tokens that fit each, and the rows these lead to.

    Attributes
    ----------
    states : list of S states, the start first
    accepting : (S,) bool ndarray
    """

    _index: TokenIndex
    states: list[State]
    accepting: Bools
    _sets: list[_Set]
    _begin: Ints                                    # (S + 1,)
    _next: Ints                                     # (begin[S],) the tokens of a row in the order of their bytes

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"WholeIndex({len(self)} states, {self._next.size} steps, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Of all its arrays; sets that are equal are there once."""
        return self._next.nbytes + self._begin.nbytes + sum(len(found.key) for found in set(self._sets))

    def row(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps from states[i], without eos: (n,) ascending token ids and (n,) rows that they lead to."""
        order = self._index.trie.order
        tokens = order[self._index.mask(self.states[i])[order]].astype(np.int64)
        move = np.argsort(tokens)
        return tokens[move], self._next[self._begin[i] : self._begin[i + 1]][move].astype(np.int64)


class _Stored:
    """A tabled recognizer that was read from a file."""

    def __init__(self, name: str, start: int, table: npt.NDArray[np.int32], accepting: Bools) -> None:
        self.name, self.start, self.table, self.accepting = name, start, table, accepting
        self.ready = np.ones(len(table), bool)

    def __repr__(self) -> str:
        return self.name

    def step(self, state: int, byte: int) -> int | None:
        return self.table.item(state, byte) or None

    def accepts(self, state: int) -> bool:
        return self.accepting.item(state)

    def row(self, state: int) -> npt.NDArray[np.int32]:
        return self.table[state, :]

    def explore(self) -> None:
        pass


def _same_language(a: TabledRecognizer, b: TabledRecognizer) -> bool:
    """Whether no text tells two recognizers apart (Hopcroft & Karp 1971, without their merging)."""
    pairs = [(a.start, b.start)]
    seen = set(pairs)
    while pairs:
        i, j = pairs.pop()
        if (i == 0) != (j == 0) or (i and a.accepts(i) != b.accepts(j)):
            return False
        if i:
            both = np.unique(a.row(i).astype(np.int64) << 32 | b.row(j)).tolist()
            new = {(pair >> 32, pair & 0xFFFFFFFF) for pair in both} - seen
            seen |= new
            pairs += new
    return True


def _ranges(bytes: bytes) -> str:
    """b'0'..b'9', b'a'"""
    runs: list[list[int]] = []
    for byte in bytes:
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    shown = [repr(b"%c" % a) + (f"..{b'%c' % b!r}" if b > a else "") for a, b in runs[:8]]
    return ", ".join(shown) + (", ..." if len(runs) > 8 else "")


def _after(text: bytes) -> str:
    """Where in a text an error is; its last bytes if it is long."""
    if not text:
        return "at the start"
    shown = text[-24:]
    try:
        return f"after {'...' if len(text) > 24 else ''}{shown.decode()!r}"
    except UnicodeDecodeError:
        return f"after {'...' if len(text) > 24 else ''}{shown!r}"


def _no_recognizer(thing: object) -> str:
    """What to write instead of what is no recognizer."""
    kind = type(thing).__name__
    if isinstance(thing, str):
        return f"a TokenIndex takes a recognizer, not a str: wrap it: Regex({_short(thing)})"
    if hasattr(thing, "index") and not hasattr(thing, "__len__"):
        return f"a TokenIndex takes a recognizer; a {kind} makes its own index: .index(vocab)"
    return f"a TokenIndex takes a recognizer (a Regex, a DFA, a Grammar), not {_short(thing)} of type {kind}"


def _short(state: State) -> str:
    shown = repr(state)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
