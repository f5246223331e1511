"""The tools on a bucket of a real server, filled by the store that engines use."""

import os

import pytest

from kvtiers.chunks import ChunkLayout, GroupLayout, make_key
from kvtiers.cli import objchecks
from kvtiers.hashing import chunk_keys
from kvtiers.testing.values import content
from kvtiers.tiers import obj
from kvtiers.tiers.base import Item, StoreContext
from kvtiers.tiers.obj import names, place
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.maintain import Leaver, choose
from kvtiers.tiers.places import Aim
from kvtiers.tiers.urls import open_place, parse_url
from tests.servers.fake_s3 import FakeS3
from tests.servers.s3_faults import S3Fault, What
from tests.unit.cli.cli_kit import (
    NAMESPACE,
    OTHER,
    TOKENS,
    good,
    group,
    kvtiers,
    manifest,
    write_json,
)
from tests.unit.tiers.tier_kit import ManualClock, page_aligned

SMALL, LARGE = 8192, names.PACK_BELOW_BYTES
HYBRID = manifest("hybrid", groups=[group(0), group(1)])
"""Chunks of group 0 are packed, those of group 1 have an object each."""
SIZES = {0: SMALL, 1: LARGE}
KEYS = {g: chunk_keys(TOKENS, g, 16, 16) for g in SIZES}
ALL = KEYS[0] + KEYS[1]
WALL = 1_700_000_000.0


class Bucket:
    """A tier below a prefix."""

    def __init__(self, server, name, prefix="a/tier"):
        self.endpoint = server.endpoint
        self.where = f"s3://{name}/{prefix}"
        self.url = f"{self.where}?endpoint={server.endpoint}&region={server.region}"
        self.new = self.url
        self.client = open_client(parse_url(self.url))

    def open(self, namespace=HYBRID, wall=WALL):
        layout = ChunkLayout(tuple(GroupLayout(g, n, 16) for g, n in SIZES.items()))
        context = StoreContext(
            "obj", "1:obj", namespace, layout, ManualClock(), ManualClock(wall), lambda k, r: None
        )
        options = {"url": self.where, "endpoint": self.endpoint, "allow_http": True}
        return obj.build(context, obj.ObjOptions(**options))

    def fill(self, keys=ALL, namespace=HYBRID, wall=WALL):
        store = self.open(namespace, wall)
        items = []
        for key in keys:
            view = page_aligned(SIZES[0] if key in KEYS[0] else LARGE)
            view[:] = content(key, view.nbytes)
            items.append(Item(key, view.toreadonly()))
        assert store.write(items) == [None] * len(keys)
        store.close()
        return self

    def objects(self):
        return sorted(stored.name for page in self.client.objects() for stored in page)

    def chunks(self, namespace=HYBRID):
        """What is stored, and whether it is what was written."""
        place = open_place(self.url, pytest.fail)
        found = [entry.key for entry in place.entries(namespace.id)]
        return {key: bytes(data) for key, data in place.read(namespace.id, found)}

    def packs(self, namespace=HYBRID):
        return [name for name in self.objects() if names.pack_at(namespace.id, name)]


@pytest.fixture
def tier(s3, bucket):
    return Bucket(s3, bucket).fill()


def whole(keys):
    return {key: content(key, SIZES[0] if key in KEYS[0] else LARGE) for key in keys}


def test_ls_and_du_say_what_is_there(tier):
    tier.fill(KEYS[0][:2], OTHER)
    listed = {n["namespace"]: n for n in good(kvtiers("ls", tier.url, "--json")).json["namespaces"]}
    assert {n: (e["chunks"], e["bytes"]) for n, e in listed.items()} == {
        HYBRID.id: (8, 4 * SMALL + 4 * LARGE),
        OTHER.id: (2, 2 * SMALL),
    }
    assert listed[HYBRID.id]["manifest"] == dict(HYBRID.fields)
    chunks = good(kvtiers("ls", tier.url, "--chunks", "--json", "--namespace", HYBRID.id)).json
    assert {c["key"] for c in chunks["chunks"]} == {key.hex() for key in ALL}
    used = good(kvtiers("du", tier.url, "--json")).json
    assert used["bytes"] == sum(s.bytes for page in tier.client.objects() for s in page)
    assert used["disk_bytes"] is used["capacity_bytes"] is None
    text = good(kvtiers("du", f"{tier.url}&capacity=1GiB")).out
    assert "of 1.0 GiB capacity" in text
    assert "on the disk" not in text


