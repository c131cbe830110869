"""What every message of the protocol is: a struct with its type's name in ``type``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

INTEGER_LIMIT = 1 << 53
"""Integers stay below: the largest that every JSON reader keeps exact."""

Count = Annotated[int, Meta(ge=0, lt=INTEGER_LIMIT)]
"""Bytes, or a number that counts something."""


class Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=False):
    pass
