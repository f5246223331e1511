"""What URLs of tiers have in common: their parts, their parameters, and sizes. Pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtiers.errors import ConfigError
from kvtiers.options import nearest

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTP]?)(i?)B?", re.IGNORECASE)
_BEGUN_LATE = re.compile("&[a-z_]+=")
_MAX_BYTES = (1 << 63) - 1

Parameters = Mapping[str, tuple[str, Callable[[str, str], object]]]
"""For each parameter of a URL the field that it fills, and what reads it: of key and text."""


@dataclass(frozen=True, slots=True)
class SplitURL:
    """The parts of a URL. No error shows its parameters, in which a secret may be."""

    shown: str
    """As an error quotes it."""
    scheme: str
    host: str
    path: str
    """Without escapes."""
    fragment: str
    query: str

    def parameters(self, known: Parameters) -> dict[str, Any]:
        """Fields by name. Raises ConfigError with the nearest valid word where there is one."""
        try:
            pairs = parse_qsl(self.query, keep_blank_values=True, strict_parsing=bool(self.query))
        except ValueError:
            example = "&".join(f"{key}=..." for key in list(known)[:2])
            raise ConfigError(f"{self.shown}: write parameters like ?{example}") from None
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key not in known:
                near = nearest(key, known)
                hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{self.shown}: unknown parameter {key!a}, {hint}")
            field, read = known[key]
            if field in found:
                raise ConfigError(f"{self.shown}: {key} is given twice")
            found[field] = read(key, value)
        return found


def split_url(url: str) -> SplitURL:
    """The parts of ``url``. Raises ConfigError if it is none, or names somebody in it."""
    try:
        split = urlsplit(url)
    except ValueError as e:
        raise ConfigError(f"{shown(url)} is no URL: {e}") from None
    late = _BEGUN_LATE.search(split.netloc + split.path)
    if late is not None and not split.query:
        place = url[: url.index(late[0])]
        raise ConfigError(
            f"{shown(place)} is followed by {late[0]} and no ?: write ?{late[0][1:]} for the first "
            "parameter, or %26 for an & that is in a name"
        )
    if "@" in split.netloc:
        raise ConfigError(
            f"a URL of {split.scheme}:// has credentials in it, which do not belong there: leave "
            "them to the environment, or to what a parameter like password_env names"
        )
    return SplitURL(
        shown(url), split.scheme, split.netloc, unquote(split.path), split.fragment, split.query
    )


def with_capacity(url: str) -> str:
    """``url`` with an example of a capacity, and no other, quoted as a shell takes it."""
    place, _, query = url.partition("?")
    others = [each for each in query.split("&") if each and not each.startswith("capacity=")]
    return f"'{place}?{'&'.join([*others, 'capacity=200GiB'])}'"


def shown(url: str) -> str:
    """``url`` as an error may quote it: without its parameters, and without who is named in it."""
    plain = re.split("[?#]", url, maxsplit=1)[0]
    return ascii(re.sub(r"^((?:[A-Za-z0-9+.-]*:?/+)?)[^/]*@", r"\1...@", plain))


def one_of(*words: str) -> Callable[[str, str], str]:
    """Reads one of these words."""

    def read(key: str, value: str) -> str:
        if value not in words:
            near = nearest(value, words)
            hint = f"did you mean {near}?" if near else f"give {' or '.join(words)}"
            raise ConfigError(f"{key} is {value!a}: {hint}")
        return value

    return read


def text(key: str, value: str) -> str:
    """Reads what is not empty."""
    if not value:
        raise ConfigError(f"{key} is empty: say it, or leave it out")
    return value


def parse_size(key: str, text: str) -> int:
    """Bytes of ``4096``, ``256MiB`` or ``1.5 GB``. Raises ConfigError naming ``key``."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit, binary = match.groups()
        scale = (1024 if binary else 1000) ** " KMGTP".index(unit.upper() or " ")
        size = int(number) * scale if number.isdigit() else int(float(number) * scale)
        if size <= _MAX_BYTES and not (binary and not unit):
            return size
    raise ConfigError(f"{key} is {text!a}: give bytes, or a size like 256MiB or 1.5GB")


def parse_capacity(key: str, text: str) -> int:
    """The same, and more than nothing."""
    size = parse_size(key, text)
    if not size:
        raise ConfigError(f"{key} is {text!a}: give more than 0 bytes, or leave it out")
    return size
