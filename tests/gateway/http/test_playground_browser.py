"""The playground as a person sees and uses it, in headless Chromium."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
CALM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
SHOT = os.environ.get("NINFER_SCREENSHOT")
"""A file that gets a picture of the page with a real answer."""


@pytest.fixture(scope="module")
def browser():
    """Chromium from the system's packages: ``make test-browser`` installs it where it can."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CALM)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A fresh page; a test fails when its script broke, or it asked for anything elsewhere."""
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    page.set_default_timeout(15_000)
    wrong = []
    page.on("console", lambda line: wrong.append(line.text) if "Content Security" in line.text else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(server.url) else wrong.append(request.url))
    page.goto(server.url)
    page.get_by_text("ninfer-tiny").first.wait_for()
    yield page
    page.close()
    assert wrong == []


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator("#log[aria-busy=false]").wait_for()
    return page.locator("#log > li.assistant").last


def test_an_answer_is_streamed_with_its_thinking_folded(page):
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Thinking", exact=True).select_option("high")
    answer = ask(page, "What is 17 + 25?")
    assert "17 + 25 = 42" in answer.inner_text()
    thinking = answer.locator("details")
    assert not thinking.locator(".text").is_visible()
    thinking.locator("summary").click()
    assert "carry 1" in thinking.inner_text()
    statistics = answer.locator(".statistics").inner_text()
    assert "tok/s" in statistics
    assert "thinking" in statistics
    assert "from the cache" in page.locator("#totals").inner_text()
    assert page.locator("#log > li").count() == 2


def test_a_schema_is_judged_while_it_is_typed_and_holds_the_answer(page):
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Output form", exact=True).select_option("json_schema")
    editor, state = page.get_by_label("Definition of the output form"), page.locator("#form-state")
    editor.fill('{"type": "objekt"}')
    page.locator("#form-state.invalid").wait_for()
    assert "/type" in state.inner_text()
    assert editor.get_attribute("aria-invalid") == "true"
    properties = (
        '"name": {"type": "string"},\n    "age": {"type": "integer", "minimum": 0},\n    "city": {"type": "string"}'
    )
    editor.fill(
        f'{{\n  "type": "object",\n  "properties": {{\n    {properties}\n  }},\n'
        '  "required": ["name", "age", "city"],\n  "additionalProperties": false\n}'
    )
    page.locator("#form-state.valid").wait_for()
    answer = ask(page, "Extract the record as JSON: Name: Mia Novak, Age: 34, City: Oslo.")
    answer.get_by_text("✓ in the output form").wait_for()
    assert '"age":34' in answer.inner_text().replace(" ", "")
    if SHOT:
        page.get_by_label("Thinking", exact=True).select_option("high")
        page.get_by_label("Output form", exact=True).select_option("")
        answer = ask(page, "What is 17 + 25?")
        answer.locator("summary").click()
        page.get_by_label("Output form", exact=True).select_option("json_schema")
        page.locator("#form-state.valid").wait_for()
        page.screenshot(path=Path(SHOT))


def test_a_call_is_shown_and_answered_by_hand(page):
    page.get_by_label("Temperature").fill("0")
    tools = page.get_by_label("Tools", exact=True)
    tools.fill('[{"type": "function"}]')
    assert "function.name" in page.locator("#tools-state").inner_text()
    tools.fill(
        '[{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather of a city",'
        ' "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
    )
    assert page.locator("#tools-state.valid").is_visible()
    page.get_by_label("Thinking", exact=True).select_option("none")
    call = ask(page, "What is the weather in Paris?")
    assert "get_weather" in call.inner_text()
    assert '"city": "Paris"' in call.inner_text()
    page.get_by_label("Result of get_weather").fill('{"temperature": 21, "condition": "sunny"}')
    page.get_by_role("button", name="Send results").click()
    page.locator("#log > li").nth(3).wait_for()
    page.locator("#log[aria-busy=false]").wait_for()
    assert "21" in page.locator("#log > li.assistant").last.inner_text()


def test_an_answer_is_stopped_retried_and_forgotten(page, server):
    page.get_by_label("Output form", exact=True).select_option("regex")
    page.get_by_label("Definition of the output form").fill("([ab] ){1500}")
    page.get_by_label("Message", exact=True).fill("Go on")
    page.keyboard.press("Enter")
    page.locator("#log > li.assistant .text", has_text="a").or_(
        page.locator("#log > li.assistant .text", has_text="b")
    ).first.wait_for()
    page.keyboard.press("Escape")
    page.locator("#log[aria-busy=false]").wait_for()
    assert server.idle()
    page.get_by_label("Output form", exact=True).select_option("choice")
    page.get_by_label("Definition of the output form").fill("left\nright")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("✓ in the output form").wait_for()
    assert page.locator("#log > li").count() == 2
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#log > li").count() == 0


def test_a_refusal_is_told_and_the_question_kept(page):
    page.get_by_label("Output form", exact=True).select_option("regex")
    page.get_by_label("Definition of the output form").fill("(a")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("offset 0").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "Hello"
    assert page.locator("#log > li").count() == 0


def test_a_server_with_a_key(browser, serve):
    server = serve(api_keys=["secret"])
    page = browser.new_page()
    page.goto(server.url)
    page.get_by_role("alert").get_by_text("API key").wait_for()
    page.get_by_label("API key").fill("secret")
    page.get_by_label("Message", exact=True).click()
    page.get_by_text("ninfer-tiny").first.wait_for()
    assert ask(page, "Hello").inner_text()
    page.close()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1100), ("light", 420)])
def test_it_can_be_read_in_the_dark_and_on_a_telephone(browser, server, scheme, width):
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 760})
    page.goto(server.url)
    page.get_by_text("ninfer-tiny").first.wait_for()
    colours = page.evaluate("(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))")
    text, back = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
    assert abs(text - back) > 450
    assert (back < text) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
