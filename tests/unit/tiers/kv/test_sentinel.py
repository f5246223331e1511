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
        assert one.read(1, 2, 3) == [None] * 3


def test_a_primary_that_has_to_follow_another_is_left(opened):
    """It goes on answering, and would refuse every write."""
    with valkey.watched() as watched:
        one = opened(url=watched.url)
        assert one.write(1) == [None]
        valkey.wait_until(lambda: watched.replica.do("DBSIZE") == 2, "the replica has all")
        watched.switch()
        valkey.wait_until(lambda: watched.leader() == watched.replica.port, "it leads")
        watched.primary.do("REPLICAOF", "127.0.0.1", watched.replica.port)  # as Sentinel will do
        valkey.wait_until(lambda: one.write(2) == [None], "the new primary is written to")
        assert watched.replica.do("EXISTS", one.name(2)) == 1
        assert one.read(1, 2) == [None] * 2


def test_a_sentinel_that_asks_who_we_are_and_one_that_does_not_know(opened, caplog, tmp_path):
    password = tmp_path / "password"
    password.write_text("of-sentinel")
    with valkey.watched("of-sentinel") as watched:
        one = opened(url=watched.url, sentinel_password_file=str(password))
        assert one.write(1) == [None]
        other = opened(url=watched.url + "x", sentinel_password_file=str(password))
        assert "No master found for 'kvtiers-testsx'" in caplog.text
        assert other.write(1) == [Kind.IO]
