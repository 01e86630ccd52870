"""Conversations on the page: what is sent and shown, what goes wrong, and the key."""

import json
import re

from playwright.sync_api import expect

KEY = "sk-browser"
# The fake engine answers a conversation with its first message.
LONG = "a long message, which takes many steps to say again; " * 6
CHAT = "**/v1/chat/completions"


def test_a_chat_streams(page, send, answer, finished):
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


def test_what_a_request_says(page, send, answer, finished):
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


def test_reasoning_and_calls(open_page, start_fake, send, answer, finished):
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


def test_a_conversation_outlives_a_reload_and_is_cleared(page, send, answer, finished):
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


def test_stop_frees_the_request(page, server, send, answer, finished, wait_idle):
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


def answer_with(page, status, body, headers=None):
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body, headers=headers))


def test_errors_in_plain_words(open_page, start_fake, send, answer):
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


def test_the_key_is_asked_for(open_page, start_fake, send, answer, finished):
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
