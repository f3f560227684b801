"""The endpoint, asked by OpenAI's own client: answers, streams, errors, clients that go away."""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import tokenizers
import torch
from endpoint import Running, byte_tokenizer, serving, small_model
from models import save_folder
from openai import APIError, APIStatusError, AsyncOpenAI, OpenAI

from minillm import Decoder, Engine, EngineConfig, Sampling, Tokenizer, generate, serve
from minillm.__main__ import main
from minillm.bench import clients, serve_http
from minillm.bench.recording import Recording
from minillm.generation import prompt_logprobs
from minillm.serving.answer_text import AnswerText
from minillm.serving.engine_thread import ClosedError, EngineThread
from minillm.vocabulary import byte_alphabet

CHAT = [{"role": "user", "content": "Hello"}]
MODEL = "custom"


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def server(model: Decoder) -> Iterator[Running]:
    with serving(model) as running:
        yield running


@pytest.fixture
def client(server: Running) -> OpenAI:
    return client_of(server)


def client_of(server: Running, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def expected(
    model: Decoder, prompt: str | list[int], n: int, sampling: Sampling | None = None
) -> list[int]:
    """What `generate` says, without the token that ends an answer."""
    ids = byte_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    new = generate(model, ids, n, sampling=sampling, stop_ids=[256])
    return [token for token in new if token != 256]


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


# Answers


def test_the_model_is_listed(client, model):
    (card,) = client.models.list().data
    assert card.id == model.config.name and card.max_model_len == 256
    assert client.models.retrieve(card.id).id == card.id


def test_a_completion_is_what_generate_says(client, model):
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert choice.text == text_of(expected(model, "Once", 20)) and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 20)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_a_chat_is_what_generate_says(client, model):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=12, temperature=0
    )
    prompt = [*b"[user]Hello", 256, *b"[assistant]"]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(expected(model, prompt, 12))
    assert answer.usage.prompt_tokens == len(prompt)


def test_the_parts_of_a_message_are_joined(client):
    parts = [{"type": "text", "text": text} for text in ("Hel", "lo")]
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], temperature=0,
            max_tokens=8,
        )
        for content in ("Hello", parts)
    ]  # fmt: skip
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_without_a_limit_a_chat_goes_on_to_the_last_position(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_the_token_that_ends_an_answer_is_counted_and_not_shown(client, model):
    """Tried with seeds until an answer ends by itself."""
    for seed in range(200):
        found = generate(model, [*b"x"], 100, sampling=Sampling(1.5, seed=seed), stop_ids=[256])
        if found[-1] == 256:
            break
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, temperature=1.5, seed=seed
    )
    (choice,) = answer.choices
    assert choice.text == text_of(found[:-1]) and choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(found)
    goes_on = client.completions.create(
        model=MODEL, prompt="x", max_tokens=100, temperature=1.5, seed=seed,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert goes_on.usage.completion_tokens == 100


def test_sampling_with_a_seed(client, model):
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    answer = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=24, n=3, extra_body={"top_k": 40}, **options
    )
    for i, choice in enumerate(answer.choices):
        sampling = Sampling(0.9, 40, 0.8, 5 + i)  # each answer has a seed of its own
        assert choice.index == i and choice.text == text_of(expected(model, "Once", 24, sampling))
    assert len({choice.text for choice in answer.choices}) == 3


