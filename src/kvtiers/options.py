"""Options: what a key takes, how a value is read, and how a refusal is worded.

One reader for the engine's settings (:mod:`kvtiers.config`) and for the options of tiers
(:mod:`kvtiers.tiers.options`): both are dataclasses whose fields say what they take, by a
:class:`Reader` in their metadata or else by their type.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvtiers.errors import ConfigError


class Unfit(Exception):
    """A reader met a value that is not what its ``expects`` says."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What an option takes, in words, and the function that makes it of what a user wrote."""

    expects: str
    read: Callable[[Any], Any]
    """Raises Unfit."""
    secret: bool = False
    """No error shows a value that did not fit."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a configuration."""

    key: str
    reader: Reader
    default: Any = MISSING
    """``MISSING``: the key is required."""
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Wording:
    """How refusals are put: templates of one sentence each."""

    unknown: str
    """Of ``{key}`` and ``{hint}``, which is one of the next two."""
    near: str
    """Of ``{near}``, the nearest valid key."""
    others: str
    """Of ``{known}``, all valid keys."""
    missing: str
    """Of ``{key}`` and ``{expects}``."""
    unfit: str
    """Of ``{key}``, ``{expects}`` and ``{value}``."""


def whole(value: Any) -> int:
    """An integer; 1e9 is one, True is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unfit
    return value


def number(value: Any) -> float:
    """A finite number; True is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit
    try:
        result = float(value)
    except OverflowError:
        raise Unfit from None
    if not math.isfinite(result):
        raise Unfit
    return result


def where(convert: Callable[[Any], Any], holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """``convert``, then refuse what does not hold."""

    def read(value: Any) -> Any:
        result = convert(value)
        if not holds(result):
            raise Unfit
        return result

    return read


def exactly(kind: type) -> Callable[[Any], Any]:
    """A value of this very type, as it is."""
    return where(lambda value: value, lambda value: type(value) is kind)


_BY_TYPE: Mapping[Any, Reader] = {
    int: Reader("an integer", whole),
    float: Reader("a number", number),
    str: Reader("a string", exactly(str)),
    bool: Reader("true or false", exactly(bool)),
    NoneType: Reader("null", exactly(NoneType)),
}


def reader_of(hint: Any) -> Reader:
    """The reader of a type: of those above, literal strings, and unions of them."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        spelt = " or ".join(f'"{choice}"' for choice in choices)
        return Reader(spelt, where(exactly(str), lambda value: value in choices))
    if get_origin(hint) in (Union, UnionType):
        readers = [reader_of(h) for h in get_args(hint)]
        return Reader(" or ".join(r.expects for r in readers), _first_of(readers))
    if hint in _BY_TYPE:
        return _BY_TYPE[hint]
    raise TypeError(f"an option of type {hint} needs a Reader of its own")


def _first_of(readers: Iterable[Reader]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader.read(value)
            except Unfit:
                continue
        raise Unfit

    return read


def option(reader: Reader, doc: str, default: Any = MISSING) -> Any:
    """A field of a dataclass of options that its type alone does not describe."""
    return dataclasses.field(default=default, metadata={"reader": reader, "doc": doc})


def not_an_option(default: Any) -> Any:
    """A field of a dataclass of options that is not for users to set."""
    return dataclasses.field(default=default, metadata={"reader": None})


def options_of(cls: type[Any]) -> dict[str, Option]:
    """The options that the dataclass ``cls`` declares, by key, in its order."""
    hints = get_type_hints(cls)
    found = {}
    for f in dataclasses.fields(cls):
        if "reader" in f.metadata:
            reader = f.metadata["reader"]
        else:
            reader = _with_unit(f.name, reader_of(hints[f.name]))
        if reader is not None:
            found[f.name] = Option(f.name, reader, f.default, f.metadata.get("doc", ""))
    return found


def _with_unit(key: str, reader: Reader) -> Reader:
    """``reader``, saying what is counted where the name of its key does: no "100GiB" is one."""
    if not key.endswith("_bytes"):
        return reader
    counted = reader.expects.replace(_BY_TYPE[int].expects, "a whole number of bytes")
    return dataclasses.replace(reader, expects=counted)


def refuse_unknown(keys: Iterable[Any], known: Iterable[str], wording: Wording) -> None:
    """Raise ConfigError for the first of ``keys`` that is not known, with the nearest that is."""
    valid = list(known)
    for key in keys:
        if key not in valid:
            near = nearest(str(key), valid)
            hint = wording.others.format(known=", ".join(valid))
            if near is not None:
                hint = wording.near.format(near=near)
            raise ConfigError(wording.unknown.format(key=key, hint=hint), key=str(key))


def read_options(
    options: Mapping[str, Option], values: Mapping[str, Any], wording: Wording
) -> dict[str, Any]:
    """What ``values``, all of them known, say. Raises ConfigError that names the key."""
    for key, declared in options.items():
        if declared.default is MISSING and key not in values:
            expects = declared.reader.expects
            raise ConfigError(wording.missing.format(key=key, expects=expects), key=key)
    return {
        key: read_value(key, options[key].reader, value, wording) for key, value in values.items()
    }


def read_value(key: str, reader: Reader, value: Any, wording: Wording) -> Any:
    """What the value of ``key`` says. Raises ConfigError if it does not fit."""
    try:
        return reader.read(value)
    except Unfit:
        found = "something else" if reader.secret else shown(value)
        sentence = wording.unfit.format(key=key, expects=reader.expects, value=found)
        raise ConfigError(sentence, key=key) from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The valid word that a misspelt one may mean."""
    near = get_close_matches(word.lower(), list(known), n=1)
    return near[0] if near else None


def shown(value: Any) -> str:
    """``value`` for an error; of mappings and lists the kind only: they may hold credentials."""
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else repr(value)


def table(options: Iterable[Option]) -> str:
    """The options as a markdown table: key, what it takes, default, meaning."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for each in options:
        takes, meaning = _cell(each.reader.expects), _cell(each.doc)
        lines.append(f"| `{each.key}` | {takes} | {_default(each.default)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None:
        return "not set"
    if value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
