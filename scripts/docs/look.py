"""Looks at the site in a browser, from file://, at 1280 and at 390 pixels; says what is broken.

    .venv-docs/bin/python scripts/docs/look.py [FOLDER]     FOLDER (build/docs): where scripts/docs/build has put it

The pages of public names, which have nothing to press, are seen as one long page at 390 pixels: their text has more
room in 1280. Exit status: 0 all is well, 1 something is broken, 3 not run, since there is no chromium here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from mpistrategy.cli.guide import pages

FOLDER = Path(sys.argv[1] if sys.argv[1:] else "build/docs").resolve()
SITE = FOLDER.as_uri()
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
#: What people search for, and the page that must be among the first five.
WORDS = {
    "all_reduce": "api/mpistrategy.ReplicaContext",
    "Arena": "api/mpistrategy.Arena",
    "checkpoint": "checkpoints",
    "CollectiveMismatchError": "errors",
    "cuda aware": "gpus",
    "doctor": "diagnose",
    "hang": "diagnose",
    "horovod": "horovod",
    "jax": "jax",
    "learning rate": "recipes",
    "MPISTRATEGY_TIMEOUT_SECONDS": "environment",
    "mpi4py": "horovod",
    "nodes": "many-nodes",
    "notebook": "testing",
    "preemption": "checkpoints",
    "rounding": "numerics",
    "sbatch": "slurm",
    "tf.distribute": "tensorflow",
    "torch": "torch",
    "trace": "tracing",
}
#: What is wider than the window, and does not scroll by itself.
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1 && each.checkVisibility())
    .filter(each => !each.closest("pre, code, svg, .md-typeset__scrollwrap, .md-sidebar, .md-search, .md-dialog"))
    .map(each => each.tagName + " " + each.textContent.trim().slice(0, 40))"""
#: The text of each block of commands, and what its button copies.
COPIES = """async () => {
    const found = []
    for (const block of document.querySelectorAll(".language-console")) {
        block.querySelector("button").click()
        found.push([block.querySelector("code").innerText, await navigator.clipboard.readText()])
    }
    return found
}"""

broken: list[str] = []


def check(page: Page, holds: object, what: str) -> None:
    """Note what does not hold on a page."""
    if not holds:
        broken.append(f"{page.url.removeprefix(SITE)}: {what}")


def opened(browser: Browser, size: dict[str, int], name: str = "index", *, scripts: bool = True) -> Page:
    """Open a page of the site; what goes wrong on it is noted."""
    page = browser.new_page(
        viewport=size,
        color_scheme="light",
        permissions=["clipboard-read", "clipboard-write"],
        java_script_enabled=scripts,
    )
    page.on("console", lambda said: check(page, said.type not in ("error", "warning"), f"console: {said.text}"))
    page.on("pageerror", lambda error: check(page, False, f"script: {error}"))
    # Aborted is the request of a small picture that has not come when the next page is opened.
    page.on("requestfailed", lambda lost: check(page, lost.failure == "net::ERR_ABORTED", f"not loaded: {lost.url}"))
    page.goto(f"{SITE}/{name}.html")
    return page


def look_at_every_page(browser: Browser) -> int:
    """Look at the pages of the guide, and at those of public names as one; return how many there are."""
    page, articles, paths = opened(browser, WIDE), "", sorted({*FOLDER.rglob("*.html")} - {FOLDER / "404.html"})
    page.route(
        "**/search_index.js",  # reading it takes most of the time
        lambda route: route.fulfill(
            body="var __index = {config: {lang: ['en'], separator: ' ', pipeline: [], fields: {}}, docs: []}"
        ),
    )
    for path in paths:
        text, neighbours = path.read_text(encoding="utf-8"), 1 + (path.stem not in ("index", "changes"))
        check(page, text.count("md-footer__link--") == neighbours, f"{path.name} has no `previous`, or no `next`")
        check(page, text.count("<h1") == 1, f"{path.name} has no title, or several")
        if path.parent != FOLDER:
            articles += text.partition("<article")[2].partition("</article>")[0]
            continue
        page.goto(path.as_uri())
        look_at_width(page, WIDE)
        look_at_width(page, NARROW)
        look_at_copies(page)
    names = opened(browser, NARROW, "api/mpistrategy.Strategy", scripts=False)
    names.evaluate("text => document.querySelector('article').innerHTML = text", articles)
    look_at_width(names, NARROW)
    return len(paths)


def look_at_width(page: Page, size: dict[str, int]) -> None:
    """Nothing on a page is wider than the window."""
    page.set_viewport_size(size)
    too_wide = page.evaluate(TOO_WIDE)
    check(page, not too_wide, f"wider than {size['width']} pixels: {too_wide[:3]}")


def look_at_navigation(browser: Browser) -> None:
    """All parts of the guide are there: beside the page, or on a small screen behind a button."""
    for size in (WIDE, NARROW):
        page = opened(browser, size, "tutorial")
        if size == NARROW:
            page.locator("label.md-header__button[for=__drawer]").click()
        shown = page.locator(".md-nav--primary").first.inner_text()
        missing = [part for part in pages.PARTS if part not in shown]
        check(page, not missing, f"not in the navigation at {size['width']} pixels: {missing}")


def look_at_modes(browser: Browser) -> None:
    """The button goes through the modes of the system, light and dark."""
    page = opened(browser, WIDE)
    seen = []
    for _ in range(3):
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator("form[data-md-component=palette] label:visible").click()
    check(page, seen[0] == seen[1] != seen[2], f"modes: {seen}")


def look_for_words(browser: Browser) -> None:
    """The search finds each word on the page that tells about it."""
    page = opened(browser, WIDE)  # once: it takes a second to read the index
    typed, found = page.locator("input.md-search__input"), page.locator(".md-search-result__meta")
    for word, wanted in WORDS.items():
        typed.fill(word[:-1])
        typed.press(word[-1])  # one key, since each makes the page search
        found.filter(has_text="matching").wait_for()
        links = page.locator(".md-search-result__item > a").evaluate_all("all => all.slice(0, 5).map(a => a.href)")
        names = [link.removeprefix(f"{SITE}/").partition(".html")[0] for link in links]
        check(page, wanted in names, f"search for {word!r}: {wanted} is not among {names}")
        typed.press("Control+a")
        typed.press("Delete")
        found.filter(has_text="Type to start").wait_for()


def look_at_copies(page: Page) -> None:
    """A button copies commands, without prompts and output."""
    for button in page.locator(".language-console button").all()[:1]:
        button.click(trial=True)  # it can be pressed
    for shown, copied in page.evaluate(COPIES):
        commands = [line[2:] for line in shown.splitlines() if line.startswith("$ ")]
        check(page, copied.splitlines() == commands != [], f"of {shown!r} copied {copied!r}")


def main() -> int:
    """Look at everything; return the exit status."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("not run: there is no chromium here")
        return 3
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for look in (look_at_navigation, look_at_modes, look_for_words):
            look(browser)
        print(f"looked at {look_at_every_page(browser)} pages")
    print(*broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
