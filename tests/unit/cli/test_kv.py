"""The tools on a real key-value server, filled by the store that engines use."""

import re

import pytest

from kvtiers.chunks import ChunkLayout, GroupLayout
from kvtiers.cli import kvchecks
from kvtiers.errors import KVTiersError
from kvtiers.testing.values import content
from kvtiers.tiers import kv
from kvtiers.tiers.base import Item, StoreContext
from kvtiers.tiers.kv.names import Names, part_of
from kvtiers.tiers.places import Aim, Part, how_many_leave
from kvtiers.tiers.urls import open_place
from tests.servers import valkey
from tests.unit.cli.cli_kit import (
    CHUNK,
    KEYS,
    NAMESPACE,
    OTHER,
    TOKENS,
    good,
    kvtiers,
    write_json,
)
from tests.unit.tiers.tier_kit import ManualClock, page_aligned

HEADER = 48 + len(KEYS[0]) + 8


class Kv:
    """A tier under a prefix that nobody else uses."""

    def __init__(self, server):
        self.server = server
        self.prefix = valkey.shared().new_prefix()
        self.url = f"{server.url}/0?prefix={self.prefix}"

    def open(self, namespace=NAMESPACE):
        context = StoreContext(
            "kv",
            "1:kv",
            namespace,
            ChunkLayout((GroupLayout(0, CHUNK, 16),)),
            ManualClock(),
            ManualClock(),
            lambda keys, reason: None,
        )
        return kv.build(context, kv.KvOptions(url=self.server.url, prefix=self.prefix))

    def fill(self, keys=KEYS, namespace=NAMESPACE):
        store = self.open(namespace)
        items = []
        for key in keys:
            view = page_aligned(CHUNK)
            view[:] = content(key, CHUNK)
            items.append(Item(key, view.toreadonly()))
        assert store.write(items) == [None] * len(keys)
        store.close()
        return self

    def name(self, key, namespace=NAMESPACE):
        return Names(self.prefix, namespace.id).of(key)

    def image(self):
        """All that is there; looking at it is no use."""
        with self.server.admin() as admin:
            admin.client_no_touch("on")
            found = sorted(admin.scan_iter(f"{self.prefix}:*"))
            return {n: (admin.dump(n), admin.ttl(n)) for n in found}

    def chunks(self, namespace=NAMESPACE):
        """What is stored, and whether it is what was written."""
        place = open_place(self.url, pytest.fail)
        keys = [entry.key for entry in place.entries(namespace.id)]
        return {key: bytes(data) for key, data in place.read(namespace.id, keys)}


@pytest.fixture
def tier():
    return Kv(valkey.shared()).fill()


@pytest.fixture
def own():
    """On a server whose clock and policy a test may change."""
    with valkey.valkey() as server:
        yield Kv(server).fill()


def whole(keys):
    return {key: content(key, CHUNK) for key in keys}


def grow_old(tier, keys, seconds):
    """As if they were not used for so long."""
    with tier.server.admin() as admin:
        for key in keys:
            data = admin.dump(tier.name(key))
            admin.restore(tier.name(key), 0, data, replace=True, idletime=seconds)


def test_ls_and_du_say_what_is_there_and_change_nothing(tier):
    tier.fill(KEYS[:2], OTHER)
    before = tier.image()
    listed = {n["namespace"]: n for n in good(kvtiers("ls", tier.url, "--json")).json["namespaces"]}
    assert {n: (e["chunks"], e["bytes"]) for n, e in listed.items()} == {
        NAMESPACE.id: (4, 4 * CHUNK),
        OTHER.id: (2, 2 * CHUNK),
    }
    assert listed[NAMESPACE.id]["manifest"] == dict(NAMESPACE.fields)
    chunks = good(kvtiers("ls", tier.url, "--chunks", "--json", "--namespace", OTHER.id)).json
    assert {c["key"] for c in chunks["chunks"]} == {key.hex() for key in KEYS[:2]}
    used = good(kvtiers("du", tier.url, "--json")).json
    manifests = sum(len(n.manifest()) for n in (NAMESPACE, OTHER))
    assert used["bytes"] == 6 * (CHUNK + HEADER) + manifests
    assert used["capacity_bytes"] == 1 << 30  # the maxmemory of the server
    assert "of 1.0 MiB capacity" in good(kvtiers("du", f"{tier.url}&capacity=1MiB")).out
    good(kvtiers("verify", tier.url))
    assert tier.image() == before


