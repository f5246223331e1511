"""Scrapes are read as Prometheus reads them."""

import pytest

from kvtiers.observe.exposition import Scrape, growth, parse, quantile

TEXT = """\
# HELP lookups_total Chunk lookups.
# TYPE lookups_total counter
lookups_total{engine="0",tier="0:primary"} 10.0
lookups_total{engine="1",tier="0:primary"} 5.0
lookups_total{engine="0",tier="1:fs"} 3e+00 1700000000000
up 1
odd{name="a \\"quoted\\" \\\\ name, with\\nlines"} 3
not a sample
broken{x="y"} many
"""


def histogram(*counts: tuple[str, float], name: str = "s") -> Scrape:
    return parse("\n".join(f'{name}_bucket{{le="{le}"}} {count}' for le, count in counts))


def test_samples_are_summed_by_label():
    scrape = parse(TEXT)
    assert scrape.total("lookups_total") == 18
    assert scrape.by("lookups_total", "tier") == {"0:primary": 15, "1:fs": 3}
    assert scrape.by("lookups_total", "tier", engine="1") == {"0:primary": 5}
    assert scrape.total("up") == 1


def test_what_is_not_there_is_nothing():
    scrape = parse(TEXT)
    assert "lookups_total" in scrape
    assert "absent" not in scrape
    assert scrape.total("absent") == 0
    assert scrape.by("up", "tier") == {}
    assert "broken" not in scrape


def test_what_is_no_number_is_no_sample_and_no_bound():
    scrape = parse("a NaN\na +Inf\na -Inf\na 1e308\na 2")
    assert scrape.total("a") == 2
    buckets = parse('h_bucket{le="x"} 9\nh_bucket{le="NaN"} 9\nh_bucket{le="4"} 2')
    assert quantile(0.5, buckets, "h") == 2


def test_a_hostile_line_is_read_in_linear_time():
    """Quadratic, it would take an hour."""
    assert parse("m{" + "a" * 1_000_000 + "} 1").total("m") == 1


def test_escapes_in_labels_are_undone():
    ((labels, _),) = parse(TEXT).samples["odd"]
    assert labels == {"name": 'a "quoted" \\ name, with\nlines'}


def test_growth_is_that_of_each_sample():
    grown = growth(parse('n{a="1"} 5\nn{a="2"} 7'), parse('n{a="1"} 8\nn{a="2"} 7\nn{a="3"} 2'))
    assert grown.by("n", "a") == {"1": 3, "2": 0, "3": 2}


def test_a_counter_that_began_anew_grew_from_nothing():
    assert growth(parse("n 100"), parse("n 4")).total("n") == 4


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 3.0), (1.0, 5.0)],
)
def test_quantiles_are_linear_within_a_bucket(share, expected):
    assert quantile(share, histogram(("1.0", 2), ("5.0", 4), ("+Inf", 4)), "s") == expected


def test_quantiles_of_nothing_and_of_what_is_above_all_bounds():
    assert quantile(0.5, Scrape(), "s") is None
    assert quantile(0.5, histogram(("1.0", 0), ("+Inf", 0)), "s") is None
    assert quantile(0.99, histogram(("1.0", 1), ("+Inf", 9)), "s") == 1.0
