"""The options page: a list of places with their waits, which stays up to date while it is open."""

from __future__ import annotations

import asyncio
import html
import math
import time
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.units import format_duration_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kiwi_jupyterhub.waits import Place

CHOICE: Final = "kiwi_place"
"""Name of the field in the form, and of the option in the REST interface of the hub."""

FRESH_FOR_S: Final = 2.0
"""How long an answer is reused: a hundred users with the page open ask once, not a hundred
times.
"""

SHORTEST: Final = "where the wait is shortest"

_SCRIPT: Final = """
<script>
setInterval(async () => {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const place of document.querySelectorAll("#kiwi-places label")) {
    const now = page.getElementById(place.htmlFor);
    if (!now) continue;
    place.textContent = now.nextElementSibling.textContent;
    document.getElementById(place.htmlFor).disabled = now.disabled;
  }
}, 5000);
</script>
"""


class OptionsPage:
    """``waits`` returns the places; it may block, and raises an exception if it does not know.
    ``put`` sets up a spawner for the chosen place (``kiwi_jupyterhub.places``).
    """

    def __init__(
        self, waits: Callable[[], Sequence[Place]], put: Callable[[Any, str], None]
    ) -> None:
        self._waits = waits
        self._put = put
        self._known: tuple[float, Sequence[Place]] | None = None
        self._asking = asyncio.Lock()

    def install(self, config: Any) -> None:
        """Set the three traits of all spawners; ``config`` is ``c`` in ``jupyterhub_config.py``. A
        hub that has a hook of its own awaits ``before_spawn`` in that hook.
        """
        config.Spawner.options_form = self.form
        config.Spawner.options_from_form = self.options
        config.Spawner.pre_spawn_hook = self.before_spawn

    async def form(self, spawner: Any) -> str:  # noqa: ARG002 (JupyterHub's interface)
        """Return the form's HTML. Called by the hub for each page."""
        try:
            places = await self._places()
        except Exception as error:  # noqa: BLE001 (a server starts, whatever is wrong with Kiwi)
            words = html.escape(f"The waits are not known now ({type(error).__name__}).")
            return f"<p>{words} Your server starts {SHORTEST}.</p>"
        return form_html(places)

    def options(self, form: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the user's options from the form. Called by the hub."""
        return {CHOICE: form.get(CHOICE, [""])[0]}

    async def before_spawn(self, spawner: Any) -> None:
        """Put the server on its place. Called by the hub before the server starts.

        The hub's REST interface passes any options, and some spawners write them into a script: a
        place that does not exist is refused (``ValueError``).
        """
        key = spawner.user_options.get(CHOICE, "")
        if key and key not in {place.key for place in await self._places()}:
            raise ValueError(f"There is no place {key!r} for a server.")
        self._put(spawner, key)

    async def _places(self) -> Sequence[Place]:
        async with self._asking:
            if self._known is None or time.monotonic() - self._known[0] > FRESH_FOR_S:
                places = await asyncio.to_thread(self._waits)
                self._known = time.monotonic(), places
            return self._known[1]


def form_html(places: Sequence[Place]) -> str:
    """Return the form: the place with the shortest wait comes first and is preselected."""
    ordered = sorted(places, key=lambda place: (place.wait_s is None, place.wait_s or 0.0))
    shortest = next((place for place in ordered if place.wait_s is not None), None)
    now = f" (now {shortest.name}, {said(shortest.wait_s)})" if shortest else ""
    rows = [_row("", f"{SHORTEST}{now}", "checked")]
    for place in ordered:
        takes_nobody = "disabled" if place.wait_s is None else ""
        rows.append(_row(place.key, f"{place.name}: {said(place.wait_s)}", takes_nobody))
    return (
        '<fieldset id="kiwi-places"><legend>GPU</legend>' + "".join(rows) + f"</fieldset>{_SCRIPT}"
    )


def _row(key: str, words: str, state: str) -> str:
    key, ident = html.escape(key), html.escape(f"kiwi-place-{key or 'shortest'}")
    return (
        f'<div><input type="radio" name="{CHOICE}" id="{ident}" value="{key}" {state}>'
        f'<label for="{ident}">{html.escape(words)}</label></div>'
    )


def said(wait_s: float | None) -> str:
    """Return the text of a wait."""
    if wait_s is None:
        return "takes nobody now"
    if math.isinf(wait_s):
        return "nobody can say how long"
    return "free now" if wait_s < 1 else f"a cell waits about {format_duration_s(wait_s)}"
