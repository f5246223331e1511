"""Pages that every rank holds whole: the latent of MLA, its indexer, and states not divided."""

from kvtiers.device.geometry import PageMap, Run


def latent_page(
    tensor: int,
    page_bytes: int,
    ranks: int,
    rank: int,
    *,
    kind: str = "latent",
    order: str = "",
    why_per_block: str = "",
) -> PageMap:
    """The same ``page_bytes`` bytes on all ranks, which take turns to store them.

    ``why_per_block`` is empty where the page is a row of bytes per token, one after the other.
    """
    return PageMap(
        tensor=tensor,
        local_bytes=page_bytes,
        canonical_bytes=page_bytes,
        runs=(Run(0, 0, page_bytes),),
        num_writers=ranks,
        writer_index=rank,
        kind=kind,
        order=order,
        why_per_block=why_per_block,
    )
