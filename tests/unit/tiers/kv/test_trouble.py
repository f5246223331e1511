"""Servers that die, hang, change their minds or are not what they were taken for: misses only."""

import contextlib
import socket
import threading
import time

import pytest
import redis

from kvtiers.chunks import Lookup
from kvtiers.errors import ConfigError, Kind, KVTiersError, Retry
from kvtiers.tiers.base import Item, StoreContext
from kvtiers.tiers.kv import KvOptions, build
from kvtiers.tiers.lanes import Inbox
from tests.servers import valkey
from tests.unit.tiers.tier_kit import LAYOUT, NAMESPACE, Bench, ManualClock, filled, key, payload

HIT, MISS = Lookup.HIT, Lookup.MISS


def bench(url: str, **options: object) -> Bench:
    """A tier on a server, under a clock that the test moves."""
    inbox = Inbox()
    clock = ManualClock()
    context = StoreContext("kv", "1:kv", NAMESPACE, LAYOUT, clock, clock, inbox.removed)
    made = Bench(build(context, KvOptions(url=url, **options)), inbox, breaker_cooldown_s=1.0)
    return made.scanned()


def test_a_server_that_is_killed_costs_misses_and_comes_back_by_itself(server):
    with bench(server.url) as tier:
        assert tier.run(tier.store_job(1, 2)).done == (key(1), key(2))
        server.kill()
        for n in range(10, 16):  # enough for the breaker
            assert tier.resolve(n) == [MISS]
        assert tier.lookup(1) == [MISS]
        assert not tier.tier.submit_load(tier.load_job(1))
        server.start()
        tier.clock.advance(1.5)
        assert tier.resolve(20) == [MISS]  # the trial
        load = tier.run(tier.load_job(1, 2))
        kinds = {error.kind for error in load.failed.values()}
        assert kinds == {Kind.VANISHED}  # it had nothing on disk
        assert tier.run(tier.store_job(1, 2)).done == (key(1), key(2))
        load = tier.load_job(1, 2)
        kept = [view[:] for view in load.views]
        assert tier.run(load).done == (key(1), key(2))
        assert [bytes(view) for view in kept] == [payload(1), payload(2)]


def test_the_connections_of_before_are_not_used_after_a_restart(server, opened):
    one = opened(url=server.url)
    one.write(1)
    server.kill()
    server.start()
    assert one.write(1) == [None]
    assert one.read(1) == [None]


def test_an_engine_starts_while_its_server_is_down(server, opened, caplog):
    server.kill()
    one = opened(url=server.url)
    assert "chunks are misses until that has passed" in caplog.text
    assert "nobody listens there" in caplog.text
    assert one.write(1) == [Kind.IO]
    assert one.failure().retry is Retry.NEVER
    server.start()
    assert one.write(1) == [None]
    assert one.read(1) == [None]
    assert server.do("GET", one.store._names.manifest) == NAMESPACE.manifest().encode()


def test_calls_to_a_server_that_hangs_end_in_time_and_say_so(server, opened):
    one = opened(url=server.url, timeout_s=0.2, connect_timeout_s=0.2)
    one.write(1)
    with server.frozen():
        began = time.monotonic()
        assert one.read(1, 2) == [Kind.TIMEOUT] * 2
        assert one.write(*range(50)) == [Kind.TIMEOUT] * 50
        for ask in (one.store.usage, lambda: one.contains(1), lambda: list(one.store.scan())):
            with pytest.raises(Exception, match="did not answer in time"):
                ask()
        assert time.monotonic() - began < 10
    assert one.read(1) == [None]  # nothing of the calls before is taken for its answer
    assert one.contains(1, 99) == [True, False]


def test_memory_that_is_gone_spoils_no_connection(opened):
    one = opened()
    one.write(1)
    gone = filled(2)
    gone.release()
    with pytest.raises(ValueError, match="released"):
        one.store.write([Item(key(1), filled(1)), Item(key(2), gone)])
    assert one.read(1) == [None]
    assert one.write(2) == [None]
    assert one.read(2, 1) == [None, None]


def test_a_tier_goes_on_while_its_server_hangs(server):
    with bench(server.url, timeout_s=0.2) as tier:
        tier.run(tier.store_job(1))
        with server.frozen():
            assert tier.lookup(1) == [HIT]
            failed = tier.run(tier.load_job(1)).failed
            assert failed[key(1)].kind is Kind.TIMEOUT
            assert tier.lookup(1) == [MISS]
        tier.clock.advance(10)
        assert tier.run(tier.load_job(1)).done == (key(1),)


def test_close_does_not_wait_for_a_call_that_hangs(server, opened):
    one = opened(url=server.url, timeout_s=60)
    one.write(1)
    with server.frozen():
        kinds: list[Kind | None] = []
        lane = threading.Thread(target=lambda: kinds.extend(one.read(1)))
        lane.start()
        valkey.wait_until(lambda: one.store._servers.server.pool._in_use_connections, "it asks")
        one.store.close()
        lane.join(20)
        assert kinds == [Kind.IO]
        assert not one.store._servers.server.pool._in_use_connections