def test_many_prompts_as_texts_and_as_ids(client, model):
    texts = ["Once", "upon", "a time"]
    ids = [[*text.encode()] for text in texts]
    answers = [
        client.completions.create(model=MODEL, prompt=p, n=2, max_tokens=6, temperature=0)
        for p in (texts, ids)
    ]
    for answer in answers:
        assert [choice.index for choice in answer.choices] == list(range(6))
        for i, choice in enumerate(answer.choices):
            assert choice.text == text_of(expected(model, texts[i // 2], 6))
    one = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=6, temperature=0)
    assert one.choices[0].text == answers[0].choices[0].text


# Streams


def test_a_stream_of_a_chat(client):
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *said, end, usage = chunks
    assert [chunk.choices[0].delta.role for chunk in said] == ["assistant"] + [None] * 8
    assert end.choices[0].finish_reason == "length" and usage.choices == []
    assert usage.usage == whole.usage and all(chunk.usage is None for chunk in (*said, end))
    texts = [chunk.choices[0].delta.content or "" for chunk in (*said, end)]
    assert "".join(texts) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_several_answers(client):
    options = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 5, "seed": 0}
    whole = client.completions.create(**options)
    texts, ends = [""] * 4, [None] * 4
    for chunk in client.completions.create(
        **options, stream=True, extra_body={"stream_options": {"continuous_usage_stats": True}}
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] = ends[choice.index] or choice.finish_reason
        assert chunk.usage.prompt_tokens == 2
    assert texts == [choice.text for choice in whole.choices] and ends == ["length"] * 4


def test_the_async_client(server, model):
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            options = {"model": MODEL, "prompt": "Once", "max_tokens": 7, "temperature": 0}
            whole = await client.completions.create(**options)
            chunks = await client.completions.create(**options, stream=True)
            return whole.choices[0].text, "".join([c.choices[0].text async for c in chunks])

    assert asyncio.run(ask()) == (text_of(expected(model, "Once", 7)),) * 2


def test_the_last_event_is_done(server):
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    got = httpx.post(f"{server.url}/v1/completions", json=body)
    assert got.headers["content-type"].startswith("text/event-stream")
    *chunks, done = got.text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]" and all(json.loads(c.removeprefix("data: ")) for c in chunks)


# Stop strings


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens(server, client, model, stream):
    """It ends the answer before the next step, and neither it nor what follows is shown."""
    full = text_of(expected(model, "Once", 60))
    stop = full[20:23]  # three characters, so at least three tokens
    at = full.index(stop)
    options = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "temperature": 0}
    before = server.thread.engine.stats.steps
    answer = client.completions.create(**options, stop=["never said", stop], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == (full[:at], "stop")
    n_bytes = len(bytes(expected(model, "Once", 60)))
    assert server.thread.engine.stats.steps - before < n_bytes


def test_stop_strings_by_the_token(tokenizer):
    def said(text: str, *stop: str) -> tuple[list[str], bool]:
        answer = AnswerText(tokenizer, stop)
        pieces = [answer.push(token) for token in text.encode()]
        return [*pieces, answer.flush()], answer.stopped

    assert said("abc") == (["a", "b", "c", ""], False)
    assert said("abcd", "bd") == (["a", "", "bc", "d", ""], False)  # held back, then let go
    assert said("aabb", "ab") == (["", "a", "", "", ""], True)
    assert said("xyab", "abc") == (["x", "y", "", "", "ab"], False)  # the end lets it go
    assert said("ééx", "éx") == (["", "", "", "é", "", ""], True)
    assert said("abcdef", "cd", "bcde") == (["a", "", "", "b", "", "", ""], True)


def test_text_equals_a_search_in_the_whole(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=12))
        stop = ["".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(2)]
        answer = AnswerText(tokenizer, stop)
        out = ""
        for i, token in enumerate(text.encode()):
            out += answer.push(token)
            # It stops with the first token that completes one of them.
            assert answer.stopped == any(s in text[: i + 1] for s in stop)
            if answer.stopped:
                break
        out += answer.flush()
        ends = [text[: i + 1].find(s) for s in stop if s in text[: i + 1]]
        assert out == (text[: min(ends)] if ends else text)


# Log-probabilities


def test_logprobs_of_a_completion(client, model):
    answer = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=6, temperature=0, logprobs=2
    )
    new = expected(model, "Once", 6)
    rows = prompt_logprobs(model, [*b"Once", *new], 2)[3:]
    got = answer.choices[0].logprobs
    assert got.token_logprobs == pytest.approx([row.logprob for row in rows], abs=1e-5)
    assert got.tokens == [text_of([token]) for token in new]
    assert [max(top, key=top.get) for top in got.top_logprobs] == got.tokens  # greedy
    assert got.text_offset == [sum(map(len, got.tokens[:i])) for i in range(6)]


