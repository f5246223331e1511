"""How many different keys went by, in a few kilobytes.

The sketch is HyperLogLog's (Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog: the analysis of a
near-optimal cardinality estimation algorithm", AofA 2007), on 64-bit hashes as in Heule, Nunkesser
and Hall, "HyperLogLog in practice" (EDBT 2013). The count is kept along with it, by the inverse of
the chance that a new key would change the sketch (HIP: Cohen, "All-distances sketches, revisited",
PODS 2014; Ting, "Streamed approximate counting of distinct elements", KDD 2014): it is exact at
first, needs no correction for small numbers, has a standard error of ``0.84 / sqrt(registers)``
against HyperLogLog's 1.04, and says of each key by how much the count grew.
"""

import xxhash

from kvtiers.chunks import Key

REGISTER_BITS = 12
REGISTERS = 1 << REGISTER_BITS
"""4096: a standard error of 1.3 %."""
_RANK_BITS = 64 - REGISTER_BITS


class Distinct:
    """Counts different keys; ``REGISTERS`` bytes, whatever their number."""

    def __init__(self) -> None:
        self.count = 0.0
        """So many, about. It never falls."""
        self._registers = bytearray(REGISTERS)
        self._chance = 1.0
        """That a new key changes a register."""

    def add(self, key: Key) -> float:
        """By how much ``count`` grew; 0 for a key that went by before."""
        bits = xxhash.xxh3_64_intdigest(key)
        register = bits & (REGISTERS - 1)
        rank = _RANK_BITS + 1 - (bits >> REGISTER_BITS).bit_length()
        before = self._registers[register]
        if rank <= before:
            return 0.0
        growth = 1.0 / self._chance
        self.count += growth
        self._registers[register] = rank
        self._chance -= (2.0**-before - 2.0**-rank) / REGISTERS
        return growth

    def check(self) -> None:
        """Raise AssertionError if the chance is not that of the registers."""
        chance = sum(2.0**-rank for rank in self._registers) / REGISTERS
        assert abs(self._chance - chance) < 1e-9, "the chance of a change is another"

    def __repr__(self) -> str:
        return f"<Distinct about {self.count:.0f} keys>"
