"""Commands that serve until they are told to end."""

import importlib
from typing import Protocol

from kvtiers.errors import Kind, KVTiersError


class Listens(Protocol):
    """Options of a service."""

    @property
    def host(self) -> str:
        """Where it listens."""


def serve(name: str, options: Listens) -> int:
    """Run ``kvtiers.<name>.run`` with these options and say where it listens; 0 when it ended.

    Raises KVTiersError if something it needs is not installed.
    """
    try:
        service = importlib.import_module(f"kvtiers.{name}.run")
    except ImportError as e:
        raise KVTiersError(
            f"the {name} needs {e.name}, which is not installed: pip install kvtiers[{name}]",
            kind=Kind.UNSUPPORTED,
        ) from e

    def started(port: int) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"kvtiers {name} listens on http://{host}:{port}", flush=True)

    service.run(options, started)
    return 0