def test_looking_is_no_use(own):
    """Else a server that is short of memory would keep what somebody listed."""
    grow_old(own, KEYS, 5000)
    for command in ("ls", "du", "verify"):
        good(kvtiers(command, own.url))
    place = open_place(own.url, pytest.fail)
    idle = [own.server.do("OBJECT", "IDLETIME", own.name(key)) for key in KEYS]
    assert min(idle) >= 5000
    assert all(entry.used_at > 1e9 for entry in place.entries(NAMESPACE.id))
    own.server.do("ACL", "SETUSER", "default", "-client|no-touch")
    ran = kvtiers("ls", own.url)
    assert (ran.status, ran.err.count("\n")) == (0, 1)
    assert "looking counts as use there" in ran.err


def test_stat_finds_a_prompt_and_reads_a_chunk(tier, tmp_path):
    prompt = write_json(tmp_path / "prompt.json", TOKENS)
    ran = good(kvtiers("stat", tier.url, "--tokens", prompt, "--json")).json
    assert ran["namespaces"][0]["loadable_tokens"] == len(TOKENS)
    (chunk,) = good(kvtiers("stat", tier.url, KEYS[0].hex(), "--json")).json["chunks"]
    assert (chunk["key"], chunk["intact"]) == (KEYS[0].hex(), True)


def test_warm_writes_a_hot_list(tier, tmp_path):
    prompt = write_json(tmp_path / "prompt.json", TOKENS)
    words = ["--tokens", prompt, "-o", tmp_path / "hot", "--json"]
    assert good(kvtiers("warm", tier.url, *words)).json["chunks"] == 4


def test_verify_names_what_is_damaged_and_repair_takes_it_away(tier):
    assert "4 chunks" in good(kvtiers("verify", tier.url)).out
    with tier.server.admin() as admin:
        admin.setrange(tier.name(KEYS[0]), HEADER + 7, b"\xff")
        admin.set(tier.name(KEYS[1]), b"short")
        admin.delete(tier.name(KEYS[2]))
        admin.rpush(tier.name(KEYS[2]), "no string")
    before = tier.image()
    ran = kvtiers("verify", tier.url, "--json")
    assert ran.status == 1
    assert {d["key"] for d in ran.json["damaged"]} == {k.hex() for k in KEYS[:3]}
    assert tier.image() == before
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    assert [d["outcome"] for d in ran.json["damaged"]] == ["removed"] * 3
    good(kvtiers("verify", tier.url))
    assert tier.chunks() == whole(KEYS[3:])
    store = tier.open()  # an engine finds the same
    assert store.contains(KEYS) == [False, False, False, True]
    store.close()


def test_gc_deletes_what_was_not_used_for_longest(own):
    grow_old(own, KEYS[2:], 7200)
    before = own.image()
    dry = good(kvtiers("gc", own.url, "--max-bytes", "24KB", "--dry-run", "--json")).json
    assert own.image() == before
    assert (dry["chunks"], dry["bytes"], dry["failed"]) == (2, 2 * (CHUNK + HEADER), 0)
    done = good(kvtiers("gc", own.url, "--max-bytes", "24KB", "--json")).json
    assert done == {**dry, "dry_run": False}
    assert own.chunks() == whole(KEYS[:2])
    grow_old(own, KEYS[:1], 7200)
    assert good(kvtiers("gc", own.url, "--older-than", "1h", "--json")).json["chunks"] == 1
    assert own.chunks() == whole(KEYS[1:2])
    assert good(kvtiers("gc", own.url, "--json")).json["chunks"] == 0


def test_gc_of_a_namespace_counts_and_deletes_nothing_else(tier):
    tier.fill(KEYS[:2], OTHER)
    good(kvtiers("gc", tier.url, "--max-bytes", "0", "--namespace", OTHER.id))
    assert tier.chunks() == whole(KEYS)
    assert tier.chunks(OTHER) == {}


