from collections.abc import Callable, Iterator

import pytest

from tests.servers import valkey
from tests.unit.tiers.kv.kv_kit import Opened, open_store


@pytest.fixture
def server() -> Iterator[valkey.Valkey]:
    """A server of this test's own, to be killed, frozen or told otherwise."""
    with valkey.valkey() as made:
        yield made


@pytest.fixture
def opened() -> Iterator[Callable[..., Opened]]:
    """Opens stores, on the shared server unless a url is given; closes them."""
    stores: list[Opened] = []

    def open_one(**options: object) -> Opened:
        stores.append(open_store(**options))
        return stores[-1]

    yield open_one
    for each in stores:
        each.store.check()
        each.store.close()
