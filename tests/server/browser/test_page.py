"""The page itself: its plots, with the keyboard alone, on a phone, and in any light."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

HERE = Path(__file__).parent
# The fake engine answers a conversation with its first message.
LONG = "a long message, which takes many steps to say again; " * 6
CHAT = "**/v1/chat/completions"
WIDTH_PX = 360


def test_the_plots_move(page, server, send, finished, wait_idle, plot):
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


def test_a_plot_tells_what_was(page, send, finished, plot):
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


def test_with_the_keyboard_alone(page, server, answer, finished, wait_idle):
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


def test_on_a_phone(open_page, server, send, finished, plot):
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
def test_everything_can_be_read(open_page, server, scheme, send, finished):
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