@pytest.mark.parametrize("bound", [("--max-bytes", "0"), ("--older-than", "1h")])
def test_gc_where_the_server_does_not_say_when_chunks_were_used(own, bound):
    own.server.do("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    ran = kvtiers("gc", own.url, *bound)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "does not say when chunks" in ran.err
    ran = kvtiers("ls", own.url, "--json")
    assert ran.json["namespaces"][0]["chunks"] == 4
    assert "when chunks were used is not known there" in ran.err


def test_who_leaves():
    pairs = [(1.0, 10), (5.0, 10)]
    for aim, count in (
        (Aim(), 0),
        (Aim(max_bytes=10), 1),
        (Aim(max_bytes=9), 2),
        (Aim(older_than_s=6.0), 1),
        (Aim(max_bytes=0, older_than_s=6.0), 2),
    ):
        assert how_many_leave(pairs, 20, aim, 10.0) == count


def test_chunks_go_to_a_disk_and_back(tier, tmp_path):
    disk = f"fs://{tmp_path}/disk?capacity=1GiB"
    ran = good(kvtiers("migrate", tier.url, disk, "--json"))
    assert ran.json["namespaces"][0]["there_at_the_end"] == 4
    other = Kv(valkey.shared())
    good(kvtiers("migrate", disk, other.url))
    assert other.chunks() == whole(KEYS)
    again = good(kvtiers("migrate", disk, other.url, "--json")).json["namespaces"][0]
    assert (again["chunks"], again["present"]) == (0, 4)
    ran = kvtiers("migrate", tier.url, f"{tier.url}&ttl_s=9")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_an_archive_holds_them(tier, tmp_path):
    archive = tmp_path / "chunks.tar"
    good(kvtiers("export", tier.url, archive))
    other = Kv(valkey.shared())
    good(kvtiers("import", archive, f"{other.url}&ttl_s=600"))
    assert other.chunks() == whole(KEYS)
    assert 0 < other.server.do("TTL", other.name(KEYS[0])) <= 600


def test_bench_measures_and_leaves_nothing(tier):
    before = tier.image()
    words = ["--chunk-bytes", "64KiB", "--total-bytes", "4MiB"]
    ran = good(kvtiers("bench", "tier", tier.url, *words, "--json")).json
    names = ["tier written", "tier read", "server written", "server read"]
    assert [f["name"] for f in ran["figures"]] == names
    assert ran["figures"][0]["share_of_server"] > 0
    assert "OF THE SERVER" in good(kvtiers("bench", "tier", tier.url, *words)).out
    assert tier.image() == before
    ran = kvtiers("bench", "tier", tier.url, *words, "--keep")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    new = Kv(valkey.shared())
    good(kvtiers("bench", "tier", new.url, *words, "--keep"))
    assert good(kvtiers("ls", new.url, "--json")).json["namespaces"][0]["chunks"] == 128


def test_doctor_tries_what_an_engine_does_there(tier, monkeypatch):
    before = tier.image()
    ran = kvtiers("doctor", tier.url, "--json").json
    grades = {c["check"]: c["grade"] for c in ran["checks"] if c["tier"]}
    asked = ["transport", "service", "permissions", "memory", "chunk size"]
    assert grades == dict.fromkeys(asked, "ok")
    monkeypatch.setattr(kvchecks, "TRIAL_BYTES", 8 << 20)
    ran = kvtiers("doctor", tier.url, "--chunk-bytes", "256KiB", "--json").json
    (speed,) = [c for c in ran["checks"] if c["check"] == "chunk size"]
    assert "of the server" in speed["found"]
    assert tier.image() == before


def test_doctor_says_what_an_engine_would_stumble_over(own):
    def graded():
        ran = kvtiers("doctor", own.url, "--json").json
        return {c["check"]: c for c in ran["checks"] if c["tier"]}

    assert graded()["memory"]["grade"] == "warn"
    assert "no maxmemory" in graded()["memory"]["remedy"]
    own.server.do("ACL", "SETUSER", "default", "-set")
    assert graded()["permissions"]["grade"] == "fail"
    assert "SET fails" in graded()["permissions"]["found"]
    own.server.kill()
    assert graded()["service"]["grade"] == "fail"


def test_doctor_looks_at_configured_servers_and_shows_no_password(tmp_path):
    with valkey.valkey(requirepass="hunter2") as server:
        spec = {"type": "kv", "url": f"redis://:hunter2@{server.host}"}
        document = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [spec]}
        config = write_json(tmp_path / "kv.json", document)
        for ran in (
            kvtiers("doctor", "--config", config, "--json"),
            kvtiers("doctor", "--config", config),
            kvtiers("doctor", f"{server.url}?prefix=x", "--config", config),
        ):
            assert "hunter2" not in ran.out + ran.err
            assert "values are written, read, listed and deleted" in ran.out


