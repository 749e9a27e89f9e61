"""What masks say, kept small: states with equal masks share one, and few are kept as bools."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from llmppl.exclusive import Turn, in_turn
from llmppl.masks.constraint import Bools, Ints

__all__ = ["MaskStore", "PackedMask"]

MASK_BYTES = 1 << 26                                # of masks kept as bools; the others are kept as bits or ids


class PackedMask:
    """What a mask says: sorted int32 ids, or where those take more room, or it is found so, a bit for every token."""

    __slots__ = ("key", "mask")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.mask: Bools | None = None


class MaskStore:
    """The masks over a vocabulary of `size` tokens, one of each content. `eos` is allowed where a text may end."""

    def __init__(self, size: int, eos: npt.NDArray[np.int32], turn: Turn) -> None:
        self.size, self.eos, self._turn = size, eos, turn
        self._by_key: dict[bytes, PackedMask] = {}
        self._by_bits: dict[tuple[bytes, bool], PackedMask] = {}
        self._unpacked: deque[PackedMask] = deque()

    def of_ids(self, ids: Ints, accepts: bool) -> PackedMask:
        """The mask of some ids, and of eos if the text may end."""
        if accepts:
            ids = np.concatenate([ids, self.eos])
        if ids.size * 32 < self.size:
            return self.of_key(np.sort(ids).tobytes())
        mask = np.zeros(self.size, bool)
        mask[ids] = True
        return self._of_mask(np.packbits(mask).tobytes(), mask)

    def of_bits(self, bits: bytes, accepts: bool) -> PackedMask:
        """The mask that is given as bits, in which eos has no place yet."""
        found = self._by_bits.get((bits, accepts))
        if found is None:
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.size).view(bool)
            mask[self.eos] = accepts
            found = self._by_bits[bits, accepts] = self._of_mask(np.packbits(mask).tobytes() if accepts else bits, mask)
        return found

    def of_key(self, key: bytes) -> PackedMask:
        """The mask with this key."""
        return self._by_key.get(key) or self._by_key.setdefault(key, PackedMask(key))

    def adopt(self, masks: Iterable[PackedMask]) -> None:
        """Take over masks that were made elsewhere."""
        self._by_key.update((found.key, found) for found in masks)

    def _of_mask(self, key: bytes, mask: Bools) -> PackedMask:
        found = self.of_key(key)
        if found.mask is None:
            self._hold(found, mask)
        return found

    def as_ids(self, found: PackedMask) -> npt.NDArray[np.int32] | None:
        """The ids of a mask that is kept by them."""
        return np.frombuffer(found.key, np.int32) if len(found.key) * 8 < self.size else None

    @in_turn
    def unpack(self, found: PackedMask) -> Bools:
        """(V,) bool ndarray, read-only."""
        ids = self.as_ids(found)
        if ids is None:
            mask = np.unpackbits(np.frombuffer(found.key, np.uint8), count=self.size).view(bool)
        else:
            mask = np.zeros(self.size, bool)
            mask[ids] = True
        return self._hold(found, mask)

    def _hold(self, found: PackedMask, mask: Bools) -> Bools:
        """Keep a mask unpacked, while there is room."""
        mask.flags.writeable = False
        self._unpacked.append(found)
        found.mask = mask
        while len(self._unpacked) * mask.size > MASK_BYTES and len(self._unpacked) > 1:
            self._unpacked.popleft().mask = None
        return mask
