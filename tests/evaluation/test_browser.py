"""The page in a headless Chromium: at a phone's width, by keyboard, in the dark, without scripts, under attack.

Needs a browser (`ABLATION_TEST_CHROMIUM`, or `chromium` on the path: Debian's package will do), else it is skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, browser, find_chromium
from hostile_report import hostile_report

from evaluation.report import write_report

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: set ABLATION_TEST_CHROMIUM")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    write_report(out, hostile_report())
    return out / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(("width", "mobile", "dark"), [(390, True, False), (390, True, True), (1200, False, False)])
def test_no_error_no_request_no_sideways_scroll(page: Page, html: Path, width: int, mobile: bool, dark: bool) -> None:
    page.said.clear()
    page.requests.clear()
    page.open(html, width, mobile=mobile, dark=dark)
    page.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide = page.value("document.documentElement.scrollWidth")
    assert page.said == [] and wide <= width
    assert page.requests == [html.as_uri()]
    assert "owned" not in page.value("document.title") and page.value("document.images.length") == 0
    shade = page.value("getComputedStyle(document.body).backgroundColor")
    assert shade == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)")


def test_the_filter_and_the_keyboard(page: Page, html: Path) -> None:
    page.open(html, 390, mobile=True)
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    page.press("Enter")
    assert page.value("location.hash") == "#answer"
    shown = "[...document.querySelectorAll('#problems > details')].filter(d => !d.hidden).map(d => d.dataset.id)"
    everything = page.value(f"{shown}.length")
    page.value("const at = id => document.getElementById(id)")
    page.value("at('find').value = 'mbpp/2'; at('find').dispatchEvent(new Event('input'))")
    assert page.value(shown) == ["Mbpp/2", *(f"Mbpp/{i}" for i in range(20, 30))]
    page.value("at('find').value = ''; at('kind').value = 'contaminated'")
    page.value("at('kind').dispatchEvent(new Event('change'))")
    assert page.value(shown) == ["Mbpp/0", "Mbpp/1", "Mbpp/2"]
    assert page.value("at('count').textContent") == f"3 of {everything} problems"
    page.value("document.querySelector('#problems summary').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('#problems details').open") is True
    link = "[...document.querySelectorAll('td a')].find(a => a.hash.startsWith('#f-'))"
    page.value(f"{link}.click()")
    assert page.value("document.getElementById('files').open && document.querySelector(':target') !== null") is True
    assert page.said == []


def test_without_scripts_nothing_is_lost(page: Page, html: Path) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(html, 390, mobile=True)
        document = page.call("DOM.getDocument")["root"]["nodeId"]
        entries = page.call("DOM.querySelectorAll", nodeId=document, selector="#problems > details:not([hidden])")
        assert len(entries["nodeIds"]) == 30
        form = page.call("DOM.querySelectorAll", nodeId=document, selector="form:not([hidden])")
        assert form["nodeIds"] == []
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
