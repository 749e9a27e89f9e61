"""Drawings of automata: source for Graphviz, and tables for notebooks."""

from __future__ import annotations

import html

import numpy as np

from llmppl.constraints.automata.lazy_dfa import Machine

__all__ = ["to_dot", "to_html"]

MAX_ROWS = 50                                       # states in a notebook's table


def to_dot(machine: Machine) -> str:
    """Return the automaton in the language of Graphviz."""
    lines = ["digraph {", "  rankdir=LR; node [shape=circle]; start [shape=point];"]
    lines += [f"  {state} [shape=doublecircle];" for state in np.flatnonzero(machine.explore().accepting)]
    lines += [f"  start -> {machine.start};"] * bool(machine.start)
    for state, row in enumerate(machine.edges()):
        labels: dict[int, list[str]] = {}
        for lo, hi, t in row:
            labels.setdefault(t, []).append(_range(lo, hi))
        lines += [f'  {state} -> {t} [label="{" ".join(names)}"];' for t, names in labels.items()]
    return "\n".join([*lines, "}"])


def to_html(machine: Machine) -> str:
    """Return a table of the first MAX_ROWS states."""
    body = ""
    for state, row in enumerate(machine.edges()[1 : MAX_ROWS + 1], 1):
        steps = html.escape(", ".join(f"{_range(lo, hi)} → {t}" for lo, hi, t in row))
        body += f"<tr><td>{state}{' (accepts)' * machine.accepts(state)}</td><td>{steps}</td></tr>"
    name = html.escape(repr(machine))
    return f"<p>{name}</p><table><tr><th>state</th><th>byte → state</th></tr>{body}</table>"


def _range(lo: int, hi: int) -> str:
    return _byte(lo) if lo == hi else f"{_byte(lo)}-{_byte(hi)}"


def _byte(byte: int) -> str:
    """Return a label of a byte: the character if it is printable and has no meaning in Graphviz, else hexadecimal."""
    return chr(byte) if 0x20 < byte < 0x7F and chr(byte) not in '"\\' else f"x{byte:02x}"
