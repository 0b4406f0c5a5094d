"""The page as a browser shows it: what can be read and seen on it, in both colour schemes, on a
desktop and on a phone.

It needs the playwright package and a Chromium: `apt-get install chromium`, Chrome, or `playwright
install chromium`.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from some_run import some_rows, write_record

from hf_distca.tools.report.folder import RunFolder
from hf_distca.tools.report.page import render
from hf_distca.tools.report.run_figures import Figures, collect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
playwright_api = pytest.importorskip("playwright.sync_api", reason='needs pip install -e ".[dev]"')

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
VIEWS = list(itertools.product(SIZES, SCHEMES))

# Colours of an element and of what is behind it.
CONTRAST = """selector => [...document.querySelectorAll(selector)]
  .filter(e => e.getBoundingClientRect().width)
  .map(e => {
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    let behind = e;
    while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
      behind = behind.parentElement;
    const ground = getComputedStyle(behind || document.body).backgroundColor;
    return [svg ? style.fill : style.color, ground, e.textContent];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        try:
            # As root, which containers are, Chromium starts without its sandbox only. The page is
            # our own.
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except playwright_api.Error as error:
            pytest.skip(
                "no Chromium: apt-get install chromium, or playwright install chromium"
                f" ({str(error)[:200]})"
            )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    folder = write_record(tmp_path_factory.mktemp("run"), some_rows())
    return collect(RunFolder.read(folder))


@contextmanager
def shown(
    browser: Any, figures: Figures, folder: Path, size: str = "desktop", scheme: str = "light"
) -> Iterator[Any]:
    """The page in a window; nothing may be said on the console, nothing may fail, and nothing may
    be asked for.
    """
    path = folder / "report.html"
    path.write_text(render(figures), encoding="utf-8")
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.eval_on_selector_all("details", "all => all.forEach(e => (e.open = true))")
    yield page
    context.close()
    assert said == []
    assert asked == [path.as_uri()]


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_what_can_be_read(
    browser: Any, found: Figures, tmp_path: Path, size: str, scheme: str
) -> None:
    with shown(browser, found, tmp_path, size, scheme) as page:
        text = page.inner_text("body")
        for words in (
            *(value.replace("->", "→") for value, _ in found.cards),
            "spent 33% in attention",
            "step 2: something <b>to act on</b>",
            "Attention seconds by rank",
            "The plan of a step",
            "cost_model",
            "2.13.0",
        ):
            assert words in text, words
        cells = page.locator("#by-rank td").all_inner_texts()
        assert cells[:2] == ["0", "32768"]
        assert page.inner_text("#ranks .legend").split() == ["before", "after"]


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_marks_are_as_large_as_their_figures(
    browser: Any, found: Figures, tmp_path: Path, size: str, scheme: str
) -> None:
    """Every figure has its mark, and bars are in proportion, by the pixels that they take."""
    assert found.plan is not None
    with shown(browser, found, tmp_path, size, scheme) as page:
        widths = "all => all.map(e => e.getBoundingClientRect().width)"
        bars = np.array(page.eval_on_selector_all("#ranks .rank rect", widths))
        figures = np.array(
            [found.per_rank.measured_before, found.per_rank.measured_after]
        ).T.ravel()
        np.testing.assert_allclose(bars / bars.max(), figures / figures.max(), atol=0.01)
        # Both sides have one scale: the longest row becomes shorter.
        whole = page.eval_on_selector("#plan .rank svg", "e => e.getBoundingClientRect().width")
        longest = max(found.plan.per_rank.estimated_before)
        for number, pieces in enumerate((found.plan.before, found.plan.after), 1):
            rows = page.locator("#plan figure").nth(number - 1)
            bars = np.array(rows.locator("rect:not([fill^=url])").evaluate_all(widths))
            seconds = np.array([piece.seconds for piece in pieces])
            np.testing.assert_allclose(bars, seconds / longest * whole, atol=1.5)


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
@pytest.mark.parametrize("ranks", [4, 512])
def test_nothing_lies_beside_the_page(
    browser: Any, found: Figures, tmp_path: Path, size: str, scheme: str, ranks: int
) -> None:
    """No horizontal scrolling, and no text of a chart outside it or over another one's."""
    if ranks != 4:
        found = collect(RunFolder.read(write_record(tmp_path / "run", some_rows(ranks, steps=2))))
    with shown(browser, found, tmp_path, size, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
        hidden = page.evaluate(
            "(e => e.scrollWidth - e.clientWidth)(document.querySelector('.by-rank'))"
        )
        assert hidden <= 0, "the table of ranks is cut off"
        outside = page.evaluate("""() => [...document.querySelectorAll("figure")].flatMap(plot => {
                const frame = plot.getBoundingClientRect();
                const isOutside = box => box.left < frame.left - 1 || box.right > frame.right + 1;
                return [...plot.querySelectorAll("text")]
                    .map(e => [e.textContent, e.getBoundingClientRect()])
                    .filter(([, box]) => box.width && isOutside(box))
                    .map(([text]) => text)
            })""")
        assert outside == []
        overlapping = page.evaluate("""() => {
                const figures = [...document.querySelectorAll("figure")];
                const boxes = figures.map(e => e.getBoundingClientRect());
                const crosses = (a, b) => a.left < b.right - 1 && b.left < a.right - 1;
                const isOver = (a, b) => a.top < b.bottom - 1 && b.top < a.bottom - 1;
                return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
                    crosses(a, b) && isOver(a, b))).length
            }""")
        assert overlapping == 0


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    numbers = [float(number) / 255 for number in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [
        number / 12.92 if number <= 0.04045 else ((number + 0.055) / 1.055) ** 2.4
        for number in numbers
    ]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrast(browser: Any, found: Figures, tmp_path: Path, scheme: str) -> None:
    """Text 4.5 to 1, marks 3 to 1, by the computed colours (WCAG 2.2, 1.4.3 and 1.4.11)."""
    texts = "h1, h2, p, b, span, li, th, td, caption, figcaption, summary"
    with shown(browser, found, tmp_path, "desktop", scheme) as page:
        seen = page.evaluate(CONTRAST, texts)
        assert len(seen) > 100
        low = [
            (text, colour, behind)
            for colour, behind, text in seen
            if contrast(colour, behind) < 4.5
        ]
        assert low == []
        assert (luminance(seen[0][1]) < 0.05) == (scheme == "dark")
        bars = [row for row in page.evaluate(CONTRAST, ".rank rect") if row[0].startswith("rgb")]
        assert len(bars) > 20
        assert [row for row in bars if contrast(row[0], row[1]) < 3] == []
        labels = {row[0] for row in page.evaluate(CONTRAST, "#plan .rank text")}
        pieces = {
            row[0]
            for row in page.evaluate(CONTRAST, "#plan .rank rect")
            if row[0].startswith("rgb")
        }
        assert labels
        assert min(contrast(label, piece) for label in labels for piece in pieces) >= 4.5
