"""Kiwi in another language: JupyterLab with a language pack that is made of the catalogue."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import running_daemon
from lab import running_lab
from playwright.sync_api import expect
from sharing_stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab_page import LabPage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TEMPLATE = Path(__file__).parents[2] / "labextension/locale/kiwi_jupyter.pot"
LOCALE = "de_DE"
PACK = f"jupyterlab_language_pack_{LOCALE}"


def write_pack(directory: Path) -> None:
    """Write a language pack as it is installed. It translates each text by «the text»."""
    files = directory / PACK / "locale" / LOCALE / "LC_MESSAGES"
    files.mkdir(parents=True)
    (directory / PACK / "__init__.py").touch()
    texts = re.findall(
        r'^(?:msgctxt (".+")\n)?msgid (".+")\n(?:msgid_plural (".+"))?',
        TEMPLATE.read_text(),
        re.MULTILINE,
    )
    assert len(texts) > 150
    head = {
        "domain": "kiwi_jupyter", "language": LOCALE.replace("_", "-"), "version": "0.1.0",
        "plural_forms": "nplurals=2; plural=(n != 1);",
    }  # fmt: skip
    data: dict[str, object] = {"": head}
    for context, *forms in texts:
        one, *more = (json.loads(form) for form in forms if form)
        key = f"{json.loads(context)}\4{one}" if context else one
        data[key] = [f"«{form}»" for form in (one, *more)]
    (files / "kiwi_jupyter.json").write_text(json.dumps(data))
    about = directory / f"{PACK}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACK}\nVersion: 1.0\n")
    entry = f"[jupyterlab.languagepack]\n{LOCALE} = {PACK}\n"
    (about / "entry_points.txt").write_text(entry)


def test_a_language_pack_translates_every_surface(
    private_tmp: Path, open_lab: Callable[..., LabPage], tmp_path: Path
) -> None:
    write_pack(tmp_path)
    settings = {"@jupyterlab/translation-extension:plugin": {"locale": LOCALE}}
    with running_daemon("1x128MiB") as daemon:
        env = {**daemon.env, "PYTHONPATH": str(tmp_path)}
        with running_lab(env, settings=settings) as lab:
            page = open_lab(Stage(daemon, lab))
            panel = page.panel()
            # Words of the panel, of a module's constant, and of an attribute.
            expect(panel.root).to_contain_text("«Free»")
            expect(panel.root).to_contain_text("«None of your notebooks uses this GPU yet.»")
            expect(panel.root).to_contain_text("«on»")
            expect(panel.part("emulated")).to_have_text("«Emulated – not a real GPU»")
            expect(page.page.locator("[data-kiwi=status-item]")).to_have_text(
                "«Emulated «GPU: «free»»»"
            )
            label = page.page.evaluate("window.jupyterapp.commands.label('kiwi:open-panel')")
            assert label == "«Show Who Has the GPU»"
