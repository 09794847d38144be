"""Strict access to the fields of one record: the right type, or a ConfigError with file, line, field and cure.

Never: what a format calls its fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from trace_async.errors import ConfigError

_ABSENT = object()
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_MAX_NAMED_FIELDS = 12


class Record:
    """The fields of one record, or of an object inside it. A null is an absent field."""

    __slots__ = ("fields", "format", "place", "prefix")

    def __init__(self, place: str, fields: Mapping[str, object], format: str, prefix: str = "") -> None:
        self.place = place
        self.fields = fields
        self.format = format
        self.prefix = prefix  # path to this object, "" for the record itself

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def text(self, name: str) -> str:
        """A text with something in it."""
        value = self.as_text(name, self._get(name))
        if not value.strip():
            raise self.wrong(name, "a text that is not blank", value)
        return value

    def text_or_empty(self, name: str) -> str:
        return self.as_text(name, self._get(name)) if self.has(name) else ""

    def identity(self, *names: str) -> str:
        """The first of the fields that is there, a text or a whole number, as text; "" when none is."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            return ""
        value = self._get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def items(self, name: str) -> list[object]:
        return self.as_list(name, self._get(name))

    def texts(self, name: str) -> list[str]:
        return self.as_texts(name, self._get(name))

    def record(self, name: str) -> Record:
        return self.as_record(name, self._get(name))

    def records(self, name: str) -> list[Record]:
        return [self.as_record(f"{name}[{i}]", value) for i, value in enumerate(self.items(name))]

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def whole(self, name: str) -> int:
        return self.as_whole(name, self._get(name))

    def as_text(self, label: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong(label, "a text", value)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise self.wrong(label, "a text without halves of surrogate pairs", value) from None
        return value

    def as_whole(self, label: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(label, "a whole number", value)
        return value

    def as_list(self, label: str, value: object, length: int | None = None) -> list[object]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.wrong(label, "a list" if length is None else f"a list of {length}", value)
        return value

    def as_texts(self, label: str, value: object) -> list[str]:
        return [self.as_text(f"{label}[{i}]", item) for i, item in enumerate(self.as_list(label, value))]

    def as_record(self, label: str, value: object) -> Record:
        if not isinstance(value, Mapping):
            raise self.wrong(label, "an object", value)
        return self.inside(label, value)

    def inside(self, label: str, fields: Mapping[str, object]) -> Record:
        """A record for an object of this one."""
        return Record(self.place, fields, self.format, f"{self.prefix}{label}.")

    def wrong(self, label: str, expected: str, value: object = _ABSENT) -> ConfigError:
        """The error to raise for a field."""
        if value is _ABSENT:
            names = sorted(self.fields)
            more = ", ..." if len(names) > _MAX_NAMED_FIELDS else ""
            found = f"nothing (fields there: {', '.join(names[:_MAX_NAMED_FIELDS])}{more})"
        else:
            found = f"{type(value).__name__} {_REPR.repr(value)}"
        return ConfigError(
            f"{self.place}: field {self.prefix + label!r} of a {self.format} record must be {expected}, found {found}; "
            "mend the record, or name the format it has (FORMAT:PATH)"
        )

    def _get(self, name: str) -> object:
        value = self.fields.get(name)
        if value is None:
            raise self.wrong(name, "there")
        return value