def test_logprobs_of_a_chat(client):
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 5, "seed": 1}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 5 and all(len(row.top_logprobs) == 3 for row in rows)
    for row in rows:
        assert bytes(row.bytes).decode(errors="replace") == row.token and row.logprob <= 0
    chunks = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [row for part in streamed if part for row in part.content] == rows
    none = client.chat.completions.create(**options, logprobs=True)
    assert all(row.top_logprobs == [] for row in none.choices[0].logprobs.content)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_the_prompts_own(client, model, max_tokens):
    """What a test of log-likelihoods asks for: nothing, or one token, after a prompt."""
    answer = client.completions.create(
        model=MODEL, prompt=[*b"Hello"], max_tokens=max_tokens, echo=True, logprobs=1,
        temperature=0,
    )  # fmt: skip
    (choice,) = answer.choices
    got = choice.logprobs
    assert choice.text.startswith("Hello") and got.tokens[:5] == list("Hello")
    assert got.token_logprobs[0] is None and got.top_logprobs[0] is None
    exact = [row.logprob for row in prompt_logprobs(model, [*b"Hello"], 1)]
    assert got.token_logprobs[1:5] == exact and len(got.tokens) == 5 + max_tokens
    assert answer.usage.completion_tokens == max_tokens


def test_echo_in_a_stream(client):
    options = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "echo": True, "temperature": 0}
    whole = client.completions.create(**options, logprobs=0).choices[0]
    chunks = [c.choices[0] for c in client.completions.create(**options, logprobs=0, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [t for chunk in chunks if chunk.logprobs for t in chunk.logprobs.tokens]
    assert tokens == whole.logprobs.tokens


# What is refused


COMPLETION, TALK = {"prompt": "a"}, {"messages": CHAT}
REFUSED = [
    (COMPLETION, {"foo": 1}, "foo", "The field 'foo' is not supported"),
    (COMPLETION, {"foo": None}, "foo", "The field 'foo' is not supported"),
    (COMPLETION, {"prompt": None}, "prompt", "prompt is None; give a string"),
    (COMPLETION, {"prompt": []}, "prompt", "prompt is \\[\\]"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt", "a list of token ids, or a list of either"),
    (COMPLETION, {"prompt": [True]}, "prompt", "a list of token ids"),
    (COMPLETION, {"prompt": ["a"] * 257}, "prompt", "257 prompts; give at most 256"),
    (COMPLETION, {"prompt": [999]}, None, "ids must be from 0 to 256"),
    (COMPLETION, {"prompt": [-1]}, None, "ids must be from 0 to 256"),
    (COMPLETION, {"prompt": ""}, None, "prompt_ids is empty"),
    (COMPLETION, {"max_tokens": -1}, "max_tokens", "a whole number from 0 to"),
    (COMPLETION, {"max_tokens": 2.0}, "max_tokens", "a whole number"),
    (COMPLETION, {"max_tokens": True}, "max_tokens", "a whole number"),
    (COMPLETION, {"max_tokens": 256}, None, "exceed the 256 positions"),
    (COMPLETION, {"max_completion_tokens": 5}, "max_completion_tokens", "is not supported"),
    (COMPLETION, {"n": 0}, "n", "n is 0; give a whole number from 1 to 64"),
    (COMPLETION, {"n": 65}, "n", "from 1 to 64"),
    (COMPLETION, {"temperature": -0.1}, "temperature", "a number from 0 to 2"),
    (COMPLETION, {"temperature": 2.1}, "temperature", "a number from 0 to 2"),
    (COMPLETION, {"temperature": "hot"}, "temperature", "a number from 0 to 2"),
    (COMPLETION, {"temperature": 10**400}, "temperature", "a number from 0 to 2"),
    (COMPLETION, {"top_p": 0}, "top_p", "a number above 0"),
    (COMPLETION, {"top_p": 1.5}, "top_p", "a number from 0 to 1"),
    (COMPLETION, {"top_k": -2}, "top_k", "from -1 to"),
    (COMPLETION, {"seed": -1}, "seed", "from 0 to"),
    (COMPLETION, {"seed": "x"}, "seed", "a whole number"),
    (COMPLETION, {"stop": [1]}, "stop", "stop is \\[1\\]; give at most 16 strings"),
    (COMPLETION, {"stop": ["x"] * 17}, "stop", "at most 16 strings"),
    (COMPLETION, {"stop": [""]}, "stop", "1 to 500 characters"),
    (COMPLETION, {"stop": "x" * 501}, "stop", "1 to 500 characters"),
    (COMPLETION, {"stop": {"a": 1}}, "stop", "at most 16 strings"),
    (COMPLETION, {"stream": 1}, "stream", "true or false"),
    (COMPLETION, {"stream_options": {}}, "stream_options", "with stream it may hold"),
    (COMPLETION, {"stream": True, "stream_options": {"x": 1}}, "stream_options", "may hold"),
    (COMPLETION, {"logprobs": 21}, "logprobs", "from 0 to 20"),
    (COMPLETION, {"logprobs": True}, "logprobs", "from 0 to 20"),
    (COMPLETION, {"echo": "yes"}, "echo", "true or false"),
    (COMPLETION, {"suffix": "b"}, "suffix", "not supported"),
    (COMPLETION, {"best_of": 2}, "best_of", "not supported"),
    (COMPLETION, {"presence_penalty": 1}, "presence_penalty", "not supported"),
    (COMPLETION, {"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
    (COMPLETION, {"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    (COMPLETION, {"user": 5}, "user", "not supported"),
    (COMPLETION, {"model": "gpt-4"}, "model", "'gpt-4' is not served here; ask for 'custom'"),
    (TALK, {"messages": []}, "messages", "a list of at least one message"),
    (TALK, {"messages": "Hello"}, "messages", "a list of at least one message"),
    (TALK, {"messages": ["Hello"]}, "messages[0]", "give role and content"),
    (TALK, {"messages": [{"role": "god", "content": ""}]}, "messages[0].role", "system, user or"),
    (TALK, {"messages": [{"role": "user"}]}, "messages[0].content", "parts of type text"),
    (
        TALK,
        {"messages": [*CHAT, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content",
        "image_url",
    ),
    (TALK, {"messages": [CHAT[0] | {"name": "Bo"}]}, "messages[0]", "'name', which is not supp"),
    (TALK, {"tools": [{"type": "function"}]}, "tools", "not supported"),
    (TALK, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (TALK, {"top_logprobs": 2}, "top_logprobs", "without logprobs"),
    (TALK, {"logprobs": 1}, "logprobs", "true or false"),
    (TALK, {"echo": True}, "echo", "not supported"),
    (TALK, {"prompt": "a"}, "prompt", "not supported"),
    (TALK, {"max_tokens": 0}, "max_tokens", "from 1 to"),
    (TALK, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
    (TALK, {"x" * 500: 1}, "x" * 100, "…"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "changes", "param", "words"),
    REFUSED,
    ids=[f"{'chat' if b is TALK else 'text'}-{str(c)[:40]}" for b, c, _, _ in REFUSED],
)
def test_a_field_that_cannot_be_obeyed_is_refused(server, base, changes, param, words):
    path = "chat/completions" if base is TALK else "completions"
    got = httpx.post(
        f"{server.url}/v1/{path}", content=json.dumps({"max_tokens": 2} | base | changes),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    error = got.json()["error"]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])
    assert got.status_code == (404 if "model" in changes else 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    said = error["message"]
    assert said.endswith(".") and said.isprintable() and len(said) < 400


def test_what_clients_always_send_is_accepted(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=1, max_completion_tokens=1, stop=None, n=1, user="u",
        frequency_penalty=0, presence_penalty=0, logit_bias={}, logprobs=False, tools=[],
        tool_choice="none", response_format={"type": "text"}, store=False, seed=None,
        extra_body={"repetition_penalty": 1.0, "ignore_eos": False, "top_k": -1, "min_p": 0},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 1


BODIES = [
    (b"{", "not JSON"), (b"", "not JSON"), (b"[1]", "send a JSON object"), (b"\xff", "not JSON"),
    (b'{"prompt":' * 100_000, "not JSON"), (b'{"prompt": "a", "temperature": NaN}', "from 0 to 2"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_none(server, body, words):
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert got.status_code == 400 and words in got.json()["error"]["message"]


def test_a_body_that_is_too_long(server):
    body = json.dumps({"prompt": "a" * (9 << 20)})
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert got.status_code == 413 and "8,388,608 bytes" in got.json()["error"]["message"]


def test_a_web_page_cannot_post_here(server):
    """Its browser sends this type to any address unasked, but JSON only after asking."""
    body, headers = json.dumps({"prompt": "a"}), {"content-type": "text/plain"}
    got = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert got.status_code == 415 and "Content-Type" in got.json()["error"]["message"]


def test_other_paths_and_methods(server):
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405)):
        got = httpx.request(method, server.url + path)
        assert got.status_code == status and path in got.json()["error"]["message"]
    got = httpx.get(f"{server.url}/v1/models/gpt-4")
    assert got.status_code == 404 and got.json()["error"]["code"] == "model_not_found"


def test_half_a_surrogate_pair(client):
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert answer.choices
    got = httpx.post(
        f"{client.base_url}completions", content=b'{"prompt": "\\ud800", "max_tokens": 1}',
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert got.status_code == 200 and got.json()["usage"]["prompt_tokens"] == 3  # U+FFFD


def test_the_key(model):
    with serving(model, api_key="secret") as server:
        ask = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        assert client_of(server, "secret").completions.create(**ask).choices
        for wrong in ("none", "secret2", "sécret"):
            got = httpx.post(
                f"{server.url}/v1/completions", json=ask,
                headers={"authorization": f"Bearer {wrong}".encode()},
            )  # fmt: skip
            assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200


# Trouble


class Slow:
    """Holds the engine's thread until it is let go."""

    def __init__(self, thread: EngineThread):
        self.inside, self.go = threading.Event(), threading.Event()

        def wait() -> None:
            self.inside.set()
            self.go.wait(60)

        thread.call(wait)
        self.inside.wait(60)


def in_background(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def fails_once(engine, monkeypatch) -> None:
    real = engine._forward

    def forward(plan):
        monkeypatch.setattr(engine, "_forward", real)
        raise RuntimeError("planted\nsecond line")

    monkeypatch.setattr(engine, "_forward", forward)


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails(server, client, model, monkeypatch, stream):
    fails_once(server.thread.engine, monkeypatch)
    ask = {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0}
    with pytest.raises(APIError, match=r"could not be computed \(RuntimeError: planted\)") as told:
        list(client.completions.create(**ask, stream=stream))
    assert stream or told.value.status_code == 500
    again = client.completions.create(**ask)
    assert again.choices[0].text == text_of(expected(model, "a", 3))


def test_an_engine_that_always_fails_is_given_up(model, monkeypatch):
    """Whoever waits is told, and so is whoever comes later."""
    with serving(model) as server:

        def schedule():
            raise RuntimeError("planted")

        assert httpx.get(f"{server.url}/health").status_code == 200
        monkeypatch.setattr(server.thread.engine.scheduler, "schedule", schedule)
        for status in (500, 503):
            with pytest.raises(APIStatusError, match="start the server again") as told:
                client_of(server).completions.create(model=MODEL, prompt="a")
            assert told.value.status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_full_queue(model):
    with serving(model, max_seqs=1, max_waiting=1, n_blocks=64) as server:
        client, thread = client_of(server), server.thread
        slow = Slow(thread)
        asking = [
            in_background(lambda: client.completions.create(model=MODEL, prompt="a"))
            for _ in range(2)
        ]
        wait_for(lambda: thread._calls.qsize() == 2)
        third = []
        asking.append(
            in_background(
                lambda: third.append(
                    httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
                )
            )
        )
        wait_for(lambda: thread._calls.qsize() == 3)
        slow.go.set()
        for each in asking:
            each.join()
        (refused,) = third
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert "vllm:admission_rejections_total" in httpx.get(f"{server.url}/metrics").text
        assert value(server, "admission_rejections_total") == 1
        # Never to be taken, so that trying again would not help:
        with pytest.raises(APIStatusError, match="3 answers, and this server holds 2 at once"):
            client.completions.create(model=MODEL, prompt="a", n=3)


def test_all_or_none_of_several_prompts(model):
    with serving(model) as server:
        with pytest.raises(APIStatusError, match="ids must be from 0 to 256"):
            client_of(server).completions.create(model=MODEL, prompt=[[1], [2], [999]])
        assert not server.thread._answers
        wait_for(lambda: not server.thread.engine.busy)


def test_a_client_that_goes_away_is_aborted_before_the_next_step(model, monkeypatch):
    with serving(model) as server:
        thread, engine, passes = server.thread, server.thread.engine, threading.Semaphore(1)
        real = engine._forward

        def forward(plan):
            assert passes.acquire(timeout=60)
            return real(plan)

        monkeypatch.setattr(engine, "_forward", forward)
        ask = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as response:
            next(response.iter_lines())
        # It leaves before or during the second step; then the abort waits for that one only.
        wait_for(lambda: thread._calls.qsize() == 1 or not engine.busy)
        passes.release(1000)
        wait_for(lambda: not engine.busy)
        assert engine.stats.steps <= 2
        assert value(server, 'request_success_total{finished_reason="abort"') == 1


def test_two_hundred_clients_half_of_whom_leave(model):
    """No block is lost, and those who stay get the tokens that `generate` gives."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(200)]
    lengths = [rng.randint(1, 16) for _ in prompts]
    stays = [rng.random() < 0.5 for _ in prompts]

    async def one(http: httpx.AsyncClient, i: int) -> str | None:
        body = {
            "prompt": prompts[i], "max_tokens": lengths[i], "temperature": 0, "stream": i % 2 == 0,
        }  # fmt: skip
        if stays[i]:
            got = await http.post("/v1/completions", json=body)
            if i % 2:
                return got.json()["choices"][0]["text"]
            events = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line]
            return "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])
        task = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        return None

    async def all_of_them(url: str) -> list[str | None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
            return await asyncio.gather(*(one(http, i) for i in range(200)))

    with serving(model, n_blocks=64) as server:
        texts = asyncio.run(all_of_them(server.url))
        engine = server.thread.engine
        wait_for(lambda: not engine.busy and not server.thread._answers)
        manager = engine.scheduler.manager
        assert manager.n_available == engine.scheduler.capacity
    for i, text in enumerate(texts):
        if stays[i]:
            assert text == text_of(expected(model, prompts[i], lengths[i]))


# The engine's thread


def test_the_thread_that_steps_is_the_one_that_loaded(model, monkeypatch):
    seen = set()
    real = Decoder.hidden

    def hidden(self, *arguments):
        seen.add(threading.current_thread())
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, "hidden", hidden)
    built = []

    def engine(*arguments):
        built.append(threading.current_thread())
        return Engine(*arguments)

    monkeypatch.setattr("endpoint.Engine", engine)
    with serving(model) as server:
        ask = {"model": MODEL, "prompt": "abc", "max_tokens": 3}
        client_of(server).completions.create(**ask, echo=True, logprobs=1)
        assert seen == set(built) == {server.thread._thread}
    assert threading.current_thread() not in seen


def test_a_thread_that_cannot_build(model):
    def build():
        raise ValueError("no such model")

    thread = EngineThread(build)
    with pytest.raises(ValueError, match="no such model"):
        thread.start()
    thread.close()


def test_a_closed_thread_takes_no_calls(model):
    with serving(model) as server:
        thread = server.thread
    assert not thread.alive
    with pytest.raises(ClosedError, match="shutting down"):
        thread.call(lambda: None).result()
    thread.abort([0])  # nothing to do


# Metrics


def value(server: Running, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"vllm:{name}")
    )


def test_metrics(model):
    with serving(model) as server:
        client = client_of(server)
        for _ in range(2):
            client.completions.create(
                model=MODEL, prompt="a prompt of many tokens", n=2, max_tokens=5,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        assert value(server, "prompt_tokens_total") == 4 * 23
        assert value(server, "generation_tokens_total") == 20
        assert value(server, "time_to_first_token_seconds_count") == 4
        assert value(server, "inter_token_latency_seconds_count") == 16
        assert value(server, 'request_success_total{finished_reason="length"') == 4
        assert value(server, "num_requests_running") == value(server, "kv_cache_usage_perc") == 0
        assert (
            0
            < value(server, "prefix_cache_hits_total")
            < value(server, "prefix_cache_queries_total")
        )
        for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
            assert value(server, f"{name}_seconds_count") == 4
        parts = ("queue", "prefill", "decode")
        total = sum(value(server, f"request_{part}_time_seconds_sum") for part in parts)
        assert total == pytest.approx(value(server, "e2e_request_latency_seconds_sum"))


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--host", "256.1.1.1"], "Nothing can listen at 256.1.1.1"),
        (["--max-seqs", "0"], "--max-seqs is 0"),
        (["--max-waiting", "-1"], "--max-waiting is -1"),
        (["--max-batch-tokens", "8"], "fewer than the 16 answers of --max-seqs"),
        (["--log"], "--log"),
        (["--api-key", ""], "--api-key is empty"),
        (["--port", "0", "--model", "/nowhere"], "/nowhere"),
        (["--drafter", "oracle"], "oracle"),
        (["--kv-dtype", "int3"], "int3"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, words, capsys):
    try:
        code = main(["serve", *arguments])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and words in err and err.count("\n") == 1 and not out


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert main(["serve", "--port", str(sock.getsockname()[1])]) == 2
    assert "give another --host or --port" in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("minillm.serve.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert "pip install 'minillm[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["", "--drafter ngram", "--drafter student", "--kv-dtype int8",
                                     "--drafter medusa"])  # fmt: skip
def test_the_engine_that_the_options_describe(default, options, monkeypatch):
    monkeypatch.setattr("minillm.weights.loading.load", lambda *_, **__: default)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with serve.built(parser.parse_args(options.split())) as (engine, tokenizer):
        i = engine.submit(tokenizer.encode("The capital of France is"), 6)
        answer = tokenizer.decode(engine.run()[i].tokens)
    assert answer.startswith(" Paris.") and engine.config.max_waiting == 256


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    """The tests' model and tokenizer as a folder in Hugging Face format."""
    folder = save_folder(small_model(), tmp_path_factory.mktemp("served") / "model")
    hf = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    hf.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = tokenizers.decoders.ByteLevel()
    hf.save(str(folder / "tokenizer.json"))
    hf.add_special_tokens(["<|end|>"])
    return folder


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command with the default checkpoint in a process of its own, and its first line."""
    command = [sys.executable, "-m", "minillm", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run in the background ignore SIGINT, and their children would, too.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_the_readme_asks_and_is_answered(default, capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    line = re.search(r"^\$ python -m minillm serve\n(.*)$", readme, re.M)[1]
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "OpenAI" in c)
    with started() as (_, said):
        assert re.sub(r":\d+/", ":8000/", said.strip()) == line
        exec(code.replace(":8000/", re.search(r":\d+/", said)[0]))
    assert capsys.readouterr().out.strip() == code.rpartition("# ")[2].strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_stream(default, number):
    """The stream goes on for a while, ends with an error, and nothing else is said."""
    with started("--log-requests") as (process, said):
        url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        ask = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=120) as response:
            events = (line for line in response.iter_lines() if line)
            assert "choices" in next(events)
            process.send_signal(number)
            *_, last = events
        assert "The server is shutting down" in last
        out, err = process.communicate(timeout=120)
    assert out == "" and process.returncode == 128 + number
    (line,) = err.splitlines()  # the log of this request, and no traceback
    assert "/v1/completions: 1 prompts of 1 tokens, 1 answers" in line


# Several ranks


def ranks_of(model: str) -> dict[str, int]:
    """The process of each rank that serves this model."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:  # not ours, or over
            continue
        rank = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
        if rank and model.encode() in command:
            found[rank[0].decode()] = int(folder.name)
    return found


def test_two_ranks_answer_and_end_together(small_folder, model):
    with started("--tp", "2", "--dtype", "float32", "--model", str(small_folder)) as (ranks, said):
        url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        ask = {"model": client.models.list().data[0].id, "prompt": "Once", "temperature": 0}
        answer = client.completions.create(**ask, max_tokens=20).choices[0]
        assert answer.text == text_of(expected(model, "Once", 20))
        scores = client.completions.create(**ask, max_tokens=0, echo=True, logprobs=1).choices[0]
        exact = [row.logprob for row in prompt_logprobs(model, [*b"Once"])]
        assert scores.logprobs.token_logprobs[1:] == pytest.approx(exact, abs=1e-4)
        stream = client.completions.create(**ask, max_tokens=20, stream=True)
        next(stream)
        ranks.terminate()  # what is under way may finish
        assert "".join(piece.choices[0].text for piece in stream) == answer.text[1:]
        out, err = ranks.communicate(timeout=60)
    assert (out, err, ranks.returncode) == ("", "", 128 + signal.SIGTERM)


def test_a_rank_that_is_killed_ends_the_server(small_folder):
    with started("--tp", "2", "--dtype", "float32", "--model", str(small_folder)) as (ranks, said):
        url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        os.kill(ranks_of(str(small_folder))["1"], signal.SIGKILL)
        ask = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
        with suppress(httpx.TransportError):  # if the server is gone already
            assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code >= 500
        _, err = ranks.communicate(timeout=60)
    assert ranks.returncode == 2 and err.startswith("minillm: A rank ended before the others (")
    assert "SIGKILL" in err and err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(small_folder, number):
    """Also where it cannot tell them, and where it is told twice."""
    with started("--tp", "2", "--dtype", "float32", "--model", str(small_folder)) as (ranks, _):
        assert set(ranks_of(str(small_folder))) == {"0", "1"}
        ranks.send_signal(number)
        if number == signal.SIGINT:
            time.sleep(0.3)
            ranks.send_signal(number)
        ranks.communicate(timeout=60)
        assert ranks.returncode == (130 if number == signal.SIGINT else -number)
        wait_for(lambda: not ranks_of(str(small_folder)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "0"], "--tp is 0"),
        (["--tp", "2"], "2 ranks cannot share the 9 query heads and 3 key/value heads"),
        (["--tp", "3", "--drafter", "medusa"], "use --drafter ngram"),
        (["--tp", "3", "--device", "cuda:1"], "each rank takes a GPU of its own"),
        (["--tp", "3", "--dtype", "nonsense"], "nonsense"),
        (["--tp", "3", "--host", "256.1.1.1"], "Nothing can listen at 256.1.1.1"),
    ],
)
def test_before_any_rank_starts(default, arguments, words, capsys):
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


# The benchmark


def test_the_benchmark_sees_every_token(server, model, monkeypatch):
    monkeypatch.setattr(serve_http, "_prompts", lambda n: [[i, 1, 2] for i in range(n)])
    monkeypatch.setattr(serve_http, "N_NEW", 7)
    seen = serve_http.Seen()
    assert serve_http._over_http(server.url, 3, seen, {}) > 0
    assert len(seen.ttft) == 3 and len(seen.itl) == 3 * 6
    engine = Engine(model, EngineConfig(n_blocks=64))
    assert serve_http._without_http(engine, 3) > 0 and not engine.busy


def test_answers_of_other_clients_are_compared(server, model, tokenizer, monkeypatch, tmp_path):
    """One that hands on what it gets, and one that loses the last letter of a stream."""

    def handing_on(url, name):
        chat = partial(
            OpenAI(base_url=url, api_key="none").chat.completions.create,
            model=name, temperature=0, max_tokens=clients.N_NEW,
        )  # fmt: skip

        def whole(text):
            return chat(messages=[{"role": "user", "content": text}]).choices[0].message.content

        return whole, whole

    def losing(url, name):
        whole, _ = handing_on(url, name)
        return whole, lambda text: whole(text)[:-1]

    monkeypatch.setattr(clients, "ASKS", {"pytest": handing_on, "httpx": losing})
    recording = Recording("clients", torch.device("cpu"), {}, tmp_path)
    clients.compare_answers(recording, f"{server.url}/v1", model, tokenizer)
    assert [row["value"] for row in recording.document["rows"]] == [16, 8]


def test_the_benchmark_belongs_to_serve(capsys):
    assert main(["bench", "decode", "--http"]) == 2
    assert "bench serve --http" in capsys.readouterr().err
