"""What a geometry means for its operator, in words."""

from collections.abc import Iterable

from kvtiers.device.geometry import Geometry

_ELSEWHERE = "by layers of another pipeline stage"


def report(geometry: Geometry) -> tuple[str, ...]:
    """One line per group: what it keeps, its chunks, and who can load them."""
    return tuple(_line(geometry, group.group) for group in geometry.groups)


def _line(geometry: Geometry, index: int) -> str:
    group = geometry.groups[index]
    tensors = len({page.tensor for page in group.pages})
    bound = _words(p.why_bound for p in group.pages if not p.portable)
    per_block = _words(page.why_per_block for page in group.pages)
    return (
        f"group {index}: {_words(p.kind for p in group.pages)} in {tensors} tensors, "
        f"{group.tokens_per_chunk} tokens and {geometry.chunk_bytes(index)} bytes a chunk, copied "
        f"in {geometry.fragments_per_chunk(index)} pieces by this rank; "
        + (
            "portable to every topology"
            if geometry.portable(index)
            else f"bound to this topology ({bound or _ELSEWHERE})"
        )
        + ", "
        + (
            "and, under names of our own (chunk_keys), to every block size"
            if geometry.any_block_size(index)
            else f"bound to this block size ({per_block or _ELSEWHERE})"
        )
    )


def _words(said: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(word for word in said if word))
