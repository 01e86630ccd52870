"""Make docs/images/page-*.png: the server's page in the middle of a conversation with the demo
model, light and dark, on a desktop and on a phone.

    python tools/screenshots.py [--url http://127.0.0.1:8000]

Needs chromium on the PATH and the packages of the extra `test`. Without --url it starts a server,
and some clients that keep it busy while the plots fill up.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from playwright.sync_api import Browser, Page, expect, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MODEL = "smollm2-135m"
FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "1024")
BUSY_S = 170
TIMEOUT_MS = 120_000
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
FIRST = "What is the capital of France?"
SECOND = "Name three things to see there, and say why."


@contextmanager
def server() -> Iterator[str]:
    """The address of a server that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "serve", MODEL, "--port", "0", *FLAGS],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = ""
        for line in process.stderr:
            if match := re.search(r"listening on (\S+)", line):
                url = match[1]
            if "ready: " in line:
                break
        else:
            raise RuntimeError("the server has not become ready")
        threading.Thread(target=lambda: list(process.stderr), daemon=True).start()
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(url: str, number: int) -> None:
    system = "You are a patient teacher who explains things to children in simple words. " * 3
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Tell me {number} things about the sea."},
    ]
    body = {"messages": messages, "max_tokens": 40 + 15 * (number % 5), "ignore_eos": True}
    httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


def keep_busy(url: str, seconds: float) -> None:
    """Waves of up to six requests at a time."""
    end = time.monotonic() + seconds
    wave = 0
    while time.monotonic() < end:
        threads = [
            threading.Thread(target=ask, args=(url, wave + i))
            for i in range((1, 3, 6, 2, 4)[wave % 5])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wave += 1
        time.sleep(2)


def open_page(browser: Browser, url: str, device: dict) -> Page:
    page = browser.new_context(color_scheme="light", **device).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.get_by_text("Ready", exact=True).wait_for()
    # Not fill: on a phone the sampling is folded.
    page.locator("#temperature").evaluate(
        "input => { input.value = 0; input.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    return page


def converse(page: Page) -> None:
    """Until the second answer is on its way."""
    message = page.get_by_label("Message")
    message.fill(FIRST)
    message.press("Enter")
    page.get_by_role("button", name="Retry").wait_for()
    message.fill(SECOND)
    message.press("Enter")
    # Not wait_for_function: the page's policy forbids what that evaluates.
    expect(page.locator(".answer").last).to_have_text(re.compile(".{180}", re.DOTALL))


def shoot(page: Page, name: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.screenshot(path=IMAGES / f"page-{name}-{scheme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running server, instead of starting one")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    if args.url:
        shoot_all(args.url, busy_s=0)
    else:
        with server() as url:
            shoot_all(url, BUSY_S)


def shoot_all(url: str, busy_s: float) -> None:
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        desktop, phone = (open_page(browser, url, device) for device in (DESKTOP, PHONE))
        busy = threading.Thread(target=keep_busy, args=(url, busy_s))
        busy.start()
        while busy.is_alive():
            desktop.wait_for_timeout(500)  # lets both pages run
        for page, name in ((desktop, "desktop"), (phone, "phone")):
            converse(page)
            shoot(page, name, "light")
            if page is phone:
                page.get_by_role("button", name="Engine").click()
            shoot(page, name, "dark")
        browser.close()


if __name__ == "__main__":
    main()
