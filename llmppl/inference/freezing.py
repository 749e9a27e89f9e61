"""The garbage collector while many tasks run: what was there before is looked through once.

A full collection looks through all objects of the process, of which torch and transformers alone make 0.2 s, and runs
that are under way together let objects live long enough to ask for it often. So the first that comes by itself while
tasks run is the last to do so: what it has left is frozen (`gc.freeze`) until they end. Garbage that was there has gone
by then, and garbage that is made later goes as ever. A program that has frozen objects itself is left to it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_runs = set[object]()                                   # no lock: where two threads begin and end at the same moment,
_frozen = False                                         # nothing is frozen, or until the next run ends


@contextmanager
def collected_once() -> Iterator[None]:
    """While it lasts, a full collection looks once through what there is; several may last at a time."""
    run = object()
    try:
        _runs.add(run)
        if _freeze not in gc.callbacks:
            gc.callbacks.append(_freeze)
        yield
    finally:
        _runs.discard(run)
        if not _runs:
            _unfreeze()


def _freeze(phase: str, info: dict[str, int]) -> None:
    """What the collector calls before and after it has run."""
    global _frozen
    if phase == "stop" and info["generation"] == 2 and _runs and not gc.get_freeze_count():
        gc.freeze()
        _frozen = True


def _unfreeze() -> None:
    global _frozen
    with suppress(ValueError):                          # another thread has
        gc.callbacks.remove(_freeze)
    if _frozen:
        _frozen = False
        gc.unfreeze()
