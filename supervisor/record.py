"""Lay numbers and texts out in shared words that other processes read at any moment.

Every number is one aligned word of 8 bytes, loaded and stored whole through
`memoryview.cast("Q")`: `struct.pack_into` clears a field before it fills it, and
other processes were seen to read that zero.

Boundary: words and texts; what they mean is said in `slot` and `pool`.
"""

from __future__ import annotations

from typing import Final

NAME_BYTES_MAX: Final = 160
"""A pool's name has at most 128 bytes, and a process adds its number."""
_MASK: Final = (1 << 64) - 1


def word(index: int, doc: str, *, writable: bool = True) -> property:
    """Make a property over one word of a record."""

    def load(self: Record) -> int:
        return self._w[index]

    def store(self: Record, value: int) -> None:
        self._w[index] = value & _MASK

    return property(load, store if writable else None, doc=doc)


class Record:
    """A run of words with texts in it."""

    __slots__ = ("_bytes", "_w", "index")

    def __init__(self, words: memoryview, index: int) -> None:
        self._w = words
        self._bytes = words.cast("B")
        self.index = index

    def text(self, length_word: int, at: int, limit: int) -> str:
        """Return a text: its length in one word, its bytes from another word on."""
        length = min(self._w[length_word], limit)
        return bytes(self._bytes[at * 8 : at * 8 + length]).decode("utf-8", "replace")

    def set_text(self, length_word: int, at: int, limit: int, text: str) -> None:
        """Store a text, cut to `limit` bytes; a reader meanwhile sees it empty or whole."""
        data = text.encode("utf-8", "replace")[:limit]
        data = data.decode("utf-8", "ignore").encode()  # never half a character at the cut
        self._w[length_word] = 0
        self._bytes[at * 8 : at * 8 + len(data)] = data
        self._w[length_word] = len(data)

    def release(self) -> None:
        """Let go of the mapping, so that it can be closed."""
        self._bytes.release()
        self._w.release()
