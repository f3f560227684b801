"""The peers: the same work by other libraries, in the same run.

A package that is not installed is a gap in the results, not an error.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from minillm.bench.models import born_in
from minillm.bench.recording import Recording
from minillm.model import Decoder
from minillm.serving.workload import TimedRequest

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM
    from xllamacpp import Server

PATIENCE = 60.0
"""Seconds without any answer after which a peer counts as stuck."""
LLAMA_CPP = "llama.cpp (computes in 4 bit)"


def has(package: str, recording: Recording, peer: str) -> bool:
    """Whether a peer's package is installed; if not, the recording notes the gap."""
    if importlib.util.find_spec(package) is not None:
        return True
    recording.gap(peer, f"{package} is not installed")
    return False


def transformers_twin(model: Decoder) -> "LlamaForCausalLM":
    """Hugging Face transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from minillm.weights.build import parameter_sources

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.d_head,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    with born_in(model.device, model.dtype):
        twin = LlamaForCausalLM(config).eval().requires_grad_(False)
    # One of our fused matrices is several of theirs, one below the other.
    theirs, ours = dict(twin.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in parameter_sources(c).items():
            pieces = ours[name].split([shape[0] for shape in parts.values()])
            for part, rows in zip(parts, pieces, strict=True):
                theirs[part].copy_(rows)
    return twin


def tokenizers_twin(fields: dict[str, Any]) -> "Tokenizer":
    """The tokenizers library's tokenizer with the tokens and merges of a GGUF file's fields.

    Of the default checkpoint's kind: bytes, each digit alone.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    twin = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    twin.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    twin.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    twin.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return twin


def transformers_generate(twin: "LlamaForCausalLM", prompt: list[int], n: int) -> None:
    """`n` new tokens of one sequence, greedy."""
    transformers_static_batch(twin, [prompt], n)


@torch.inference_mode()
def transformers_static_batch(
    twin: "LlamaForCausalLM", prompts: Sequence[list[int]], n: int
) -> None:
    """`n` new tokens of each prompt in one batch, padded to the longest; greedy."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(p)) + p for p in prompts]  # on the left: answers begin together
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    ids, seen = torch.tensor(padded, device=twin.device), torch.tensor(mask, device=twin.device)
    out = twin.generate(
        ids, attention_mask=seen, max_new_tokens=n, min_new_tokens=n, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    assert out.shape == (len(prompts), longest + n)


@contextmanager
def transformers_continuous(
    twin: "LlamaForCausalLM",
) -> Iterator[Callable[[Sequence[TimedRequest]], None]]:
    """A function that serves requests with transformers' continuous batching, already set up.

    Not for inference mode: its thread writes into tensors that are created here.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with twin.continuous_batching_context_manager(
        generation_config=config, block=True, timeout=5
    ) as manager:

        def serve(requests: Sequence[TimedRequest]) -> None:
            for request in requests:
                manager.add_request(list(request.prompt_ids), max_new_tokens=request.max_new_tokens)
            tokens: list[int] = []  # of each finished request
            newest = time.monotonic()
            while len(tokens) < len(requests):
                result = manager.get_result(timeout=1)
                stuck = time.monotonic() - newest > PATIENCE
                if result is None and (stuck or not manager.is_running()):
                    raise RuntimeError("transformers stopped before all requests were done.")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"transformers failed a request: {result.error}")
                    tokens.append(len(result.generated_tokens))
                    newest = time.monotonic()
            assert sorted(tokens) == sorted(request.max_new_tokens for request in requests)

        yield serve


def llama_cpp_seconds(prompts: list[list[int]], lengths: list[int], n_threads: int) -> float:
    """Seconds that llama.cpp's server needs with 8 slots.

    In its own process, since its idle threads would slow the other peers.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_llama_cpp, prompts, lengths, n_threads).result()


def llama_cpp_decode_seconds(prompt: list[int], n: int, n_threads: int) -> float:
    """Seconds per decoded token of one request: a longer answer minus a shorter one.

    In its own process, as above.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_llama_cpp_decode, prompt, n, n_threads).result()


@contextmanager
def llama_cpp_endpoint(n_slots: int, n_threads: int) -> Iterator[str]:
    """The address of llama.cpp's HTTP server, which runs in a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_tell_address, args=(there, n_slots, n_threads), daemon=True)
    process.start()
    try:
        if not here.poll(PATIENCE):
            raise RuntimeError("llama.cpp's server did not start.")
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _tell_address(pipe: "Connection", n_slots: int, n_threads: int) -> None:
    server = _llama_cpp_server(n_slots, n_threads)
    pipe.send(server.listening_address)
    pipe.recv()  # until this process is ended


def _llama_cpp_server(n_slots: int, n_threads: int) -> "Server":
    """The default checkpoint in llama.cpp's server, which computes in the file's 4-bit format."""
    import xllamacpp

    from minillm.weights.default import fetch_default

    params = xllamacpp.CommonParams()
    params.model.path = str(fetch_default())
    params.n_parallel, params.n_ctx, params.verbosity = n_slots, n_slots * 512, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.port = 0  # a free one
    return xllamacpp.Server(params)


def _llama_cpp_asking(n_slots: int, n_threads: int) -> Callable[[list[int], int], int]:
    """A function that asks a server for n tokens after a prompt, and returns how many came."""
    server = _llama_cpp_server(n_slots, n_threads)

    def ask(prompt: list[int], n: int) -> int:
        options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions({"prompt": prompt, "n_predict": n} | options)
        return answer["usage"]["completion_tokens"]

    return ask


def _llama_cpp_decode(prompt: list[int], n: int, n_threads: int) -> float:
    ask, took = _llama_cpp_asking(1, n_threads), {}
    for tokens in (2, 1, 1 + n):  # the first one warms up
        start = time.perf_counter()
        assert ask(prompt, tokens) == tokens
        took[tokens] = time.perf_counter() - start
    return (took[1 + n] - took[1]) / n


def _llama_cpp(prompts: list[list[int]], lengths: list[int], n_threads: int) -> float:
    """Seconds to answer all prompts at once, without loading the model."""
    ask = _llama_cpp_asking(8, n_threads)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert set(pool.map(ask, prompts, [2] * len(prompts))) == {2}  # warm up
        start = time.perf_counter()
        assert list(pool.map(ask, prompts, lengths)) == lengths
        return time.perf_counter() - start
