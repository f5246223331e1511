"""The namespaces under a root, as their manifests say."""

import os

from kvtiers.errors import map_errors
from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.places import Found, parse_manifest


def namespaces(root: str) -> list[Found]:
    """Every folder named like a namespace, by name. Raises KVTiersError."""
    with map_errors("list", root):
        return [_found(root, name) for name in sorted(names.namespaces(root))]


def _found(root: str, name: str) -> Found:
    path = os.path.join(root, name, names.MANIFEST)
    try:
        manifest = folders.read_manifest(path)
    except FileNotFoundError:
        return Found(name, None, f"it has no {names.MANIFEST}")
    except OSError as e:
        return Found(name, None, f"its {names.MANIFEST} cannot be read: {e.strerror}")
    namespace = parse_manifest(manifest)
    if namespace is None or namespace.id != name:
        return Found(name, None, f"its {names.MANIFEST} is damaged or of another namespace")
    return Found(name, namespace)