def test_stat_finds_a_prompt_and_reads_a_chunk(tier, tmp_path):
    prompt = write_json(tmp_path / "prompt.json", TOKENS)
    ran = good(kvtiers("stat", tier.url, "--tokens", prompt, "--json")).json
    assert ran["namespaces"][0]["loadable_tokens"] == len(TOKENS)
    for key in (ALL[0], ALL[-1]):
        (chunk,) = good(kvtiers("stat", tier.url, key.hex(), "--json")).json["chunks"]
        assert (chunk["key"], chunk["intact"]) == (key.hex(), True)


def test_verify_names_what_is_damaged_and_repair_takes_it_away(tier):
    assert "8 chunks" in good(kvtiers("verify", tier.url)).out
    single, packed = names.chunk_name(HYBRID.id, KEYS[1][0]), tier.packs()[0]
    for name, at in ((single, -1), (packed, -1)):
        data = bytearray(tier.client.get(name, 1 << 30))
        data[at] ^= 1
        tier.client.put(name, [bytes(data)])
    tier.client.put(names.chunk_name(HYBRID.id, KEYS[1][1]), [b"x" * 5000])
    before = tier.objects()
    ran = kvtiers("verify", tier.url, "--json")
    assert ran.status == 1
    damaged = {d["key"] for d in ran.json["damaged"]}
    assert damaged == {k.hex() for k in (*KEYS[1][:2], KEYS[0][-1])}
    assert tier.objects() == before
    ran = kvtiers("verify", tier.url, "--repair", "--json")
    assert [d["outcome"] for d in ran.json["damaged"]] == ["removed"] * 3
    good(kvtiers("verify", tier.url))
    left = [key for key in ALL if key.hex() not in damaged]
    assert tier.chunks() == whole(left)
    store = tier.open()  # an engine finds the same
    assert store.contains(ALL) == [key in left for key in ALL]
    store.close()


def test_a_pack_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with FakeS3() as fake:
        tier = Bucket(fake, "bucket").fill()
        fake.fail(S3Fault(What.STATUS, "GET", status=403, keys=lambda key: key.endswith(".kvp")))
        archive = tmp_path / "chunks.tar"
        for call in (
            ["ls"],
            ["verify"],
            ["export", archive],
            ["migrate", f"fs://{tmp_path}/new?capacity=1GiB"],
        ):
            ran = kvtiers(call[0], tier.url, *call[1:])
            assert (ran.status, "the server answered 403" in ran.err) == (1, True), call
        assert not archive.exists()


def test_an_object_that_is_larger_than_any_chunk_is_not_read(tier, monkeypatch):
    monkeypatch.setattr(place, "MAX_CHUNK_BYTES", LARGE)
    asked = []
    get = Client.get
    monkeypatch.setattr(
        Client, "get", lambda c, n, most, s=0: asked.append(n) or get(c, n, most, s)
    )
    name = names.chunk_name(HYBRID.id, KEYS[1][0])
    tier.client.put(name, [bytes(2 * LARGE)])
    ran = kvtiers("verify", tier.url, "--repair")
    assert f"{name}: it is larger than any chunk (removed)" in ran.out
    assert name not in asked
    assert tier.chunks() == whole(key for key in ALL if key != KEYS[1][0])


def test_a_pack_without_its_front_is_a_fault_that_repair_removes(tier):
    (pack,) = tier.packs()
    tier.client.put(pack, [b"nothing"])
    ran = kvtiers("verify", tier.url, "--json")
    assert ran.status == 1
    assert [f["outcome"] for f in ran.json["faults"]] == ["left"]
    assert kvtiers("verify", tier.url, "--repair").status == 1
    assert tier.packs() == []
    assert tier.chunks() == whole(KEYS[1])


def test_gc_deletes_what_was_written_first(s3, bucket):
    tier = Bucket(s3, bucket)
    tier.fill(KEYS[0][:2], wall=WALL).fill(KEYS[0][2:], wall=WALL + 3600).fill(KEYS[1])
    before = tier.objects()
    dry = good(kvtiers("gc", tier.url, "--max-bytes", "1100KB", "--dry-run", "--json")).json
    assert tier.objects() == before
    assert good(kvtiers("gc", tier.url, "--max-bytes", "1100KB", "--json")).json == {
        **dry,
        "dry_run": False,
    }
    assert (dry["chunks"], dry["packs"], dry["failed"]) == (2, 1, 0)
    assert dry["bytes_left"] <= 1_100_000 < dry["bytes_left"] + dry["bytes"]
    assert tier.chunks() == whole([*KEYS[0][2:], *KEYS[1]])


def test_gc_by_age_goes_by_when_it_was_written(tier):
    """The pack says that it is years old; the objects were just made."""
    ran = good(kvtiers("gc", tier.url, "--older-than", "1h", "--json")).json
    assert (ran["chunks"], ran["packs"]) == (4, 1)
    assert tier.chunks() == whole(KEYS[1])
    assert kvtiers("gc", tier.url, "--older-than", "0s").status == 0
    assert tier.objects() == [f"{HYBRID.id}/manifest.json"]


