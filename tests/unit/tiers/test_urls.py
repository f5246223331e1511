"""URLs of tiers are read strictly: what is not understood is refused with the remedy."""

import pytest

from kvtiers.errors import ConfigError
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.parameters import parse_size, with_capacity
from kvtiers.tiers.urls import open_place, parse_url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("fs:///var/x", FsURL("/var/x")),
        ("fs:///var/x/", FsURL("/var/x")),
        ("FS:///var/a%20b%3Fc", FsURL("/var/a b?c")),
        ("fs:///x%26capacity=1GiB", FsURL("/x&capacity=1GiB")),
        ("fs:///x?layout=files&capacity=256MiB", FsURL("/x", "files", 256 << 20)),
        ("fs:///x?capacity=1.5GB&direct_io=off", FsURL("/x", None, 1_500_000_000, "off")),
    ],
)
def test_what_a_url_says(url, says):
    assert parse_url(url) == says


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/var/x", "write fs:///var/x"),
        ("var", "write one like fs:///"),
        ("", "write one like fs:///"),
        ("nfs://host/x", "no tools for nfs:// yet, only for fs://, s3://"),
        ("fs://host/x", "names the host 'host'"),
        ("fs:///", "names no folder"),
        ("fs:///a%00b", "names no folder"),
        ("fs:///a#b", "names no folder"),
        ("fs://[::1/x", "is no URL"),
        ("fs:///x?capcity=1", "did you mean capacity?"),
        ("fs:///x&capacity=1GiB", "'fs:///x' is followed by &capacity= and no ?"),
        ("redis://h&prefix=x", "write ?prefix= for the first"),
        ("fs:///x?zzz=1", "there are layout, capacity"),
        ("fs:///x?layout=file", "did you mean files?"),
        ("fs:///x?direct_io=zzz", "give auto or on or off"),
        ("fs:///x?layout", "write parameters like"),
        ("fs:///x?capacity=1&capacity=2", "given twice"),
        ("fs:///x?capacity=0", "give more than 0 bytes"),
        ("fs:///x?capacity=0.1B", "give more than 0 bytes"),
        ("fs:///x?capacity=lots", "give bytes, or a size like"),
    ],
)
def test_what_is_refused(url, why):
    with pytest.raises(ConfigError, match=r"\A[^\n]*\Z") as refused:
        parse_url(url)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3:/bucket/x?key=secret",
        "s3://bucket/x&key=secret",
        "s3//key:secret@bucket",
        "redis:/:secret@host",
        "redis:secret@host",
        "s3://key:secret@[x/y",
        "s3://bucket/x#secret",
        "kvtiers://key:secret@x",
    ],
)
def test_no_secret_is_quoted(url):
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "better"),
    [
        ("fs:///x", "'fs:///x?capacity=200GiB'"),
        ("fs:///x?layout=log", "'fs:///x?layout=log&capacity=200GiB'"),
        ("redis://h?capacity=1&prefix=p", "'redis://h?prefix=p&capacity=200GiB'"),
    ],
)
def test_a_url_with_a_capacity_for_an_example(url, better):
    assert with_capacity(url) == better


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KB", 1000),
        ("1kib", 1024),
        ("1.5 GiB", 3 << 29),
        ("2T", 2 * 10**12),
        (str((1 << 63) - 1), (1 << 63) - 1),
    ],
)
def test_sizes(text, size):
    assert parse_size("capacity", text) == size


@pytest.mark.parametrize("text", ["", "-1", "1iB", "1e9", "GiB", "1XB", "9" * 30, "\u0661"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="capacity is "):
        parse_size("capacity", text)


def test_a_place_that_is_not_there_may_be_made_or_not(tmp_path):
    url = f"fs://{tmp_path}/new"
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_place(url, pytest.fail)
    assert open_place(url, pytest.fail, make=True).options["root_dir"] == f"{tmp_path}/new"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [True, False])
def test_a_file_is_no_place(tmp_path, make):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        open_place(f"fs://{tmp_path}/file", pytest.fail, make=make)


def test_a_folder_of_the_other_layout_is_not_an_empty_one(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "lock").touch()
    with pytest.raises(ConfigError, match="is of layout log: leave out layout=files"):
        open_place(f"fs://{tmp_path}?layout=files", print)


def test_a_folder_that_holds_other_things_is_no_clean_tier(tmp_path):
    (tmp_path / "hosts").touch()
    with pytest.raises(ConfigError, match="holds nothing of kvtiers, but 'hosts'"):
        open_place(f"fs://{tmp_path}", print)
    (tmp_path / "hosts").rename(tmp_path / ".hidden")
    assert open_place(f"fs://{tmp_path}", print).namespaces() == []
