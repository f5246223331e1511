"""Both sides of a KV cache as torch views by place, for copies by tables of indices.

Two operations move a layer pattern's blocks, however irregular: a gather into a dense piece on the
device, and a scatter from there. Both run on the device; host memory is reached through pinned
pages. (A strided ``copy_`` between host and device would go through pageable memory, and block.)
Elements are as wide as alignment allows: the fewer, the faster.
"""

from math import gcd

import torch

from kvtiers.device.sides import Sides, Strided

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class WordCutter:
    """Views in words, equally wide on both sides. ``host`` is the area of the slots, as bytes."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    def both(self, storage: torch.Tensor, sides: Sides[Strided]) -> Sides[torch.Tensor]:
        """Views of both sides."""
        word = gcd(_word(storage, sides.device), _word(self._host, sides.host))
        return Sides(_cut(storage, sides.device, word), _cut(self._host, sides.host, word))

    def host(self, side: Strided) -> torch.Tensor:
        """A view of the area of the slots."""
        return _cut(self._host, side, _word(self._host, side))


def _word(flat: torch.Tensor, side: Strided) -> int:
    """Bytes of the widest word of which ``side`` consists."""
    return gcd(8, side.shape[-1], *side.strides[:-1], side.offset, flat.data_ptr())


def _cut(flat: torch.Tensor, side: Strided, word: int) -> torch.Tensor:
    """A view of ``flat`` bytes whose last dimension is dense, in words of ``word`` bytes."""
    words = flat[: len(flat) // word * word].view(_WORDS[word])
    return words.as_strided(
        (*side.shape[:-1], side.shape[-1] // word),
        (*(stride // word for stride in side.strides[:-1]), 1),
        side.offset // word,
    )
