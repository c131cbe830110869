"""Generate C from the driver's header and ``calls.def``: wrappers, their table, and real.h.

Wrappers pass on machine words, not typed arguments: only the caller and the driver need to know
the types, and only the number of words has to be right. Calls that Kiwi itself inspects have typed
wrappers written by hand (in ``src/hooks``), which the compiler checks against the header;
``calls.def`` names them as hooks.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kiwi_core.preload._paths import SOURCES

if TYPE_CHECKING:
    from pathlib import Path

CALLS = SOURCES / "hooks" / "calls.def"
GATED = "gated"
CLASSES = (GATED, "free", "wait", "never")
FOREIGN = ("pool", "managed", "array", "vmm", "ipc", "graph", "external", "legacy")
WIDE_WORDS = 16
"""Number of words that a wrapper passes on for a form of a call that the header does not know."""
WIDE_SLOTS = 48
OTHER_SLOTS = 128
"""Number of such wrappers for functions that are not gated, or that the header lacks entirely."""
NVML_SLOTS = 512
"""Number of such wrappers for functions of NVML, which has about 390."""
PREPROCESS_TIMEOUT_S = 120.0

_SUFFIXES = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
_PROTOTYPE = re.compile(
    r"(?:^|;)\s*(?:extern\s+)?CUresult\s+(cu[A-Z]\w*)\s*\(([^;]*?)\)\s*;", re.S | re.M
)


class CallsError(ValueError):
    """``calls.def`` is malformed; the message names the line."""


@dataclass(frozen=True, slots=True)
class DriverCall:
    """An entry of ``calls.def``: one function."""

    name: str
    kind: str
    hooks: dict[str, int] = field(default_factory=dict)
    """First interface version that means each form with a hand-written wrapper, by symbol."""
    foreign: str | None = None
    refusable: bool = False
    """An interrupt may end its wait."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported function of the driver."""

    name: str
    call: DriverCall
    words: int
    since: int
    """First version of the interface that means this form if the symbol is a hook; else 0."""

    @property
    def hooked(self) -> bool:
        return self.since > 0

    @property
    def gate_class(self) -> str:
        kind = "KP_GATED" if self.call.kind == GATED else "KP_OTHER"
        return f"{kind} | KP_REFUSABLE" if self.call.refusable else kind


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    words: dict[str, int]
    """Number of arguments of every function that the driver exports by this header, by name."""
    public: tuple[str, ...]
    """Symbols that a program means when it includes the header and uses the plain names."""


def base_name(symbol: str) -> str:
    return _SUFFIXES.sub("", symbol)


def read_calls(path: Path = CALLS) -> dict[str, DriverCall]:
    """Return the entries of ``calls.def``, by name. Raise ``CallsError``."""
    calls: dict[str, DriverCall] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        kind, name, *more = line.split()
        if kind not in CLASSES or name in calls:
            raise CallsError(f"{path.name}:{number}: unknown class or second entry: {line}")
        calls[name] = _call(kind, name, more, f"{path.name}:{number}")
    return calls


def _call(kind: str, name: str, more: list[str], where: str) -> DriverCall:
    hooks: dict[str, int] = {}
    foreign, refusable = None, False
    for word in more:
        what, _, value = word.partition(":")
        symbol, _, since = value.partition("@")
        if what == "hook" and base_name(symbol) == name and since.isdigit():
            hooks[symbol] = int(since)
        elif what == "foreign" and value in FOREIGN:
            foreign = value
        elif word == "refusable":
            refusable = True
        else:
            raise CallsError(f"{where}: what is {word!r}?")
    return DriverCall(name, kind, hooks, foreign, refusable)


def read_header(compiler: list[str], header: Path) -> Header:
    """Read the preprocessed ``cuda.h``. Raise ``OSError`` or ``subprocess.SubprocessError``."""
    every = _preprocessed(compiler, header, "-D__CUDA_API_VERSION_INTERNAL")
    plain = _preprocessed(compiler, header)
    words = {name: _count(arguments) for name, arguments in _PROTOTYPE.findall(every)}
    public = tuple(sorted({name for name, _ in _PROTOTYPE.findall(plain)}))
    return Header(version(header), words, public)


