"""Draws waits by length of cell as an SVG, without a library, for light and dark backgrounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from kiwi_core.units import format_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.simulate.measure import Quantiles, Summary

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours: the colour-blind can tell them apart; visible on white and on black."""

LEFT, RIGHT, TOP, HEIGHT = 64, 16, 64, 280
GROUP, BAR, GAP = 36, 18, 10
"""In pixels: the space of a group beside its bars, a bar's width, the space between bars."""
LEAST_S: Final = 0.1
"""The bottom of the (logarithmic) axis; shorter waits are drawn there."""
WHAT: Final = (
    "waits by the GPU time of the cell; bar: median to 95th percentile, line: to the longest"
)
TICKS: Final = (
    (LEAST_S, "≤ 0.1 s"), (1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"),
    (3600.0, "1 h"), (36_000.0, "10 h"), (360_000.0, "100 h"), (3_600_000.0, "1,000 h"),
)  # fmt: skip

_STYLE: Final = """\
svg { color: #1f2328; background: #ffffff; font: 12px system-ui, sans-serif }
text { fill: currentColor }
.grid { stroke: currentColor; stroke-opacity: 0.18 }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill-opacity: 0.8 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }"""


def waits_svg(title: str, columns: Sequence[tuple[str, Summary]]) -> str:
    """Return the SVG. ``columns``: name and summary of each set-up, all with the same classes."""
    groups = [one.cells for one in columns[0][1].classes]
    group_width = GROUP + len(columns) * (BAR + GAP)
    width = max(LEFT + RIGHT + len(groups) * group_width, 560)
    legend_top = TOP + HEIGHT + 48
    height = legend_top + 18 * len(columns) + 30
    top_s = _top_s(columns)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">'
        ),
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(_in_words(columns))}</desc>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        f'<text class="small" x="{LEFT}" y="44">{WHAT}</text>',
        *_axis(top_s, width),
    ]
    for number, name in enumerate(groups):
        left = LEFT + number * group_width + GROUP / 2
        middle = left + (group_width - GROUP) / 2
        parts.append(_text(middle, TOP + HEIGHT + 20, name))
        parts.append(
            _text(middle, TOP + HEIGHT + 34, f"{columns[0][1].classes[number].wait_s.n:,}", "small")
        )
        for bar, (_, summary) in enumerate(columns):
            x = left + bar * (BAR + GAP) + GAP / 2
            parts += _bar(x, summary.classes[number].wait_s, top_s, _colour(bar))
    for number, (name, _) in enumerate(columns):
        y = legend_top + 18 * number + 14
        parts.append(f'<rect x="{LEFT}" y="{y - 10}" width="12" height="12" rx="2"')
        parts[-1] += f' fill="{_colour(number)}"/>'
        parts.append(f'<text x="{LEFT + 20}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _top_s(columns: Sequence[tuple[str, Summary]]) -> float:
    longest_s = max(one.wait_s.max for _, summary in columns for one in summary.classes)
    return next((tick_s for tick_s, _ in TICKS[2:] if tick_s >= longest_s), longest_s)


def _y(wait_s: float, top_s: float) -> float:
    above = math.log(max(wait_s, LEAST_S) / LEAST_S) / math.log(top_s / LEAST_S)
    return TOP + HEIGHT * (1.0 - above)


def _axis(top_s: float, width: int) -> list[str]:
    parts = []
    for tick_s, label in TICKS:
        if tick_s > top_s:
            break
        y = _y(tick_s, top_s)
        parts += [
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            (
                f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(label)}</text>"
            ),
        ]
    return parts


def _bar(x: float, wait: Quantiles, top_s: float, colour: str) -> list[str]:
    if not wait.n:
        return []
    median, p95, longest = (_y(value, top_s) for value in (wait.p50, wait.p95, wait.max))
    middle = x + BAR / 2
    words = ", ".join(
        f"{name} {format_duration_s(value)}"
        for name, value in (("median", wait.p50), ("95 %", wait.p95), ("longest", wait.max))
    )
    return [
        f'<g stroke="{colour}" fill="{colour}"><title>{escape(words)}</title>',
        (
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{median:.1f}" y2="{longest:.1f}" '
            'stroke-width="2"/>'
        ),
        (
            f'<rect x="{x:.1f}" y="{p95:.1f}" width="{BAR}" height="{max(2.0, median - p95):.1f}" '
            'rx="2" fill-opacity="0.9"/>'
        ),
        "</g>",
    ]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _in_words(columns: Sequence[tuple[str, Summary]]) -> str:
    """Return the figures in words, for users who cannot see the picture."""
    return " ".join(
        f"{name}, cells {one.cells}: median wait {format_duration_s(one.wait_s.p50)}, 95 % "
        f"within {format_duration_s(one.wait_s.p95)}."
        for name, summary in columns
        for one in summary.classes
        if one.wait_s.n
    )
