"""A browser with the page of a fake engine's server; its tests are skipped without chromium."""

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright


@pytest.fixture(scope="session")
def chromium():
    """Its path."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on the PATH")
    return path


@pytest.fixture(scope="session")
def server(chromium, start_fake):
    return start_fake("--step-time", "0.01", "--max-model-len", "2048").ready()


@pytest.fixture(scope="module")
def browser(chromium):
    # Not for the session: while it is there, its event loop runs in this thread.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
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


# What follows are functions, of a page or a server.


@pytest.fixture(scope="session")
def send():
    """Writes a message and presses Enter."""

    def write(page, text):
        page.get_by_label("Message").fill(text)
        page.get_by_label("Message").press("Enter")

    return write


@pytest.fixture(scope="session")
def answer():
    """The last answer on a page."""
    return lambda page: page.locator(".answer").last


@pytest.fixture(scope="session")
def finished():
    """Waits until an answer is complete."""
    return lambda page: expect(page.get_by_role("button", name="Retry")).to_be_visible()


@pytest.fixture(scope="session")
def plot():
    """A plot on a page, by its title."""
    return lambda page, title: page.get_by_role("slider", name=title)


@pytest.fixture(scope="session")
def wait_idle(wait_until):
    """Waits until a server has nothing to do."""

    def is_idle(server):
        return not server.http.get("/load").json()["server_load"] and not any(
            map(server.metric, ("num_requests_running", "kv_cache_usage_perc"))
        )

    return lambda server: wait_until(lambda: is_idle(server), 5)
