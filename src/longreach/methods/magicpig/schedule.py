"""When keys enter the hash tables, and which keys their centre is the mean of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Both follow from the number of tokens alone, so chunks, batches and truncation do not change them.

    sinks: first keys, never in the tables. local: last keys, not in the tables. seal: keys enter in blocks of `seal`,
    cut at multiples of it. centre: most keys of the mean; 0: keys are not centred.
    """

    sinks: int
    local: int
    seal: int
    centre: int

    def stop(self, length: int) -> int:
        """Keys [sinks, stop) of a sequence of `length` tokens are in the tables; `sinks` if there are none."""
        return max((length - self.local) // self.seal * self.seal, self.sinks)

    def centre_stop(self, stop: int) -> int:
        """Keys [sinks, centre_stop) make the centre of tables that end at `stop`; `sinks` for no centre.

        The first `centre` keys, once they are there. Before that, the first seal, 2 seal, 4 seal ... positions: the
        centre of a short context changes each time the context doubles, and all its keys are hashed again.
        """
        if not self.centre or stop <= self.sinks:
            return self.sinks
        if stop >= self.sinks + self.centre:
            return self.sinks + self.centre
        doubled = self.seal << (stop // self.seal).bit_length() - 1
        return doubled if doubled > self.sinks else stop
