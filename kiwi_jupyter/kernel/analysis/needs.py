"""The common form of cells and functions: what a piece of code reaches.

The proof assumes a closed world. A value *stays on the CPU* if nothing that anybody can do with it
(call it, print it, add it, iterate over it, read its attributes) leads to a GPU. Such values only
lead to more of their kind. So code stays on the CPU if every outside name that it reaches does, and
if it uses none of the few doors out (``CodeNeeds.doors``). Its intermediate values need not be
followed.

A module is not such a value, because ``os`` leads to ``os.system``. So names are read together with
the attributes that directly follow (``CodeNeeds.reads``), and a module that is passed around is a
door.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Chain = tuple[str, ...]
"""The attributes read directly from a name: ``("linalg", "norm")`` in ``np.linalg.norm(x)``."""


@dataclass(frozen=True)
class MagicCall:
    """A ``%magic``, ``%%magic`` or ``!command``, as IPython writes it into the cell.

    ``method`` is that of ``get_ipython()``: ``run_line_magic``, ``run_cell_magic``, ``system`` or
    ``getoutput``; ``arguments`` are its string constants.
    """

    line: int
    method: str
    arguments: tuple[str, ...]


@dataclass
class CodeNeeds:
    """Everything outside itself that code reaches, each with the line where it comes first."""

    reads: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """Global names that it reads, with their attributes."""
    cells: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """The same for variables of enclosing functions."""
    modules: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """Modules that it imports itself, with what it reads from them."""
    imports: dict[str, int] = field(default_factory=dict)
    """Modules that it imports, wherever their names go."""
    stores: dict[str, int] = field(default_factory=dict)
    """Global names that it binds or deletes: the old value is released, and its destructor may
    run.
    """
    attributes: dict[str, int] = field(default_factory=dict)
    """Attributes that it reads of computed values."""
    patches: dict[tuple[str, Chain, str], int] = field(default_factory=dict)
    """Attributes that it sets on the value of a global name (and a chain from it)."""
    mentions: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """Names that it reads without doing anything with them (annotations)."""
    bases: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """Names of base classes in a ``class`` statement."""
    magics: list[MagicCall] = field(default_factory=list)
    doors: list[tuple[int, str]] = field(default_factory=list)
    """Things that can lead anywhere, in words: ``exec``, ``importlib``, dynamic attributes …"""

    def read(self, name: str, chain: Chain, line: int) -> None:
        self.reads.setdefault((name, chain), line)

    def words(self) -> Iterator[str]:
        """Return every attribute that it reads."""
        yield from self.attributes
        for of in (self.reads, self.cells, self.modules):
            for _, chain in of:
                yield from chain

    def absorb(self, other: CodeNeeds) -> None:
        """Add what ``other`` needs."""
        pairs: tuple[tuple[dict[Any, int], dict[Any, int]], ...] = (
            (self.reads, other.reads),
            (self.cells, other.cells),
            (self.modules, other.modules),
            (self.imports, other.imports),
            (self.stores, other.stores),
            (self.attributes, other.attributes),
            (self.patches, other.patches),
            (self.mentions, other.mentions),
            (self.bases, other.bases),
        )
        for mine, theirs in pairs:
            for key, at in theirs.items():
                mine.setdefault(key, at)
        self.magics.extend(other.magics)
        self.doors.extend(other.doors)
