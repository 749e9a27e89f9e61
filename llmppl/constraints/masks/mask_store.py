"""Compact storage of masks: states with equal masks share one, and few masks are kept as arrays.

While anyone holds the array of a mask, the store returns that same array. Callers may therefore key a memo by its id.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints
from llmppl.support.locks import Lock, locked

MASK_BYTES = 1 << 26  # of kept arrays; all other masks are bits or ids


class PackedMask:
    """Content of a mask: `key` holds sorted int32 ids, or one bit per token.

    Bits are used where they take less memory, or if the mask was computed in this form. `mask` is the array of bools
    while it is kept. `recent` is True if it was used lately.
    """

    __slots__ = ("key", "mask", "recent", "ref")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.recent = False
        self.mask: Bools | None = None
        self.ref: Any = None  # weak reference to the array that was last returned

    def __reduce__(self) -> tuple[type[PackedMask], tuple[bytes]]:  # without its array
        return PackedMask, (self.key,)


class MaskStore:
    """Masks over a vocabulary of `size` tokens, one per content; `eos` is allowed where a text may end."""

    def __init__(self, size: int, eos: npt.NDArray[np.int32], turn: Lock) -> None:
        self.size = size
        self.eos = eos
        self._lock = turn
        self._by_key: dict[bytes, PackedMask] = {}
        self._kept: deque[PackedMask] = deque()
        self.nbytes = 0  # of all kept arrays

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": deque(), "nbytes": 0}

    def of_ids(self, ids: Ints, accepts: bool) -> PackedMask:
        """Return the mask of some ids, and of eos if the text may end."""
        if accepts:
            ids = np.concatenate([ids, self.eos])
        if ids.size * 32 < self.size:
            return self._of_key(np.sort(ids).tobytes())
        mask = np.zeros(self.size, bool)
        mask[ids] = True
        return self._of_mask(np.packbits(mask).tobytes(), mask)

    def of_mask(self, mask: Bools, accepts: bool) -> PackedMask:
        """Return the mask of an array, which is changed at eos and kept."""
        mask[self.eos] = accepts
        if np.count_nonzero(mask) * 32 < self.size:
            return self._of_key(np.flatnonzero(mask).astype(np.int32).tobytes())
        return self._of_mask(np.packbits(mask).tobytes(), mask)

    def of_walk(self, mask: Bools, ids: Ints | None, accepts: bool) -> PackedMask:
        """Return the same. `ids` are those of the mask without eos; None if they are one in 32 tokens, or more."""
        mask[self.eos] = accepts
        if ids is not None and accepts:
            ids = np.concatenate([ids, self.eos])
        if ids is None or ids.size * 32 >= self.size:
            return self._of_mask(np.packbits(mask).tobytes(), mask)
        return self._of_mask(np.sort(ids).tobytes(), mask)

    def _of_key(self, key: bytes) -> PackedMask:
        return self._by_key.get(key) or self._by_key.setdefault(key, PackedMask(key))

    def _of_mask(self, key: bytes, mask: Bools) -> PackedMask:
        found = self._of_key(key)
        if not (found.ref and found.ref() is not None):
            self._keep(found, mask)
        return found

    @locked
    def unpack(self, found: PackedMask) -> Bools:
        """Return the mask as a (V,) bool ndarray, read-only; the array that was last returned, if anyone holds it."""
        mask = found.ref and found.ref()
        if mask is None and len(found.key) * 8 < self.size:
            mask = np.zeros(self.size, bool)
            mask[np.frombuffer(found.key, np.int32)] = True
        elif mask is None:
            mask = np.unpackbits(np.frombuffer(found.key, np.uint8), count=self.size).view(bool)
        return self._keep(found, mask)

    def add(self, some: Iterable[PackedMask], mask: Bools) -> None:
        """Add the tokens of some masks to an array."""
        ids = []
        for each in some:
            if len(each.key) * 8 < self.size:
                ids.append(each.key)
            else:
                mask |= self.unpack(each)
        mask[np.frombuffer(b"".join(ids), np.int32)] = True

    def _keep(self, found: PackedMask, mask: Bools) -> Bools:
        """Keep an array; drop the oldest ones that were not used since the last check while MASK_BYTES is exceeded."""
        mask.flags.writeable = False
        if isinstance(mask.base, np.ndarray):  # the bits that the array views as bools
            mask.base.flags.writeable = False
        if found.mask is None:
            found.mask = mask
            found.ref = weakref.ref(mask)
            self._kept.append(found)
            self.nbytes += mask.nbytes
        while self.nbytes > MASK_BYTES and len(self._kept) > 1:
            old = self._kept.popleft()
            if old.recent and old is not found:
                old.recent = False
                self._kept.append(old)
            else:
                self.nbytes -= self.size
                old.mask = None
        return mask
