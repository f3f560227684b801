"""Memory handed out in one piece: two allocators from before there were pages. Pure Python.

Source: Knuth, The Art of Computer Programming, volume 1, section 2.5 (first fit, the buddy system,
external fragmentation).
Cost: first fit looks through the gaps; a buddy takes constant time for each size, and wastes up to
half of a piece.
"""


class FirstFit:
    """Pieces of any length from one line of slots: each from the first gap that is long enough."""

    def __init__(self, size: int):
        self.gaps = [(0, size)]  # (start, length), by start

    def allocate(self, length: int) -> int | None:
        """Start of a piece, or None if no gap is long enough."""
        for i, (start, gap) in enumerate(self.gaps):
            if gap >= length:
                self.gaps[i : i + 1] = [(start + length, gap - length)] if gap > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Give a piece back; adjacent gaps become one."""
        merged: list[tuple[int, int]] = []
        for a, n in sorted([*self.gaps, (start, length)]):
            if merged and sum(merged[-1]) == a:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((a, n))
        self.gaps = merged

    @property
    def n_free(self) -> int:
        return sum(n for _, n in self.gaps)


class Buddy:
    """Pieces whose lengths are powers of two.

    A larger piece is split into halves (buddies), and two buddies are joined when both are free.
    """

    def __init__(self, size: int):
        self._free: dict[int, set[int]] = {}  # length -> starts
        start = 0
        # A pool of any size is cut into a few powers of two.
        for power in reversed(range(size.bit_length())):
            if size >> power & 1:
                self._free.setdefault(1 << power, set()).add(start)
                start += 1 << power
        self._size = size

    @staticmethod
    def rounded(length: int) -> int:
        """Length of a piece for `length` tokens: the next power of two."""
        return 1 << (length - 1).bit_length()

    def allocate(self, length: int) -> int | None:
        """Start of a piece of the next power of two, or None."""
        wanted = self.rounded(length)
        fitting = [n for n, starts in self._free.items() if n >= wanted and starts]
        if not fitting:
            return None
        n = min(fitting)
        start = min(self._free[n])
        self._free[n].remove(start)
        while n > wanted:  # keep the first half; the second becomes free
            n //= 2
            self._free.setdefault(n, set()).add(start + n)
        return start

    def free(self, start: int, length: int) -> None:
        """Give back the piece for `length` tokens."""
        n = self.rounded(length)
        while start ^ n in self._free.get(n, ()):
            self._free[n].remove(start ^ n)
            start, n = min(start, start ^ n), 2 * n
        self._free.setdefault(n, set()).add(start)

    @property
    def n_free(self) -> int:
        return sum(n * len(starts) for n, starts in self._free.items())
