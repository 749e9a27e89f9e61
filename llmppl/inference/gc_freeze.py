"""The garbage collector while many tasks run: what was there before is looked through once.

A full collection looks through all objects of the process, of which torch and transformers alone make 0.2 s, and runs
that are under way together let objects live long enough to ask for it often. So the first that comes by itself while
tasks run is the last to do so: what it has left is frozen (`gc.freeze`) until they end. Garbage that was there has gone
by then, and garbage that is made later goes as ever. A program that has frozen objects itself is left to it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_runs = set[object]()                                   # no lock: where two threads begin and end at the same moment,
_frozen = False                                         # nothing is frozen, or until the next run ends
_before = 0                                             # full collections when the first run began


@contextmanager
def collected_once() -> Iterator[None]:
    """While it lasts, a full collection looks once through what there is; several may last at a time."""
    global _before, _frozen
    run = object()
    try:
        if not _runs:
            _before = _full_collections()
        _runs.add(run)
        yield
    finally:
        _runs.discard(run)
        if _frozen and not _runs:
            _frozen = False
            gc.unfreeze()


def freeze() -> None:
    """Freeze what is there, if a full collection came since the tasks began. Inference calls it after each step.

    The collector could call it by `gc.callbacks`, but Python drops what a signal handler raises there.
    """
    global _frozen
    if _runs and not _frozen and _full_collections() > _before and not gc.get_freeze_count():
        gc.freeze()
        _frozen = True


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])