def version(header: Path) -> int:
    """Return the header's CUDA_VERSION, or 0 if the header is missing or is another ``cuda.h``
    (Linux has one for old Macintoshes)."""
    try:
        text = header.read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"^\s*#\s*define\s+CUDA_VERSION\s+(\d+)", text, re.M)
    return int(found[1]) if found else 0


def _preprocessed(compiler: list[str], header: Path, *flags: str) -> str:
    command = [*compiler, "-E", "-P", *flags, "-x", "c", str(header)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PREPROCESS_TIMEOUT_S
    )
    return done.stdout


def _count(arguments: str) -> int:
    """Return the number of arguments, ignoring the commas inside the parentheses of function
    pointers."""
    depth = count = 0
    for character in arguments:
        depth += (character == "(") - (character == ")")
        count += character == "," and depth == 0
    return 0 if arguments.split() in ([], ["void"]) else count + 1


def symbols(calls: dict[str, DriverCall], header: Header) -> list[Symbol]:
    """Return every function of the header, grouped by call, in the order of names."""
    found = []
    for name in sorted(header.words, key=lambda symbol: (base_name(symbol), symbol)):
        call = call_of(calls, base_name(name))
        since = call.hooks.get(re.sub(r"_pt[sd][sz]$", "", name), 0)
        found.append(Symbol(name, call, header.words[name], since))
    return found


def call_of(calls: dict[str, DriverCall], name: str) -> DriverCall:
    """Return the entry for ``name``; a function that the list does not name is gated."""
    fitting = (call for pattern, call in calls.items() if fnmatchcase(name, pattern))
    return replace(calls.get(name) or next(fitting, DriverCall(name, GATED)), name=name)


def write(directory: Path, calls: dict[str, DriverCall], header: Header) -> None:
    """Write base/real.h, hooks/symbols.h and hooks/calls.c into ``directory``."""
    found = symbols(calls, header)
    named = {symbol.call.name: symbol.call for symbol in found}
    for room in ("base", "hooks"):
        (directory / room).mkdir()
    (directory / "base/real.h").write_text(_real(header))
    (directory / "hooks/symbols.h").write_text(_symbols(found, named, header))
    (directory / "hooks/calls.c").write_text(_wrappers(found) + _tables(found, named))


def _real(header: Header) -> str:
    lines = [
        "/* Generated: the driver's own functions, as a program that includes cuda.h means them. */"
    ]
    lines += ["#ifndef KP_REAL_H", "#define KP_REAL_H", "#include <cuda.h>"]
    lines += ["struct kp_real {"]
    lines += [f"    __typeof__({name}) *{name};" for name in header.public]
    lines += ["};", "/* Members are NULL where the driver has no such function. */"]
    lines += ["extern struct kp_real kp_real;"]
    lines += ["#ifdef KP_REAL_NAMES /* in the order of the struct */"]
    lines += ["static const char *const kp_real_names[] = {"]
    lines += [f'    "{name}",' for name in header.public]
    return "\n".join([*lines, "};", "#endif", "#endif", ""])


def _symbols(found: list[Symbol], calls: dict[str, DriverCall], header: Header) -> str:
    lines = ["/* Generated: where each function stands in the table of calls.c. */"]
    lines += ["#ifndef KP_SYMBOLS_H", "#define KP_SYMBOLS_H", "enum {"]
    lines += [f"    KP_AT_{symbol.name} = {at}," for at, symbol in enumerate(found)]
    lines += [f"    KP_SYMBOLS = {len(found)},", f"    KP_CALLS = {len(calls)},"]
    spares = sum(not symbol.hooked for symbol in found)
    lines += [f"    KP_SPARES = {spares},", f"    KP_WIDES = {WIDE_SLOTS},"]
    lines += [f"    KP_OTHERS = {OTHER_SLOTS},", f"    KP_NVMLS = {NVML_SLOTS},"]
    lines += [f"    KP_HEADER_VERSION = {header.version},"]
    lines += [f"    COUNT_{kind.upper()} = {at}," for at, kind in enumerate(FOREIGN)]
    kinds = ", ".join(f"KP_FOREIGN_{kind.upper()}" for kind in FOREIGN)
    return "\n".join([*lines, "};", f"#define KP_COUNTED {{{kinds}}}", "#endif", ""])


