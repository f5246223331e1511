"""What a configuration states as the bound of a root, in bytes; nonsense is refused."""

import os

from kvtiers.chunks import PAGE_BYTES
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs.folders import nearest_folder, unusable
from kvtiers.tiers.fs.quota import RESERVED_BYTES, STATE_BYTES
from kvtiers.tiers.options import require

MAX_FRACTION = 0.95


def check_stated(
    eviction: str, capacity_bytes: int | None, capacity_fraction: float | None
) -> None:
    """Raise ConfigError unless exactly what ``eviction`` needs is stated."""
    stated = [
        f"capacity_{unit}"
        for unit, value in (("bytes", capacity_bytes), ("fraction", capacity_fraction))
        if value is not None
    ]
    if eviction == "external":
        require(
            not stated,
            stated[0] if stated else "",
            'is stated, but eviction is "external": leave it out, or let kvtiers keep the bound '
            'with "own"',
        )
        return
    require(
        bool(stated),
        "capacity_bytes",
        "is missing: give a number of bytes, or capacity_fraction, a share of the file system; or "
        'say eviction "external" (layout files) if something else keeps the folder small',
    )
    require(len(stated) == 1, "capacity_fraction", "is stated beside capacity_bytes: give one")
    if capacity_fraction is not None:
        require(
            0 < capacity_fraction <= MAX_FRACTION,
            "capacity_fraction",
            f"is {capacity_fraction:g}: give a share above 0 and up to {MAX_FRACTION}",
        )


def key_of(capacity_fraction: float | None) -> str:
    """The option that states the bound, where one does."""
    return "capacity_bytes" if capacity_fraction is None else "capacity_fraction"


def least(context: StoreContext) -> int:
    """The smallest capacity that holds one chunk, and what kvtiers needs beside it."""
    manifest = len(context.namespace.manifest().encode())
    return context.layout.slot_bytes + PAGE_BYTES + manifest + STATE_BYTES + RESERVED_BYTES


def bound_of_files(
    context: StoreContext, root: str, capacity_bytes: int | None, capacity_fraction: float | None
) -> int:
    """The bound in bytes of a root of layout ``files``, which need not be there yet.

    Raises ConfigError, naming the option, if it holds no chunk or is more than there is.
    """
    if capacity_bytes is not None:
        require(
            capacity_bytes >= least(context),
            "capacity_bytes",
            f"is {capacity_bytes}, less than one chunk with header, manifest and quota file: give "
            f"at least {least(context)}",
        )
    return resolve(context, root, capacity_bytes, capacity_fraction)


def resolve(
    context: StoreContext, root: str, capacity_bytes: int | None, capacity_fraction: float | None
) -> int:
    """The bound in bytes of a root, which need not be there yet. Raises ConfigError."""
    try:
        info = os.statvfs(nearest_folder(root))
    except OSError as e:
        raise unusable(root, e) from e
    size = info.f_blocks * info.f_frsize
    if capacity_bytes is not None:
        require(
            capacity_bytes <= size or not size,
            "capacity_bytes",
            f"is {capacity_bytes}, more than the {size} bytes of the file system that holds "
            f"{root}: give less, or capacity_fraction",
        )
        return capacity_bytes
    require(
        size > 0,
        "capacity_fraction",
        f"is stated, but the file system that holds {root} does not say how large it is: give "
        "capacity_bytes",
    )
    capacity = int((capacity_fraction or 0) * size)
    require(
        capacity >= least(context),
        "capacity_fraction",
        f"is {capacity_fraction:g}, which is {capacity} bytes of the file system that holds "
        f"{root}, less than one chunk needs: give at least {least(context)} bytes",
    )
    return capacity
