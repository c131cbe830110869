"""The words that every surface uses for the same thing: command line, notebook and sidebar.

``packaging/typescript_terms.py`` writes ``labextension/src/model/terms.ts`` from this file. A part
in braces becomes an argument there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Mapping

STATES: Final[Mapping[SessionState, str]] = {
    state: state.value.replace("-", " ") for state in SessionState
}
"""What a session does. ``kiwi status --json`` writes these words with a hyphen."""

ANY_MOMENT: Final = "any moment"
ABOUT: Final = "about {amount}"
UP_TO: Final = "up to {amount}"
NOBODY_CAN_TELL: Final = "nobody can tell"
HELD_UP: Final = "held up"
TAKES_NO_PART: Final = "takes no part"
KEPT_OUT: Final = "suspended by {who} until kiwi resume"

UNTIL_OTHERS_ASK: Final = "until others ask"
UNTIL_DONE: Final = "until it is done"
TURN_OVER: Final = "its turn is over"
AT_MOST: Final = "at most {left} more"
KEEPS: Final = "keeps the GPU for up to {left} in case its next cell comes"

ONE_AT_A_TIME: Final = "one at a time"
IN_PARALLEL: Final = "in parallel"
QUANTUM: Final = "quantum"
ANTI_THRASH: Final = "anti-thrash"
POLICY: Final = "policy"

ENDED: Final = "a program that has ended"
BUSY: Final = "{percent} % busy"
PROGRAM: Final = "{name} (pid {pid})"
OUTSIDE: Final = "held by programs outside Kiwi"
UNNAMED: Final = "held by the driver, or by programs that it does not name"
UNNAMED_LEAST_BYTES: Final = 64 << 20
"""Less than this explains no wait, and is not shown: the driver's own memory beside contexts."""