def test_gc_of_a_namespace_counts_and_deletes_nothing_else(tier):
    tier.fill(KEYS[0][:2], OTHER)
    good(kvtiers("gc", tier.url, "--max-bytes", "0", "--namespace", OTHER.id))
    assert tier.chunks() == whole(ALL)
    assert tier.chunks(OTHER) == {}


def test_who_leaves():
    old, new = (Leaver(at, str(at), 10, "n", False) for at in (1.0, 5.0))
    assert choose([old, new], 20, Aim(), 10.0) == []
    assert choose([old, new], 20, Aim(max_bytes=10), 10.0) == [old]
    assert choose([old, new], 20, Aim(max_bytes=9), 10.0) == [old, new]
    assert choose([old, new], 20, Aim(older_than_s=6.0), 10.0) == [old]
    assert choose([old, new], 20, Aim(max_bytes=0, older_than_s=6.0), 10.0) == [old, new]


def test_chunks_go_to_a_disk_and_back(tier, s3, tmp_path):
    disk = f"fs://{tmp_path}/disk?capacity=1GiB"
    ran = good(kvtiers("migrate", tier.url, disk, "--json")).json
    assert ran["namespaces"][0]["there_at_the_end"] == 8
    other = Bucket(s3, s3.new_bucket(), "")
    good(kvtiers("migrate", disk, other.url))
    assert other.chunks() == whole(ALL)
    again = good(kvtiers("migrate", disk, other.url, "--json")).json["namespaces"][0]
    assert (again["chunks"], again["present"]) == (0, 8)
    store = other.open()
    assert store.contains(ALL) == [True] * len(ALL)
    store.close()


def test_an_archive_holds_them(tier, s3, tmp_path):
    archive = tmp_path / "chunks.tar"
    good(kvtiers("export", tier.url, archive))
    other = Bucket(s3, s3.new_bucket())
    good(kvtiers("import", archive, other.url))
    assert other.chunks() == whole(ALL)


def test_a_bucket_inside_another_is_refused(tier, s3):
    inner = tier.url.replace("a/tier", "a/tier/below")
    for words in ((tier.url, inner), (tier.url, tier.url)):
        ran = kvtiers("migrate", *words)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_warm_writes_a_hot_list(tier, tmp_path):
    prompt = write_json(tmp_path / "prompt.json", TOKENS)
    ran = good(kvtiers("warm", tier.url, "--tokens", prompt, "-o", tmp_path / "hot", "--json"))
    assert ran.json["chunks"] == 8


def test_bench_measures_and_leaves_nothing(tier):
    before = tier.objects()
    words = ["--chunk-bytes", "256KiB", "--total-bytes", "4MiB"]
    ran = good(kvtiers("bench", "tier", tier.url, *words, "--json")).json
    names_ = ["tier written", "tier read", "bucket written", "bucket read"]
    assert [f["name"] for f in ran["figures"]] == names_
    assert ran["figures"][0]["share_of_bucket"] > 0
    assert tier.objects() == before
    text = good(kvtiers("bench", "tier", tier.url, *words)).out
    assert "OF THE BUCKET" in text
    assert "bare request for each chunk" in text


def test_bench_may_leave_a_tier_where_nothing_is(tier, s3):
    words = ["--chunk-bytes", "64KiB", "--total-bytes", "1MiB", "--keep"]
    ran = kvtiers("bench", "tier", tier.url, *words)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    new = Bucket(s3, s3.new_bucket())
    good(kvtiers("bench", "tier", new.url, *words))
    assert good(kvtiers("ls", new.url, "--json")).json["namespaces"][0]["chunks"] == 32


def test_what_a_measurement_left_goes_after_a_day(tier, monkeypatch):
    left = f"{names.TRIAL}1-2/tier/x"
    tier.client.put(left, [b"x" * 100])
    usage = good(kvtiers("du", tier.url, "--json")).json["usage"]
    assert {"namespace": None, "part": "trial", "files": 1, "bytes": 100} in usage
    good(kvtiers("gc", tier.url))
    assert left in tier.objects()
    place = open_place(tier.url, pytest.fail)
    monkeypatch.setattr("kvtiers.tiers.obj.maintain._TRIAL_S", -1.0)
    assert place.maintain(Aim()).temporary == [(left, 100)]
    assert left not in tier.objects()