def test_a_connection_is_closed_by_who_uses_it(server, opened, monkeypatch):
    """Another thread would close a descriptor whose number somebody else may have by then."""
    closed_by: set[str] = set()
    plain = socket.socket.close

    def close(sock):
        closed_by.add(threading.current_thread().name)
        plain(sock)

    one = opened(url=server.url, timeout_s=60)
    one.write(1)
    with server.frozen():
        lane = threading.Thread(target=one.read, args=(1,), name="lane")
        lane.start()
        valkey.wait_until(lambda: one.store._servers.server.pool._in_use_connections, "it asks")
        monkeypatch.setattr(socket.socket, "close", close)
        one.store.close()
        one.store.close()
        lane.join(20)
    assert closed_by == {"lane"}
    (connection,) = one.store._servers.server.pool._available_connections
    assert not connection.is_connected


def test_a_reply_that_breaks_off_fails_what_was_not_received(opened):
    """The server answers the first of two reads, and half of the second."""
    good = opened()
    good.write(1, 2)
    with valkey.shared().admin() as client:
        values = [client.get(good.name(n)) for n in (1, 2)]
    said = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    with Impostor(said[:-100]) as impostor:
        one = opened(url=impostor.url)
        assert one.read(1, 2) == [None, Kind.IO]


class Impostor:
    """It answers the questions of an opening, and then says what it was given, and goes."""

    def __init__(self, says: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._says = says
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while words := connection.recv(1 << 16):
                    if words.endswith(b"INFO\r\n$6\r\nserver\r\n"):
                        connection.sendall(b"$0\r\n\r\n")
                    elif words.startswith(b"*2\r\n$3\r\nGET") and words.endswith(b"manifest\r\n"):
                        connection.sendall(b"$-1\r\n")
                    else:
                        connection.sendall(self._says)
                        break

    def __enter__(self) -> "Impostor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


@pytest.mark.parametrize(
    "says",
    [
        b"$-5\r\n",
        b"$x\r\n",
        b":x\r\n",
        b"$99999999999999999999\r\n",
        b"$9999999999\r\n",
        b"*1\r\n" * 5000,
        b"*-7\r\n",
        b"-MOVED x\r\n",
        b"-ASK\r\n",
        b"-MOVED 99999 h:99999\r\n",
        b"!3\r\nERR\r\n",
        b">1\r\n+a\r\n",
        b"\r\n",
        b"+" + b"x" * 200_000,
        b"$3\r\nabcde",
        b"*2\r\n:0\r\n:0\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n*0\r\n",
        b"\0\r\n",
    ],
    ids=lambda said: repr(said[:20]),
)
def test_what_no_server_would_say_is_an_error_of_the_call(opened, says):
    """And of no other kind than any trouble with a server; nothing is held in memory for it."""
    with Impostor(says) as impostor:
        one = opened(url=impostor.url, timeout_s=5)
        assert one.read(1, 2) == [Kind.IO] * 2
        assert one.write(1) == [Kind.IO]
        for ask in (one.store.usage, lambda: one.contains(1), lambda: one.store.delete([key(1)])):
            with pytest.raises(KVTiersError):
                ask()
        with contextlib.suppress(KVTiersError):
            assert list(one.store.scan()) == []
        assert not one.removed


def test_replies_that_are_out_of_step_are_not_taken_for_those_of_other_calls(opened):
    """A number where a value is due says that the places are lost: no chunk is blamed for it."""
    with Impostor(b":1\r\n" * 9) as impostor:
        one = opened(url=impostor.url)
        assert one.read(1, 2) == [Kind.IO] * 2
        assert one.write(1) == [Kind.IO]
        assert "is it one?" in str(one.failure())
        assert not one.removed


def test_something_else_that_listens_there_is_refused(opened):
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"500 what did you say?\r\n")

    threading.Thread(target=greet, daemon=True).start()
    with pytest.raises(ConfigError, match="which is no Redis or Valkey server"):
        opened(url=f"redis://127.0.0.1:{listener.getsockname()[1]}")
    listener.close()


def test_a_replica_takes_nothing_and_says_why(server, opened):
    one = opened(url=server.url)
    one.write(1)
    server.do("CONFIG", "SET", "replica-serve-stale-data", "yes")
    server.do("REPLICAOF", "127.0.0.1", 1)
    assert "says READONLY: it is a replica, which takes nothing: name its primary" in str(
        one.failure()
    )
    assert one.read(1) == [None]
    server.do("CONFIG", "SET", "replica-serve-stale-data", "no")
    assert one.read(1) == [Kind.IO]
    server.do("REPLICAOF", "NO", "ONE")
    assert one.write(2) == [None]


def test_a_script_keeps_the_server_busy(server, opened):
    one = opened(url=server.url)
    server.do("CONFIG", "SET", "busy-reply-threshold", 1)
    script = threading.Thread(target=_swallow, args=(server, "EVAL", "while true do end", 0))
    script.start()
    valkey.wait_until(lambda: one.write(1) == [Kind.IO], "the script keeps it busy")
    assert "says BUSY" in str(one.failure())
    server.do("SCRIPT", "KILL")
    script.join(20)
    assert one.write(1) == [None]


def _swallow(server, *words) -> None:
    with contextlib.suppress(redis.RedisError):
        server.do(*words)
