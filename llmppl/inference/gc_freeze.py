"""Garbage collection while many tasks run: objects from before the run are scanned once.

A full collection scans all objects of the process; those of torch and transformers alone take 0.2 s. Tasks that run
together keep objects alive long enough to trigger it often. So after the first full collection during a run, all
objects that it left are frozen (`gc.freeze`) until the run ends. Garbage made later is collected as usual. If the
program has frozen objects itself, nothing is done.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_runs = set[object]()                                   # no lock: if two threads begin and end at the same moment,
_frozen = False                                         # nothing is frozen, or until the next run ends
_before = 0                                             # number of full collections when the first run began


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Let `freeze` act inside the block. Several blocks may be open at a time; the last one unfreezes."""
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
    """Freeze all objects if a full collection ran since the first `frozen_gc` began. Called after each step.

    `gc.callbacks` could call it, but Python drops exceptions that a signal handler raises there.
    """
    global _frozen
    if _runs and not _frozen and _full_collections() > _before and not gc.get_freeze_count():
        gc.freeze()
        _frozen = True


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])
