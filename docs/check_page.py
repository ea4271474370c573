"""Opens attention.html in a real browser, and uses it.

python docs/check_page.py [folder for screenshots]

Needs chromium and chromedriver (apt install chromium chromium-driver). Speaks WebDriver, so that
nothing else has to be installed.
"""

import base64
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PAGE = Path(__file__).with_name("attention.html")
PORT = 9527
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"


def call(path, body=None, method=None):
    """One WebDriver command."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/session{path}",
        None if body is None else json.dumps(body).encode(),
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


class Browser:
    """A browser with the page open."""

    def __init__(self, profile):
        options = dict(args=[*FLAGS.split(), f"--user-data-dir={profile}"])
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": dict(browser="ALL")}
        body = dict(capabilities=dict(alwaysMatch=wanted))
        self.path = "/" + call("", body)["sessionId"]
        self.post("/url", url=PAGE.as_uri())

    def post(self, path, **body):
        return call(self.path + path, body)

    def run(self, script):
        return self.post("/execute/sync", script=script, args=[])

    def devtools(self, command, **params):
        return self.post("/goog/cdp/execute", cmd=command, params=params)

    def key(self, name):
        """Presses and releases a key, as a reader would."""
        keys = [dict(type=kind, value=name) for kind in ("keyDown", "keyUp")]
        self.post("/actions", actions=[dict(type="key", id="keys", actions=keys)])

    def hover(self, selector):
        """Moves the mouse over the first such element."""
        found = self.post("/element", using="css selector", value=selector)
        move = dict(type="pointerMove", duration=0, x=0, y=0, origin=found)
        self.post("/actions", actions=[dict(type="pointer", id="mouse", actions=[move])])

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(call(self.path + "/screenshot")))


def opacities(browser, figure):
    """Of a figure's cells."""
    found = f"[...document.querySelectorAll('#{figure} rect')]"
    return browser.run(f"return {found}.map(cell => cell.getAttribute('fill-opacity'))")


def lit(browser):
    """How many cells are lit, figure by figure."""
    count = "f => f.querySelectorAll('rect.lit').length"
    return browser.run(f"return [...document.querySelectorAll('#models figure')].map({count})")


def check(browser):
    """What a reader does: slider, mouse, keyboard, another sentence, play."""
    text = "return document.getElementById('{}').textContent"
    last = opacities(browser, "bahdanau")
    clock = browser.run(text.format("clock"))
    browser.run("document.getElementById('step').focus()")
    for _ in range(20):
        browser.key("\ue012")  # the left arrow: to the beginning of training
    assert browser.run(text.format("clock")) == "after 0 steps" != clock
    assert opacities(browser, "bahdanau") != last
    assert max(map(float, opacities(browser, "bahdanau"))) < 0.5 < max(map(float, last))

    browser.hover("#luong .word:nth-of-type(5)")
    assert len(set(lit(browser))) == 1 and lit(browser)[0] > 3, lit(browser)
    notes = browser.run(
        "return [...document.querySelectorAll('#models .note')].map(n => n.textContent)"
    )
    assert all(": " in note and "0." in note for note in notes), notes
    browser.hover("h1")
    assert lit(browser) == [0, 0, 0, 0]
    browser.run("document.querySelector('#models .word').focus()")
    assert len(set(lit(browser))) == 1 and lit(browser)[0] > 3

    sentence = "document.getElementById('sentence')"
    change = f"{sentence}.dispatchEvent(new Event('change'))"
    browser.run(f"{sentence}.value = 3; {change}")
    assert len(opacities(browser, "bahdanau")) == 7 * 8
    browser.run(f"{sentence}.value = 0; {change}")
    browser.run("document.getElementById('play').click()")
    time.sleep(2.2)
    assert browser.run(text.format("clock")) not in ("after 0 steps", clock)
    browser.run("document.getElementById('play').click()")
    browser.run("document.querySelectorAll('#queries button')[1].click()")
    assert browser.run("return document.querySelectorAll('#heads rect.lit').length") == 16 * 14
    errors = [line for line in browser.post("/se/log", type="browser") if line["level"] != "INFO"]
    assert not errors, errors


def take_screenshots(browser, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, height, scheme in (
        ("light", 1200, 2800, "light"),
        ("dark", 1200, 2800, "dark"),
        ("phone", 400, 6200, "light"),
    ):
        browser.post("/refresh")
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        browser.devtools("Emulation.setDeviceMetricsOverride", **size)
        feature = dict(name="prefers-color-scheme", value=scheme)
        browser.devtools("Emulation.setEmulatedMedia", features=[feature])
        wide = "return document.documentElement.scrollWidth"
        assert browser.run(wide) <= width, "wider than the window"
        browser.run("scrollTo(0, 0)")
        browser.screenshot(folder / f"{name}.png")


def main():
    assert PAGE.stat().st_size <= 1_000_000
    driver = subprocess.Popen(["chromedriver", f"--port={PORT}"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(profile)
            try:
                check(browser)
                if sys.argv[1:]:
                    take_screenshots(browser, Path(sys.argv[1]))
            finally:
                call(browser.path, method="DELETE")
    finally:
        driver.terminate()
    print("the page works")


if __name__ == "__main__":
    main()
