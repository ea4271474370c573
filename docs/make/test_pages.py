"""Tests of attention.html, papers.html and index.html in a real browser.

pip install -r docs/make/requirements.txt && python -m pytest -q docs/make/test_pages.py

Without selenium, or without a browser and its driver (apt install chromium chromium-driver), they
are skipped.
"""

import itertools
import shutil
import time
from pathlib import Path

import pytest

NEEDS_SELENIUM = "needs selenium; run: pip install -r docs/make/requirements.txt"
NEEDS_BROWSER = "needs a browser and its driver; run: apt install chromium chromium-driver"
webdriver = pytest.importorskip("selenium.webdriver", reason=NEEDS_SELENIUM)

DOCS = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update"""
WIDTHS = (390, 420, 641, 1000, 1280, 1920)


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip(NEEDS_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", dict(browser="ALL"))
    for flag in FLAGS.split():
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser
        assert not [line for line in browser.get_log("browser") if line["level"] != "INFO"]


def open_page(browser, name, width=1400, height=900, scheme="light", media=""):
    """Opens a page of docs/ in a window of this size; it must not be wider than the window."""
    size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [dict(name="prefers-color-scheme", value=scheme)]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=features, media=media))
    browser.get("about:blank")  # so that a change of the hash alone loads the page
    browser.get(f"{DOCS.as_uri()}/{name}")
    assert each(browser, "html", "e.scrollWidth")[0] <= width, f"{name}: wider than {width} pixels"


def each(browser, selector, expression="e.textContent"):
    """The values of a JavaScript expression of e, for each element e."""
    script = f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})"
    return browser.execute_script(script, selector)


def count_visible(browser, selector):
    return sum(each(browser, selector, "e.getClientRects().length > 0"))


def find(browser, selector):
    return browser.find_element("css selector", selector)


def hover(browser, selector):
    webdriver.ActionChains(browser, 0).move_to_element(find(browser, selector)).perform()


def test_first_screen(browser):
    """attention.html: the first heatmap is visible without scrolling."""
    for width, height in ((420, 800), (1280, 720)):
        open_page(browser, "attention.html", width, height)
        bottom, *_ = each(browser, "#models svg", "e.getBoundingClientRect().bottom")
        assert bottom <= height, f"{width} x {height}: the first heatmap ends at {bottom}"


def test_training(browser):
    """Four models: the slider, the mouse, the keyboard, another sentence, play."""
    open_page(browser, "attention.html")
    assert (DOCS / "attention.html").stat().st_size <= 1_000_000

    def weights():
        return each(browser, "#bahdanau rect", "+e.getAttribute('fill-opacity')")

    def lit():  # how many cells are lit in each figure
        return each(browser, "#models figure", "e.querySelectorAll('rect.lit').length")

    clock = find(browser, "#clock")
    trained = clock.text
    assert max(weights()) > 0.5
    find(browser, "#step").send_keys(webdriver.Keys.HOME)
    assert clock.text == "after 0 steps (untrained)"
    assert max(weights()) < 0.5
    assert len(each(browser, "#bahdanau .wrong")) > 3

    hover(browser, "#luong .word:nth-of-type(5)")
    assert len(set(lit())) == 1 and lit()[0] > 3
    assert all(": " in note and "0." in note for note in each(browser, "#models .note"))
    hover(browser, "h1")
    assert lit() == [0, 0, 0, 0]
    each(browser, "#models figure:first-child .word:nth-of-type(1)", "e.focus()")
    assert len(set(lit())) == 1 and lit()[0] > 3

    find(browser, "#sentence option:nth-child(4)").click()
    assert len(weights()) == 7 * 8
    find(browser, "#play").click()
    time.sleep(2.2)
    assert clock.text not in ("after 0 steps (untrained)", trained)


def test_pronoun(browser):
    """The section about "it": the last word, the nouns, all heads, another word."""
    open_page(browser, "attention.html", height=2000)
    words = "#deciding figure:first-child .strip button"
    weight = "[e.firstChild.textContent, +e.style.getPropertyValue('--weight')]"
    expected = [  # (noun, its pronoun) if the last word is "tired", and if it is "dangerous"
        [("animal", "il"), ("street", "elle")],
        [("cow", "elle"), ("park", "il")],
        [("dog", "il"), ("forest", "elle")],
    ]
    for k, pair in enumerate(expected, 1):
        find(browser, f"#nouns option:nth-child({k})").click()
        for (noun, pronoun), (other, _), ending in zip(pair, pair[::-1], ("first", "last")):
            find(browser, f"#endings button:{ending}-child").click()
            found = dict(each(browser, words, weight))
            assert found[noun] > 0.5 > found[other]
            assert f" {pronoun} était trop" in find(browser, "#twin-said [lang]").text
    assert not count_visible(browser, "#heads")
    find(browser, "#all-heads").click()
    assert count_visible(browser, "#heads")
    assert len(each(browser, "#heads rect.lit")) == 8 * 14
    assert set(each(browser, "#heads text.lit")) == {"it"}
    find(browser, f"{words}:nth-child(2)").click()
    assert set(each(browser, "#heads text.lit")) == {"dog"}


def test_captions(browser):
    """The section about images: the slider, another image, and where the models look."""
    open_page(browser, "attention.html")
    find(browser, "#step-captions").send_keys(webdriver.Keys.HOME)
    assert len(each(browser, "#captioners .wrong")) > 10
    find(browser, "#step-captions").send_keys(webdriver.Keys.END)
    captions = set()
    for k in (1, 2, 3):
        find(browser, f"#scene option:nth-child({k})").click()
        reference = find(browser, "#reference-caption").text
        captions.add(reference)
        for attention in ("soft", "hard"):
            looks = f"#captions-{attention} .looks > span:not(:first-child)"
            assert " ".join(each(browser, looks)) == reference
            bright = each(browser, looks, "e.querySelectorAll('rect:not(.shade)').length")
            assert min(bright) >= 1
        assert set(bright) == {1}  # hard attention: one location per word
        objects = (len(reference.split()) + 1) // 5
        outlines = each(browser, "#captions-hard path")
        assert len(outlines) == 4 * objects  # in the image; at size, color and shape
    assert len(captions) == 3


def test_papers(browser):
    """papers.html: the mouse, the keyboard, two papers side by side."""
    open_page(browser, "papers.html#bahdanau")
    assert (DOCS / "papers.html").stat().st_size <= 1_000_000
    assert count_visible(browser, "article > header") == 1
    assert not browser.execute_script("return performance.getEntriesByType('resource')")
    linked = " ".join(each(browser, ".eq", "e.dataset.lines")).split()
    assert len(linked) > 80 and {*linked} <= {*each(browser, ".code [id]", "e.id")}

    line = each(browser, "#bahdanau .eq", "e.dataset.lines")[3]
    equation = f".eq[data-lines='{line}']"
    lit = ".lit", "e.id || e.dataset.lines"
    each(browser, equation, "e.scrollIntoView({ block: 'center' })")
    for selector in (f"{equation} .label", f"#{line}"):  # an equation lights its line, vice versa
        hover(browser, selector)
        assert each(browser, *lit) == [line, line]
        hover(browser, "nav")
        assert each(browser, *lit) == []
    for selector in (f"{equation} a", f"#{line}"):
        each(browser, selector, "e.focus()")
        assert each(browser, *lit) == [line, line]

    find(browser, "#beside option[value=luong]").click()
    assert browser.current_url.endswith("#bahdanau+luong")
    assert count_visible(browser, "article > header") == 2
    assert len(set(each(browser, ".shown [data-topic=Attention]", "e.offsetTop"))) == 1
    browser.execute_script("location.hash = '#flags'")
    assert count_visible(browser, "#flags") == 1


def test_media(browser):
    """papers.html in dark mode, in print and without JavaScript."""
    open_page(browser, "papers.html", scheme="dark")
    assert each(browser, "body", "getComputedStyle(e).backgroundColor") == ["rgb(13, 17, 23)"]
    open_page(browser, "papers.html#luong", 794, media="print")
    assert count_visible(browser, "#luong .code [id]")
    assert not count_visible(browser, "nav, details")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", dict(value=True))
    browser.get(f"{DOCS.as_uri()}/papers.html")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", dict(value=False))
    assert count_visible(browser, "article") == len(each(browser, "article"))
    assert not count_visible(browser, "#beside")


@pytest.mark.parametrize("width", WIDTHS)
def test_equations_fit(browser, width):
    """papers.html cuts no equation and is not too wide, in any tab and for any two papers."""
    open_page(browser, "papers.html", width)
    names = each(browser, "article", "e.id")
    pairs = ["+".join(pair) for pair in itertools.combinations(names[:-1], 2)]
    excess = """(() => {
      const box = e.closest('.formula, p, td, h3'), width = document.documentElement.clientWidth;
      const edge = Math.min(box.getBoundingClientRect().right, width); // a table may be too wide
      return Math.max(box.scrollWidth - box.clientWidth, e.getBoundingClientRect().right - edge);
    })()"""
    for name in names + pairs:
        show = f"location.hash = '#{name}'; dispatchEvent(new Event('hashchange'))"
        browser.execute_script(show)
        math = each(browser, "article.shown math", f"[{excess}, e.getAttribute('alttext')]")
        cut = [latex for pixels, latex in math if pixels >= 1]
        assert not cut, f"papers.html#{name} cuts equations"
        assert each(browser, "html", "e.scrollWidth")[0] <= width, name


def test_index(browser):
    """index.html: one screen, and every link leads to a file."""
    for width, height in ((1200, 800), (390, 844)):
        open_page(browser, "index.html", width, height, "dark")
        assert each(browser, "html", "e.scrollHeight")[0] <= height
    assert min(each(browser, "img", "e.naturalWidth")) > 0
    links = each(browser, "a", "e.getAttribute('href')")
    assert len(links) > 8
    assert [link for link in links if not (DOCS / link).exists()] == []
