"""axe-core in an open page: find what makes the page inaccessible to people with disabilities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE = Path(__file__).parents[2] / "labextension/node_modules/axe-core/axe.min.js"

_RUN = """async ([selector, rules]) => {
  const options = { resultTypes: ['violations'] };
  if (rules.length > 0) options.runOnly = { type: 'rule', values: rules };
  const result = await axe.run(selector, options);
  return result.violations.flatMap(violation => violation.nodes.map(node =>
    `${violation.impact} ${violation.id}: ${node.target}: ${node.failureSummary}`));
}"""


def violations(page: Page, selector: str, *rules: str) -> list[str]:
    """Return one line or more for each element inside ``selector`` that breaks one of ``rules``;
    without ``rules``, one of those that axe applies by default."""
    assert AXE.is_file(), f"axe-core is not there: npm --prefix {AXE.parents[2]} ci installs it"
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    found: list[str] = page.evaluate(_RUN, [selector, list(rules)])
    return found
