"""A template's process: it stays, takes turns, and is replaced when it fails."""

import gc
import os
import signal
import threading
import time

import pytest

from minillm.tools import chat_template
from minillm.tools.chat_template import Renderer

CHAT = [{"role": "user", "content": "Hä 🦜?"}]
SAID = "{{ x }}{{ messages[0].content }}"


@pytest.fixture
def renderer():
    made = Renderer(SAID, {"x": "<x>"})
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_for_all_conversations(renderer):
    assert renderer._process is None  # not before it is needed
    assert renderer.render(CHAT) == "<x>Hä 🦜?"
    pid = renderer._process.pid
    for text in ("a\nb", "", "\ud800", "x" * 300_000):
        assert renderer.render([{"role": "user", "content": text}]) == "<x>" + text
    assert renderer._process.pid == pid


def test_it_ends_with_its_owner():
    renderer = Renderer(SAID, {})
    renderer.render(CHAT)
    pid = renderer._process.pid
    del renderer
    gc.collect()
    assert not alive(pid)


def test_a_refusal_keeps_the_process_and_a_failure_does_not():
    renderer = Renderer(
        "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        "{{ 'x' * (3 * 10**9 if messages[0].content == 'much' else 1) }}", {},
    )  # fmt: skip
    assert renderer.render(CHAT) == "x"
    pid = renderer._process.pid
    with pytest.raises(ValueError, match="refuses these messages: 'no'"):
        renderer.render([{"role": "user", "content": "no"}])
    assert renderer._process.pid == pid
    with pytest.raises(ValueError, match="more than 1024 MB"):
        renderer.render([{"role": "user", "content": "much"}])
    assert not alive(pid)
    assert renderer.render(CHAT) == "x" and renderer._process.pid != pid
    renderer.close()


def test_one_that_takes_too_long_is_replaced(monkeypatch):
    renderer = Renderer("{{ 10**(10**9 if messages[0].content == 'long' else 1) }}", {})
    assert renderer.render(CHAT) == "10"
    pid = renderer._process.pid
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"more than 0\.2 seconds"):
        renderer.render([{"role": "user", "content": "long"}])
    assert not alive(pid)
    monkeypatch.setattr(chat_template, "SECONDS", 10)
    assert renderer.render(CHAT) == "10"
    renderer.close()


def test_a_process_that_was_killed_is_replaced(renderer):
    renderer.render(CHAT)
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer.render(CHAT) == "<x>Hä 🦜?"


def test_ctrl_c_does_not_end_it(renderer):
    """A terminal sends it to all processes of a program."""
    renderer.render(CHAT)
    pid = renderer._process.pid
    os.kill(pid, signal.SIGINT)
    assert renderer.render(CHAT) and renderer._process.pid == pid


def test_an_interrupt_leaves_no_answer_behind(renderer, monkeypatch):
    renderer.render(CHAT)
    real = renderer._reply

    def interrupted(line: str) -> dict:
        real(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(renderer, "_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        renderer.render(CHAT)
    monkeypatch.setattr(renderer, "_reply", real)
    assert renderer.render([{"role": "user", "content": "b"}]) == "<x>b"


def test_threads_take_turns(renderer):
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = renderer.render([{"role": "user", "content": str(i)}])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"<x>{i}" for i in range(8)}


def test_nothing_waits_at_the_end():
    renderer = Renderer(SAID, {})
    renderer.render(CHAT)
    pid = renderer._process.pid
    renderer.close()
    renderer.close()
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end
