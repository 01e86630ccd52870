"""`jaxserve chat`: piped, and at a terminal."""

import io

import pytest

from jaxserve import SamplingParams

CHAT = ("chat", "--model", "m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def piped(monkeypatch, cli):
    def run(text, *flags):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return cli(*CHAT, *flags)

    return run


@pytest.fixture
def typed(monkeypatch, cli):
    """What is typed line by line; an exception stands for a key."""

    def run(*lines):
        waiting = iter(lines)

        def type_line(prompt):
            assert prompt == "> "
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", type_line)
        return cli(*CHAT)

    return run


def prompts(engine):
    return ["".join(map(chr, prompt)) for prompt, _ in engine.calls]


def test_the_conversation_is_kept(piped, engines):
    code, out, err = piped("ab\n\ncd\n")
    assert (code, err) == (0, "")
    assert out == ";ba:u\n" + "u:ab;a:;ba:u;u:cd;"[::-1] + "\n"
    assert prompts(engines[0]) == ["u:ab;", "u:ab;a:;ba:u;u:cd;"]
    assert engines[0].calls[0][1] == SamplingParams(max_tokens=None)
    assert engines[0].closed


def test_reset_and_quit(piped, engines):
    code, out, _ = piped("ab\n/reset\ncd\n/quit\nef\n", "--system", "S", "--max-tokens", "5")
    assert code == 0
    assert prompts(engines[0]) == ["s:S;u:ab;", "s:S;u:cd;"]
    assert engines[0].calls[0][1].max_tokens == 5
    assert out.count("\n") == 2


def test_a_refused_message_is_forgotten(piped, engines):
    code, out, err = piped("bad\nab\n")
    assert code == 1
    assert err == "jaxserve: error: the prompt is bad\n"
    assert out == ";ba:u\n"
    assert prompts(engines[0])[-1] == "u:ab;"


def test_ctrl_c_stops_the_answer_only(typed, engines):
    code, out, err = typed("interrupt", "ab")
    assert code == 0
    assert out.splitlines()[0] == ";tp"
    assert prompts(engines[0])[1] == "u:interrupt;a:;tp;u:ab;"
    assert "/quit ends" in err


def test_ctrl_c_at_the_prompt_only_ends_the_line(typed, engines):
    code, out, _ = typed(KeyboardInterrupt(), "ab", "/quit")
    assert (code, out) == (0, ";ba:u\n")


def test_ctrl_c_ends_a_piped_chat(piped, engines):
    code, out, _ = piped("interrupt\nab\n")
    assert (code, out) == (130, ";tp\n")
    assert engines[0].closed


def test_the_engine_is_closed_when_it_fails(piped, engines, monkeypatch):
    async def fail(self, prompt, params):
        raise RuntimeError("the engine failed: out of memory")
        yield

    monkeypatch.setattr("jaxserve.llm.AsyncLLM.generate", fail)
    code, _, err = piped("ab\ncd\n")
    assert (code, err) == (1, "jaxserve: error: the engine failed: out of memory\n")
    assert engines[0].closed
