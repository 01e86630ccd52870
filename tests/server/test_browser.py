"""The page in a browser: with the mouse, with the keyboard alone, and on a phone."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
HERE = Path(__file__).parent
KEY = "sk-browser"
# The fake engine answers a conversation with its first message.
LONG = "a long message, which takes many steps to say again; " * 6
CHAT = "**/v1/chat/completions"
WIDTH_PX = 360


@pytest.fixture(scope="module")
def server(start_fake):
    return start_fake("--step-time", "0.01", "--max-model-len", "2048").ready()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a server's page, as a device would; no page may have raised or broken its policy."""
    contexts, faults = [], []

    def note(message):
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    def open_one(server, **device):
        contexts.append(browser.new_context(**device))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", note)
        page.goto(server.url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def page(open_page, server):
    page = open_page(server)
    expect(page.get_by_role("status").first).to_have_text("Ready")
    return page


def send(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer(page):
    return page.locator(".answer").last


def finished(page):
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def wait_idle(server):
    def is_busy():
        return server.http.get("/load").json()["server_load"] or any(
            map(server.metric, ("num_requests_running", "kv_cache_usage_perc"))
        )

    deadline = time.monotonic() + 5
    while is_busy():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_chat_streams(page):
    text = "<b>bold</b> & <img src=x onerror=this.title> " + LONG.strip()
    send(page, text)
    expect(page.locator(".busy .answer")).to_contain_text("bold")
    finished(page)
    # As text, not as markup.
    expect(answer(page)).to_have_text(text)
    assert page.locator(".turns b, .turns img").count() == 0
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"^[\d.,]+ tokens/s · first token \d+\.\d\d s · \d+ tokens$")
    )
    expect(page.locator(".context")).to_have_text(re.compile(r"^\d+ of 2,048 tokens of context$"))
    expect(page.locator("#spoken")).to_contain_text("bold")
    message = page.get_by_label("Message")
    expect(message).to_have_value("")
    expect(message).to_be_focused()


def test_what_a_request_says(page):
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Top k").fill("40")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Seed").fill("11")
    with page.expect_request(CHAT) as asked:
        send(page, "hello")
    assert json.loads(asked.value.post_data) == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ],
        "temperature": 0.25,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 7,
        "seed": 11,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    expect(page.locator(".figures")).to_contain_text("7 tokens · token limit reached")
    said = answer(page).text_content()
    page.get_by_label("Max tokens").fill("")
    page.get_by_label("System prompt").fill("")
    with page.expect_request(CHAT) as asked:
        send(page, "and now?")
    body = json.loads(asked.value.post_data)
    assert "max_tokens" not in body
    assert body["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and now?"},
    ]
    finished(page)

    page.get_by_label("Top k").fill("0")
    send(page, "no")
    assert page.locator(".turns > li").count() == 2
    assert page.get_by_label("Top k").evaluate("input => document.activeElement === input")


def test_reasoning_and_calls(open_page, start_fake):
    server = start_fake(
        "--step-time", "0.01", "--reasoning-parser", "deepseek_r1",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ).ready()  # fmt: skip
    page = open_page(server)
    expect(page.get_by_role("status").first).to_have_text("Ready")
    reasoning, calls = page.locator(".reasoning").last, page.locator(".calls > li")
    send(page, "let me <b>think</b></think>hello")
    finished(page)
    expect(answer(page)).to_have_text("hello")
    expect(reasoning.locator("div")).to_be_hidden()
    reasoning.get_by_text("Reasoning").click()
    expect(reasoning.locator("div")).to_have_text("let me <b>think</b>")
    expect(calls).to_have_count(0)

    tools = page.get_by_label("Tools (JSON)")
    tools.fill("{")
    send(page, "no")
    expect(tools).to_be_focused()
    assert page.locator(".turns > li").count() == 1
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tools.fill(json.dumps([tool]))
    page.get_by_role("button", name="Clear").click()
    call = '<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>'
    with page.expect_request(CHAT) as asked:
        send(page, "</think>" + call % "a" + call % "<i>b</i>")
    assert json.loads(asked.value.post_data)["tools"] == [tool]
    finished(page)
    page.reload()
    expect(calls).to_have_text(['look({"at": "a"})', 'look({"at": "<i>b</i>"})'])
    expect(answer(page)).to_have_text("")
    expect(reasoning).to_be_hidden()


