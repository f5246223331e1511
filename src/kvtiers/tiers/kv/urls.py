"""A tier's options in one URL: ``redis://host:6379/0?prefix=mine&password_env=SECRET``."""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvtiers.options import options_of
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.options import bad_option, parse


def entry_of(url: str) -> dict[str, Any]:
    """The entry of ``secondary_tiers`` that ``url`` stands for; options follow behind a ``?``.

    Raises ConfigError, without a word of what may be a password.
    """
    place, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    if urlsplit(place).scheme == "unix" and "db" in given:
        place += f"?db={given.pop('db')}"
    parse_address(place)
    entry = {key: _value(key, text) for key, text in given.items()}
    parse(KvOptions, {"url": place, **entry})
    return {"type": "kv", "url": place, **entry}


def _value(key: str, text: str) -> Any:
    """What a word means where the option takes no string."""
    option = options_of(KvOptions).get(key)
    if option is None or "string" in option.reader.expects or '"' in option.reader.expects:
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise bad_option(key, f"is {text!a}: give {option.reader.expects}") from None
