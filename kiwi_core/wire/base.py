"""The base of every message of the protocol: a struct with the name of its type in ``type``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

INTEGER_LIMIT = 1 << 53
"""Upper bound (exclusive) of integers: below 2^53 every JSON reader keeps an integer exact."""

Count = Annotated[int, Meta(ge=0, lt=INTEGER_LIMIT)]
"""A number of bytes, or of things."""


class Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=False):
    pass