def test_a_conversation_outlives_a_reload_and_is_cleared(page):
    send(page, "hello")
    finished(page)
    page.get_by_label("Seed").fill("3")
    page.reload()
    expect(answer(page)).to_have_text("hello")
    expect(page.get_by_label("Seed")).to_have_value("3")
    with page.expect_request(CHAT) as asked:
        page.get_by_role("button", name="Retry").click()
    assert [m["content"] for m in json.loads(asked.value.post_data)["messages"]] == ["hello"]
    finished(page)
    assert page.locator(".turns > li").count() == 1
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".turns > li")).to_have_count(0)
    page.reload()
    expect(page.get_by_text("Ask the model something")).to_be_visible()
    expect(page.locator(".turns > li")).to_have_count(0)


def test_stop_frees_the_request(page, server):
    send(page, LONG)
    expect(answer(page)).to_contain_text("a long message")
    assert server.http.get("/load").json()["server_load"] == 1
    page.get_by_role("button", name="Stop").click()
    wait_idle(server)
    expect(page.locator(".figures")).to_contain_text("stopped")
    said = answer(page).text_content()
    assert said
    assert said != LONG
    assert LONG.startswith(said)
    send(page, "again")
    finished(page)

    send(page, LONG)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    wait_idle(server)
    expect(page.locator(".turns > li")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def plot(page, title):
    return page.get_by_role("slider", name=title)


def test_the_plots_move(page, server):
    titles = ("Requests", "Tokens per second", "Step time", "KV blocks", "Prefix hits")
    lines = [plot(page, title).locator("path.line.series-0") for title in titles]
    before = [line.get_attribute("d") for line in lines]
    send(page, LONG)
    for title, told in (
        ("Requests", r"^now: running 1, waiting 0$"),
        ("Tokens per second", r"^now: generated [1-9][\d.]*$"),
        ("Step time", r"^now: decode \d[\d.]* ms, prefill "),
        ("KV blocks", r"^now: in use [1-9]\d*$"),
    ):
        expect(plot(page, title)).to_have_attribute("aria-valuetext", re.compile(told))
    finished(page)
    send(page, "again")
    finished(page)
    wait_idle(server)
    expect(page.get_by_text(re.compile(r"^[1-9][\d.]*% of prompts$"))).to_be_visible()
    for old, line in zip(before, lines, strict=True):
        heights = {
            point.split()[1] for point in re.findall(r"[\d.]+ [\d.]+", line.get_attribute("d"))
        }
        assert line.get_attribute("d") != old
        assert len(heights) > 1 or line is lines[2]
    expect(plot(page, "Requests")).to_have_attribute("aria-valuetext", "now: running 0, waiting 0")


def test_a_plot_tells_what_was(page):
    send(page, LONG)
    finished(page)
    requests = plot(page, "Requests")
    expect(requests).to_have_attribute("aria-valuetext", "now: running 0, waiting 0")
    requests.press("ArrowLeft")
    expect(requests).to_have_attribute("aria-valuetext", re.compile(r"^\d s ago: running"))
    for _ in range(20):
        if "running 1" in requests.get_attribute("aria-valuetext"):
            break
        requests.press("ArrowLeft")
    assert "running 1" in requests.get_attribute("aria-valuetext")
    requests.press("End")
    expect(requests).to_have_attribute("aria-valuetext", re.compile("^(now|1 s ago): running 0"))
    box = requests.bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 5)
    expect(requests).to_have_attribute("aria-valuetext", re.compile(r"^\d+ s ago: running 0"))


def test_with_the_keyboard_alone(page, server):
    keyboard = page.keyboard
    expect(page.get_by_label("Message")).to_be_focused()
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    keyboard.press("Enter")
    finished(page)
    expect(answer(page)).to_have_text("one\ntwo")
    keyboard.type(LONG)
    keyboard.press("Enter")
    expect(page.locator(".turns > li")).to_have_count(2)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    keyboard.press("Escape")
    wait_idle(server)
    expect(page.locator(".figures").last).to_contain_text("stopped")

    # Round the page: everything that can be pressed is reached, and shows that it is.
    page.get_by_label("Model").focus()
    look = (HERE / "in_focus.js").read_text()
    for _ in range(100):
        seen = page.evaluate(look)
        assert seen["is_marked"], seen
        if seen["num_seen"] == seen["num_all"]:
            break
        keyboard.press("Tab")
    assert seen["num_seen"] == seen["num_all"]
    page.get_by_label("Temperature").focus()
    keyboard.press("ArrowRight")
    expect(page.locator("output[for=temperature]")).to_have_text("0.75")
    page.get_by_role("button", name="Clear").focus()
    keyboard.press("Enter")
    expect(page.locator(".turns > li")).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()


