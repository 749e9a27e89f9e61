"""Compact storage of masks: states with equal masks share one, and few masks are kept as arrays.

While anyone holds the array of a mask, the store returns that same array. Callers may therefore key a memo by its id.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints
from llmppl.support.locks import Lock, locked

__all__ = ["MaskStore", "PackedMask"]

Array = TypeVar("Array", bound=npt.NDArray[Any])
MASK_BYTES = 1 << 26                                # of kept arrays; all other masks are bits or ids


class PackedMask:
    """Content of a mask: `key` holds sorted int32 ids, or one bit per token.

    Bits are used where they take less memory, or if the mask was computed in this form. `mask` is the array of bools
    and `ids` that of ids, while they are kept. `recent` is True if one of them was used lately.
    """

    __slots__ = ("ids", "key", "mask", "recent", "refs")

    def __init__(self, key: bytes) -> None:
        self.key, self.recent = key, False
        self.mask: Bools | None = None
        self.ids: npt.NDArray[np.int64] | None = None
        self.refs: dict[str, weakref.ref[Any]] = {}     # to the arrays that were last returned

    def __reduce__(self) -> tuple[type[PackedMask], tuple[bytes]]:      # without its arrays
        return PackedMask, (self.key,)


class MaskStore:
    """Masks over a vocabulary of `size` tokens, one per content; `eos` is allowed where a text may end."""

    def __init__(self, size: int, eos: npt.NDArray[np.int32], turn: Lock) -> None:
        self.size, self.eos, self._lock = size, eos, turn
        self._by_key: dict[bytes, PackedMask] = {}
        self._by_bits: dict[tuple[bytes, bool], PackedMask] = {}
        self._kept: deque[tuple[PackedMask, Literal["mask", "ids"]]] = deque()
        self.nbytes = 0                             # of all kept arrays

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": deque(), "nbytes": 0}

    def of_ids(self, ids: Ints, accepts: bool) -> PackedMask:
        """Return the mask of some ids, and of eos if the text may end."""
        if accepts:
            ids = np.concatenate([ids, self.eos])
        if ids.size * 32 < self.size:
            return self.of_key(np.sort(ids).tobytes())
        mask = np.zeros(self.size, bool)
        mask[ids] = True
        return self._of_mask(np.packbits(mask).tobytes(), mask)

    def of_mask(self, mask: Bools, accepts: bool) -> PackedMask:
        """Return the mask of an array, which is changed at eos and kept."""
        mask[self.eos] = accepts
        if np.count_nonzero(mask) * 32 < self.size:
            return self.of_key(np.flatnonzero(mask).astype(np.int32).tobytes())
        return self._of_mask(np.packbits(mask).tobytes(), mask)

    def of_bits(self, bits: bytes, accepts: bool) -> PackedMask:
        """Return the mask of some bits, in which eos is not set yet."""
        found = self._by_bits.get((bits, accepts))
        if found is None:
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.size).view(bool)
            mask[self.eos] = accepts
            found = self._by_bits[bits, accepts] = self._of_mask(np.packbits(mask).tobytes() if accepts else bits, mask)
        return found

    def of_key(self, key: bytes) -> PackedMask:
        """Return the mask with this key."""
        return self._by_key.get(key) or self._by_key.setdefault(key, PackedMask(key))

    def _of_mask(self, key: bytes, mask: Bools) -> PackedMask:
        found = self.of_key(key)
        if self._alive(found, "mask") is None:
            self._keep(found, "mask", mask)
        return found

    def as_ids(self, found: PackedMask) -> npt.NDArray[np.int32] | None:
        """Return the ids of a mask whose key holds ids, else None."""
        return np.frombuffer(found.key, np.int32) if len(found.key) * 8 < self.size else None

    @locked
    def unpack(self, found: PackedMask) -> Bools:
        """Return the mask as a (V,) bool ndarray, read-only."""
        mask: Bools | None = self._alive(found, "mask")
        if mask is None:
            ids = self.as_ids(found)
            if ids is None:
                mask = np.unpackbits(np.frombuffer(found.key, np.uint8), count=self.size).view(bool)
            else:
                mask = np.zeros(self.size, bool)
                mask[ids] = True
        return self._keep(found, "mask", mask)

    @locked
    def unpack_ids(self, found: PackedMask) -> npt.NDArray[np.int64]:
        """Return the ids of the allowed tokens, (n,) int64 ndarray, read-only; the array is kept if they are few."""
        some = self.as_ids(found)
        if some is None:
            ids = np.flatnonzero(self.unpack(found))
            ids.flags.writeable = False
            return ids
        alive: npt.NDArray[np.int64] | None = self._alive(found, "ids")
        return self._keep(found, "ids", some.astype(np.int64) if alive is None else alive)

    def _alive(self, found: PackedMask, kind: str) -> Any:
        """Return the array that was last returned, if anyone still holds it."""
        ref = found.refs.get(kind)
        return ref and ref()

    def _keep(self, found: PackedMask, kind: Literal["mask", "ids"], array: Array) -> Array:
        """Keep an array; drop the oldest ones that were not used since the last check while MASK_BYTES is exceeded."""
        array.flags.writeable = False
        if isinstance(array.base, np.ndarray):          # the bits that the array views as bools
            array.base.flags.writeable = False
        if getattr(found, kind) is None:
            found.refs[kind] = weakref.ref(array)
            setattr(found, kind, array)
            self._kept.append((found, kind))
            self.nbytes += array.nbytes
        while self.nbytes > MASK_BYTES and len(self._kept) > 1:
            old = self._kept.popleft()
            if old[0].recent and old[0] is not found:
                old[0].recent = False
                self._kept.append(old)
            else:
                self.nbytes -= getattr(*old).nbytes
                setattr(*old, None)
        return array
