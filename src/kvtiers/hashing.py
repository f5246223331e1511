"""Token ids to keys, byte for byte what vLLM computes, for tools outside the engine.

A block's hash covers its whole prefix: ``H((parent, token_ids, extra_keys))``, starting from
``none_hash = H(seed)``. The algorithms are those of vLLM's ``--prefix-caching-hash-algo``: SHA-256
or XXH3-128 over a pickle (protocol 5) or over canonical CBOR (RFC 8949, section 4.2).

Pickle refers back to strings it has met before by identity, so with extra keys only the CBOR
algorithms are sure to agree between two programs. Plain text agrees under all four.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import index
from typing import Any

from kvtiers.chunks import Key, make_key
from kvtiers.errors import Kind, KVTiersError

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed for the SHA-256 algorithms when PYTHONHASHSEED is not set.

The xxhash algorithms have no default: without PYTHONHASHSEED every vLLM process draws its own.
"""

OWN_ALGORITHM = "sha256_cbor"
"""Of keys of our own: a chain of hashes like vLLM's, with a chunk in place of a block."""

ExtraKeys = Callable[[int], tuple[Any, ...] | None]
"""From the index of a block to what else names it, or ``None``. See :func:`request_extra_keys`."""


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    encoded: bytes = _optional("cbor2").dumps(value, canonical=True)
    return encoded


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    digest: bytes = _optional("xxhash").xxh3_128_digest(data)
    return digest


_ALGORITHMS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], bytes]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (_cbor, _sha256),
    "xxhash": (_pickled, _xxh3_128),
    "xxhash_cbor": (_cbor, _xxh3_128),
}
ALGORITHMS = tuple(_ALGORITHMS)


def _optional(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise KVTiersError(
            f"this hash algorithm needs the Python package {module}; install it, or choose another"
            " algorithm",
            kind=Kind.UNSUPPORTED,
            operation="hash",
        ) from None


def hasher(algorithm: str) -> Callable[[Any], bytes]:
    """The function of an algorithm, from a value to its digest. Raises KVTiersError if there is
    none, or if a package is missing for it.
    """
    if algorithm not in _ALGORITHMS:
        raise KVTiersError(
            f"unknown hash algorithm {algorithm!r}; use one of {', '.join(ALGORITHMS)}",
            kind=Kind.UNSUPPORTED,
            operation="hash",
        )
    encode, digest = _ALGORITHMS[algorithm]
    return lambda value: digest(encode(value))


def none_hash(algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> bytes:
    """The parent of a first block: 32 bytes for SHA-256, 16 for XXH3."""
    return hasher(algorithm)(seed)


def seed_id(given: str | None) -> str:
    """What to call the seed of block hashes without telling it; ``None``: vLLM's default."""
    if given is None:
        return DEFAULT_SEED
    return f"sha256:{hashlib.sha256(given.encode()).hexdigest()[:16]}"


def request_extra_keys(
    lora: tuple[str, str] | None = None, cache_salt: str | None = None
) -> ExtraKeys:
    """Extra keys of a text request: ``lora`` is the adapter's name and its path, as vLLM has them.

    The salt names the first block only; later blocks inherit it through their parent.
    """
    adapter = (("lora", *lora),) if lora else ()
    salt = (("cache_salt", cache_salt),) if cache_salt else ()
    return lambda block: (adapter + salt if block == 0 else adapter) or None


def block_hashes(
    token_ids: Sequence[int],
    tokens_per_hash: int,
    algorithm: str = "sha256",
    seed: str = DEFAULT_SEED,
    extra_keys: ExtraKeys = lambda block: None,
) -> list[bytes]:
    """Hashes of the full blocks of ``tokens_per_hash`` tokens; a partial last block has none."""
    if tokens_per_hash < 1:
        raise ValueError(f"tokens_per_hash must be at least 1, not {tokens_per_hash}")
    digest = hasher(algorithm)
    hashes = [digest(seed)]
    for block in range(len(token_ids) // tokens_per_hash):
        start = block * tokens_per_hash
        tokens = token_ids[start : start + tokens_per_hash]
        hashes.append(next_hash(digest, hashes[-1], tokens, extra_keys(block)))
    return hashes[1:]


def next_hash(
    digest: Callable[[Any], bytes],
    parent: bytes,
    tokens: Sequence[int],
    extra_keys: tuple[Any, ...] | None,
) -> bytes:
    """The hash of a full block of ``tokens`` after the prefix ``parent``."""
    # Other integer types (NumPy's) would be encoded differently.
    return digest((parent, tuple(map(index, tokens)), extra_keys))


def chunk_keys(
    token_ids: Sequence[int],
    group: int,
    tokens_per_chunk: int,
    tokens_per_hash: int,
    algorithm: str = "sha256",
    seed: str = DEFAULT_SEED,
    extra_keys: ExtraKeys = lambda block: None,
) -> list[Key]:
    """Keys of the full chunks of a KV-cache group: each is named by its last hash.

    Raises ValueError when a chunk is not a whole number of hashes.
    """
    hashes_per_chunk, rest = divmod(tokens_per_chunk, tokens_per_hash)
    if rest or hashes_per_chunk < 1:
        raise ValueError(
            f"tokens_per_chunk ({tokens_per_chunk}) must be a multiple of"
            f" tokens_per_hash ({tokens_per_hash})"
        )
    hashes = block_hashes(token_ids, tokens_per_hash, algorithm, seed, extra_keys)
    return [make_key(h, group) for h in hashes[hashes_per_chunk - 1 :: hashes_per_chunk]]


def event_hash(digest: bytes) -> int:
    """A block hash as KV events carry it by default: its last 8 bytes, big-endian, unsigned."""
    return int.from_bytes(digest[-8:], "big")