def test_doctor_tries_what_an_engine_does_there(tier, monkeypatch):
    before = tier.objects()
    ran = kvtiers("doctor", tier.url, "--json").json
    grades = {c["check"]: c["grade"] for c in ran["checks"] if c["tier"]}
    asked = ["transport", "service", "permissions", "clock", "chunk size"]
    assert grades == dict.fromkeys(asked, "ok")
    monkeypatch.setattr(objchecks, "TRIAL_BYTES", 8 << 20)
    ran = kvtiers("doctor", tier.url, "--chunk-bytes", "256KiB", "--json").json
    (speed,) = [c for c in ran["checks"] if c["check"] == "chunk size"]
    assert "of the bucket" in speed["found"]
    assert tier.objects() == before


@pytest.mark.parametrize(
    ("capacity", "grade"), [("1GiB", "ok"), ("1MiB", "fail"), ("9MB", "ok"), ("8.6MB", "ok")]
)
def test_doctor_judges_a_bound_as_an_engine_does(tier, capacity, grade):
    ran = kvtiers("doctor", f"{tier.url}&capacity={capacity}", "--json").json
    (bound,) = [c for c in ran["checks"] if c["check"] == "capacity"]
    assert bound["grade"] == grade
    assert ("less than 32 chunks" in (bound["remedy"] or "")) == (grade == "fail")
    assert objchecks.check_bound(1 << 30, 2 << 30, None).grade.value == "warn"


@pytest.mark.parametrize("grade", ["ok", "fail"])
def test_doctor_looks_at_configured_buckets(tier, tmp_path, grade):
    url = tier.where if grade == "ok" else "s3://no-such-bucket/x"
    spec = {"type": "obj", "url": url, "endpoint": tier.endpoint, "allow_http": True}
    document = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [spec]}
    ran = kvtiers("doctor", "--config", write_json(tmp_path / "kv.json", document), "--json").json
    checks = {c["check"]: c for c in ran["checks"] if c["tier"]}
    assert {c["tier"] for c in checks.values()} == {f"{url}?endpoint={tier.endpoint}"}
    assert checks["service"]["grade"] == grade
    assert ("NoSuchBucket" in checks["service"]["found"]) == (grade == "fail")


def test_credentials_come_from_the_environment_and_are_shown_nowhere(tier, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    ran = kvtiers("ls", tier.url)
    assert ran.status == 1
    assert "another-secret" not in ran.out + ran.err
    assert ran.err.count("\n") == 1
    assert os.environ["AWS_ACCESS_KEY_ID"] not in ran.err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://key:secret@bucket/x", "leave them to the environment"),
        ("s3://bucket/x?secret_access_key=secret", "unknown parameter"),
        ("s3://bucket/x?endpoint=http://key:secret@host", "is no address"),
        ("s3://bucket/x?region=", "region is empty"),
        ("s3://bucket/x?regoin=secret", "did you mean region?"),
        ("s3://bucket/x?virtual_hosted=maybe", "give on or off"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket/x#y", "behind #"),
        ("s3:///x", "bucket"),
        ("gs://bucket/x?endpoint=https://host", "goes with s3:// only"),
    ],
)
def test_urls_that_are_refused(url, why):
    ran = kvtiers("ls", url)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert why in ran.err
    assert "secret" not in ran.err.replace("secret_access_key", "")


def test_a_prefix_with_a_slip_of_the_pen_is_no_clean_tier(tier):
    for url, why in (
        (tier.url.replace("a/tier", "a/teir"), "nothing is stored there"),
        (tier.url.replace("a/tier", "a"), "nothing of kvtiers below it, but 'tier/"),
    ):
        ran = kvtiers("ls", url)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert why in ran.err


def test_a_namespace_whose_manifest_is_damaged_is_shown_and_not_changed(tier):
    tier.fill(KEYS[0], NAMESPACE)
    tier.client.put(names.manifest_name(NAMESPACE.id), [b"{"])
    ran = kvtiers("ls", tier.url, "--json").json
    problems = {n["namespace"]: n["problem"] for n in ran["namespaces"]}
    assert problems[HYBRID.id] is None
    assert "damaged" in problems[NAMESPACE.id]
    before = [n for n in tier.objects() if n.startswith(NAMESPACE.id)]
    kvtiers("gc", tier.url, "--max-bytes", "0")
    assert [n for n in tier.objects() if n.startswith(NAMESPACE.id)] == before


def test_more_packs_than_a_window_are_read(s3, bucket):
    tier = Bucket(s3, bucket)
    keys = [make_key(n.to_bytes(32, "big"), 0) for n in range(200)]
    store = tier.open()
    for at in range(0, len(keys), 50):
        views = [page_aligned(SMALL) for _ in range(50)]
        items = [Item(k, v.toreadonly()) for k, v in zip(keys[at : at + 50], views, strict=True)]
        assert store.write(items) == [None] * 50
    store.close()
    assert len(tier.chunks()) == 200