def is_narrow(page):
    """Nothing can be scrolled sideways, neither the page nor a part of it."""
    return page.evaluate(
        """width => [...document.querySelectorAll("html, body, body *")].every((element) => {
            const scrolls = ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
            const { right } = element.getBoundingClientRect();
            return right <= width && !(scrolls && element.scrollWidth > element.clientWidth);
        })""",
        WIDTH_PX,
    )


def test_on_a_phone(open_page, server):
    viewport = {"width": WIDTH_PX, "height": 640}
    page = open_page(server, viewport=viewport, has_touch=True, is_mobile=True)
    send(page, "x" * 200)
    expect(page.get_by_role("button", name="Stop")).to_be_in_viewport(ratio=1)
    finished(page)
    assert is_narrow(page)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    expect(plot(page, "Requests")).to_be_hidden()
    page.get_by_text("Sampling").tap()
    expect(page.get_by_label("Temperature")).to_be_in_viewport()
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    assert is_narrow(page)
    page.get_by_role("button", name="Engine").tap()
    expect(plot(page, "Requests")).to_be_in_viewport(ratio=1)
    expect(page.get_by_label("Message")).to_be_hidden()
    plot(page, "Prefix hits").scroll_into_view_if_needed()
    expect(plot(page, "Prefix hits")).to_be_in_viewport(ratio=1)
    assert is_narrow(page)
    page.get_by_role("button", name="Chat").tap()
    expect(page.get_by_label("Message")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(open_page, server, scheme):
    page = open_page(server, color_scheme=scheme, viewport={"width": 1280, "height": 900})
    expect(page.get_by_role("status").first).to_have_text("Ready")
    send(page, "hello")
    finished(page)
    page.route(CHAT, lambda route: route.abort())
    send(page, "hello")
    expect(page.locator(".problem").last).to_have_text("The server cannot be reached.")
    ground = {"light": "rgb(245, 246, 248)", "dark": "rgb(18, 21, 26)"}[scheme]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    contrasts = page.evaluate((HERE / "contrasts.js").read_text())
    assert len(contrasts) > 50
    assert [entry for entry in contrasts if entry[1] < entry[2]] == []


def test_the_theme_can_be_chosen(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(ground) == light


def answer_with(page, status, body, headers=None):
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body, headers=headers))


def test_errors_in_plain_words(open_page, start_fake):
    server = start_fake("--step-time", "0.05", "--max-model-len", "64").ready()
    page = open_page(server)
    state, problem = page.get_by_role("status").first, page.locator(".problem").last
    expect(state).to_have_text("Ready")
    answer_with(page, 500, "<h1>no JSON</h1>")
    send(page, "hello")
    expect(problem).to_have_text("The server answered with status 500.")
    answer_with(page, 503, '{"error": {"message": "no <b>room</b>"}}', {"Retry-After": "5"})
    send(page, "hello")
    expect(problem).to_have_text("No <b>room</b>. Try again in 5 s.")
    answer_with(page, 200, 'data: {"error": {"message": "the engine is dead"}}\n\n')
    send(page, "hello")
    expect(problem).to_have_text("The engine is dead.")
    page.unroute(CHAT)
    send(page, LONG)
    expect(problem).to_have_text(
        re.compile(r"^The prompt has \d+ tokens, but the model takes .*\.$")
    )
    send(page, "x" * 50)
    expect(answer(page)).to_contain_text("xx")
    server.process.kill()
    lost = "The connection was lost before the answer was complete."
    expect(problem).to_have_text(lost)
    expect(page.locator("#spoken")).to_have_text(lost)
    expect(state).to_have_text("The server cannot be reached.")
    page.get_by_role("button", name="Retry").click()
    expect(problem).to_have_text("The server cannot be reached.")


def test_the_key_is_asked_for(open_page, start_fake):
    server = start_fake("--api-key", KEY).ready()
    page = open_page(server)
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("wrong")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not accept this key.")
    key.fill("ключ")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This is not a key.")
    key.fill(KEY)
    key.press("Enter")
    expect(page.get_by_role("status").first).to_have_text("Ready")
    send(page, "hello")
    finished(page)
    expect(answer(page)).to_have_text("hello")
    page.reload()
    expect(answer(page)).to_have_text("hello")
    assert page.evaluate("Object.values(localStorage)") == []
    page.get_by_role("button", name="Sign out").click()
    expect(key).to_be_visible()
    assert KEY not in page.evaluate("Object.values(sessionStorage)")
    page.reload()
    expect(key).to_be_visible()
