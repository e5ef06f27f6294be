"""The page in a real browser."""

import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH")

HEADINGS = [
    "The paper\N{RIGHT SINGLE QUOTATION MARK}s experiments, run with pairmix",
    "In short", "Compositional teacher", "AG News", "Shakespeare",
    "What the language models write", "Notes", "Choices", "Origin",
]  # fmt: skip
SIZES = {"desktop": 1280, "phone": 400}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture(params=SIZES)
def opened(request, browser, full_page, scheme):
    """The page as opened, and all that it complained about or asked for."""
    tab = browser.new_page(viewport={"width": SIZES[request.param], "height": 800}, color_scheme=scheme)
    complaints, requests = [], []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda failed: complaints.append(failed.url))
    tab.on("request", lambda sent: requests.append(sent.url))
    tab.goto(full_page.as_uri())
    tab.wait_for_load_state("networkidle")
    yield tab, complaints, requests
    tab.close()


def test_the_page_opens_as_it_should(opened, full_page):
    tab, complaints, requests = opened
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [full_page.as_uri()]

    widths = tab.eval_on_selector_all("img", "images => images.map(image => image.naturalWidth)")
    assert len(widths) > 10
    assert min(widths) > 0

    for heading in HEADINGS:
        assert tab.get_by_role("heading", name=heading, exact=True).is_visible()

    overflow = "({scrollWidth, clientWidth}) => scrollWidth - clientWidth"
    assert tab.eval_on_selector("html", overflow) == 0
    assert tab.eval_on_selector("body", overflow) == 0


@pytest.mark.parametrize("width", [1000, 1100, 1280, 1600])
def test_the_short_version_is_seen_without_scrolling(browser, full_page, width):
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.goto(full_page.as_uri())
    hidden = tab.eval_on_selector_all(".card .scroll", "boxes => boxes.map(box => box.scrollWidth - box.clientWidth)")
    assert hidden == [0, 0, 0, 0]
    tab.close()


def test_wide_tables_scroll_in_their_own_box(browser, full_page):
    tab = browser.new_page(viewport={"width": 400, "height": 800})
    tab.goto(full_page.as_uri())
    box = tab.locator(".scroll").filter(has_text="low rank").first
    first = box.locator("tbody th").first
    before = first.bounding_box()
    box.evaluate("box => box.scrollLeft = 200")
    assert box.evaluate("box => box.scrollLeft") == 200
    assert first.bounding_box()["x"] == before["x"], "the name of a line stays in sight"
    tab.close()


def test_links_and_samples_work_without_scripts(browser, full_page):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(full_page.as_uri())
    tab.get_by_role("link", name="Origin").click()
    assert tab.url.endswith("#origin")
    summary = tab.locator("#samples summary").last
    text = tab.locator("#samples pre").last
    assert not text.is_visible()
    summary.click()
    assert text.is_visible()
    context.close()


def test_nothing_is_cut_off_in_print(browser, full_page):
    tab = browser.new_page(viewport={"width": 1030, "height": 800})  # A4 across, less its margins, at 96 dots an inch
    tab.goto(full_page.as_uri())
    tab.emulate_media(media="print")
    is_cut_off = "one => one.getBoundingClientRect().right > innerWidth"
    cut = tab.eval_on_selector_all("table, img", f"all => all.filter({is_cut_off}).length")
    assert cut == 0
    assert tab.locator("#origin pre").is_visible()
    tab.close()
