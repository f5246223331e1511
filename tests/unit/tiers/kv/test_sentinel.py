"""Whoever leads a service: the chunks are where the primary is, also after another became it."""

from kvtiers.errors import Kind
from tests.servers import valkey


def test_the_primary_changes_and_is_found_again(opened):
    with valkey.watched() as watched:
        one = opened(url=watched.url)
        assert one.write(1, 2) == [None, None]
        assert watched.primary.do("DBSIZE") == 3
        valkey.wait_until(lambda: watched.replica.do("DBSIZE") == 3, "the replica has all")
        watched.primary.kill()
        assert one.read(1, 2) == [Kind.IO] * 2
        valkey.wait_until(lambda: one.read(1, 2) == [None, None], "the new primary is found")
        assert watched.leader() == watched.replica.port
        assert one.write(3) == [None]
        watched.primary.start()  # it comes back as a replica
        valkey.wait_until(watched.primary.follows, "the old primary follows the new one")
        assert one.write(4) == [None]
        assert one.read(1, 2, 3, 4) == [None] * 4


def test_an_unknown_service_costs_misses(opened, caplog):
    with valkey.watched() as watched:
        one = opened(url=watched.url + "x")
        assert "No master found for 'kvtiers-testsx'" in caplog.text
        assert one.write(1) == [Kind.IO]