def _wrappers(found: list[Symbol]) -> str:
    """Return a wrapper and a spare one for each function, and wide wrappers for newer functions.

    The wrapper stands for the function of that name, the spare for another address that
    ``cuGetProcAddress`` may return for the same call.
    """
    arities = sorted({symbol.words for symbol in found} | {WIDE_WORDS, 0})
    lines = ["/* Generated by _generate.py. */", '#include "hooks/calls.h"', ""]
    for n in arities:
        lines.append(f"#define D{n} {', '.join(f'W a{i}' for i in range(n)) or 'void'}")
        lines.append(f"#define P{n} {', '.join(f'a{i}' for i in range(n))}")
        lines.append(f"#define T{n} W (*)({', '.join('W' for _ in range(n)) or 'void'})")
        lines.append(f"static __attribute__((noinline, cold)) W slow{n}(D{n}) {{ SLOW({n}) }}")
    lines.append("")
    spare = 0
    for at, symbol in enumerate(found):
        n, kind = symbol.words, _foreign(symbol.call)
        if symbol.hooked:
            lines.append(f"extern void {symbol.name}(void);")
        else:
            more = f"{kind}, {symbol.gate_class}"
            body = f"PASS({n}, kp_symbols[{at}].real, {more})"
            lines.append(f"KP_API W {symbol.name}(D{n}) {{ {body} }}")
            body = f"PASS({n}, kp_spares[{spare}].real, {more})"
            lines.append(f"static W s{spare}(D{n}) {{ {body} }}")
            spare += 1
    lines += _wide("w", "kp_wides", "KP_GATED", WIDE_SLOTS)
    lines += _wide("o", "kp_others", "KP_OTHER", OTHER_SLOTS)
    nvml = f"PASS_NVML({WIDE_WORDS}, kp_nvmls[{{}}].real)"
    lines += [f"static W n{i}(D{WIDE_WORDS}) {{ {nvml.format(i)} }}" for i in range(NVML_SLOTS)]
    return "\n".join(lines) + "\n"


def _wide(letter: str, slots: str, kind: str, count: int) -> list[str]:
    body = f"PASS({WIDE_WORDS}, {slots}[{{}}].real, NOT_FOREIGN, {kind})"
    return [f"static W {letter}{i}(D{WIDE_WORDS}) {{ {body.format(i)} }}" for i in range(count)]


def _tables(found: list[Symbol], calls: dict[str, DriverCall]) -> str:
    at_symbol = at_spare = 0
    rows: list[str] = []
    table = ["", "struct kp_symbol kp_symbols[KP_SYMBOLS] = {"]
    spares: list[str] = []
    for name in sorted(calls):
        mine = [symbol for symbol in found if symbol.call.name == name]
        table += [f'    {{"{one.name}", (void *){one.name}, 0, {one.since}}},' for one in mine]
        typeless = sum(not symbol.hooked for symbol in mine)
        spares += [f"    {{(void *)s{at_spare + i}, 0}}," for i in range(typeless)]
        gated = int(calls[name].kind == GATED)
        rows.append(f'    {{"{name}", {gated}, {at_symbol}, {len(mine)}, {at_spare}, {typeless}}},')
        at_symbol += len(mine)
        at_spare += typeless
    table += ["};", "const struct kp_call kp_calls[KP_CALLS] = {", *rows, "};"]
    table += ["struct kp_slot_ kp_spares[KP_SPARES] = {", *spares, "};"]
    table += ["struct kp_slot_ kp_wides[KP_WIDES] = {"]
    table += [f"    {{(void *)w{i}, 0}}," for i in range(WIDE_SLOTS)]
    table += ["};", "struct kp_slot_ kp_others[KP_OTHERS] = {"]
    table += [f"    {{(void *)o{i}, 0}}," for i in range(OTHER_SLOTS)]
    table += ["};", "struct kp_slot_ kp_nvmls[KP_NVMLS] = {"]
    table += [f"    {{(void *)n{i}, 0}}," for i in range(NVML_SLOTS)]
    return "\n".join([*table, "};", ""])


def _foreign(call: DriverCall) -> str:
    return f"COUNT_{call.foreign.upper()}" if call.foreign else "NOT_FOREIGN"