def test_a_password_comes_from_the_environment_and_is_shown_nowhere(monkeypatch):
    with valkey.valkey(requirepass="hunter2") as server:
        monkeypatch.setenv("KVTIERS_TEST_PASSWORD", "hunter2")
        tier = Kv(server)
        tier.url = f"{server.url}?prefix={tier.prefix}&password_env=KVTIERS_TEST_PASSWORD"
        ran = kvtiers("ls", tier.url)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        good(kvtiers("bench", "tier", tier.url, "--total-bytes", "2MiB", "--keep"))
        good(kvtiers("ls", tier.url))
        monkeypatch.setenv("KVTIERS_TEST_PASSWORD", "hunter3")
        ran = kvtiers("ls", tier.url)
        assert (ran.status, ran.err.count("\n")) == (1, 1)
        assert "WRONGPASS" in ran.err
        assert "hunter" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://u:secret@h", "leave them to the environment"),
        ("redis://h?password=secret", "unknown parameter"),
        ("redis://h?prefix={}", "prefix is '{}'"),
        ("redis://h?ttl_s=secret", "give a number of seconds"),
        ("redis://h?capacity=0", "give more than 0"),
        ("redis://h?db=3", "unknown parameter 'db'"),
        ("redis://h/x", "a database is a number"),
        ("redis://h#x", "behind #"),
        ("redis://a,b", "names several servers"),
        ("unix:///s?db=x", "a database is a number"),
        ("rediss://h?tls_check_hostname=no", "give on or off"),
        ("redis+sentinel://h", "names no service"),
        ("redis://h?password_env=KVTIERS_NOT_SET", "not set in the environment"),
    ],
)
def test_urls_that_are_refused(url, why):
    ran = kvtiers("ls", url)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert why in ran.err
    assert "secret" not in ran.err.replace("is 'secret'", "")


def test_a_server_that_is_down_is_said_in_one_line():
    ran = kvtiers("ls", "redis://127.0.0.1:1")
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "nobody listens there" in ran.err


def test_a_prefix_with_a_slip_of_the_pen_is_no_clean_tier(tier):
    ran = kvtiers("ls", tier.url + "x")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "no namespace is stored there under the prefix" in ran.err


def test_what_lies_beside_chunks(tier):
    """Other keys under the prefix are shown, and neither counted nor deleted."""
    with tier.server.admin() as admin:
        admin.set(f"{tier.prefix}:other", b"x" * 100)
        admin.rpush(f"{tier.prefix}:a-list", "x")
        admin.set(f"{tier.prefix}:trial-1:x", b"y")
    usage = good(kvtiers("du", tier.url, "--json")).json["usage"]
    assert {"namespace": None, "part": "foreign", "files": 2, "bytes": 100} in usage
    assert {"namespace": None, "part": "trial", "files": 1, "bytes": 1} in usage
    good(kvtiers("gc", tier.url, "--max-bytes", "0"))
    left = {re.sub(rb"[0-9a-f]{32}", b"ID", name) for name in tier.image()}
    rest = (b"other", b"a-list", b"trial-1:x", b"ID:manifest")
    assert left == {tier.prefix.encode() + b":" + each for each in rest}
    names = Names("p", "0" * 32)
    assert part_of("p", names.of(KEYS[0])) == ("0" * 32, Part.CHUNKS)
    assert part_of("p", names.manifest + b"x") == ("0" * 32, Part.FOREIGN)


def test_chunks_whose_manifest_was_evicted_are_shown_and_not_changed(tier):
    tier.server.do("DEL", Names(tier.prefix, NAMESPACE.id).manifest)
    ran = kvtiers("ls", tier.url, "--json").json
    assert "the server may have evicted it" in ran["namespaces"][0]["problem"]
    before = tier.image()
    kvtiers("gc", tier.url, "--max-bytes", "0")
    assert tier.image() == before


def test_on_a_cluster(tmp_path):
    cluster = valkey.shared_cluster()
    tier = Kv(valkey.shared()).fill()
    there = f"{cluster.url}?prefix={tier.prefix}"
    good(kvtiers("migrate", tier.url, there))
    assert good(kvtiers("ls", there, "--json")).json["namespaces"][0]["chunks"] == 4
    assert "4 chunks" in good(kvtiers("verify", there)).out
    grades = {c["grade"] for c in kvtiers("doctor", there, "--json").json["checks"] if c["tier"]}
    assert grades == {"ok"}
    good(kvtiers("gc", there, "--max-bytes", "0"))
    assert good(kvtiers("ls", there, "--json")).json["namespaces"][0]["chunks"] == 0


def test_chunks_that_vanish_while_they_are_read_are_no_damage(tier):
    place = open_place(tier.url, pytest.fail)
    found = [entry.key for entry in place.entries(NAMESPACE.id)]
    tier.server.do("DEL", tier.name(found[0]))
    (_, problem), *rest = place.read(NAMESPACE.id, found)
    assert isinstance(problem, KVTiersError)
    assert problem.kind.value == "vanished"
    assert [bytes(data) for _, data in rest] == [content(key, CHUNK) for key in found[1:]]
