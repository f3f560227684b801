"""Clients nobody here wrote, against the endpoint: `python -m minillm.bench.clients`.

By hand, before a release, in an environment of its own, because these packages bring many others:

    pip install -e '.[serve,peers]' -c constraints.txt litellm langchain-openai 'lm-eval[api]'

Their answers must be those of `generate`, and lm-eval's log-likelihoods those of `prompt_logprobs`.
`vllm bench serve`, which needs vLLM's files, is the load generator: its own counts are recorded.
The server is a process of its own with the default checkpoint: in float32 for what is compared, in
4 bits under load.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minillm.bench.peers import tokenizers_twin
from minillm.bench.recording import Recording
from minillm.bench.serve_http import endpoint
from minillm.generation import generate, prompt_logprobs
from minillm.tools.folders import PACKAGE_DATA
from minillm.weights.default import fetch_default
from minillm.weights.gguf_header import read_gguf
from minillm.weights.loading import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minillm.model import Decoder
    from minillm.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "Write a sentence about the sea.",
    "What is 2 + 2?", "Who wrote Emma?", "Say hello.", "Name a fruit.", "What is a bicycle?",
)  # fmt: skip
N_NEW = 16
Ask = Callable[[str], str]


def litellm(url: str, model: str) -> tuple[Ask, Ask]:
    """How litellm asks: for a whole answer, and for a stream."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches prices at import
    from litellm import completion

    def ask(text: str, **more: object) -> object:
        return completion(
            model=f"openai/{model}", api_base=url, api_key="none", temperature=0,
            max_tokens=N_NEW, messages=[{"role": "user", "content": text}], **more,
        )  # fmt: skip

    def streamed(text: str) -> str:
        chunks = ask(text, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    return lambda text: ask(text).choices[0].message.content, streamed


def langchain(url: str, model: str) -> tuple[Ask, Ask]:
    """How LangChain asks."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=N_NEW)
    return (
        lambda text: chat.invoke(text).content,
        lambda text: "".join(piece.content for piece in chat.stream(text)),
    )


ASKS = {"litellm": litellm, "langchain-openai": langchain}


def compare_answers(
    recording: Recording, url: str, model: "Decoder", tokenizer: "Tokenizer"
) -> None:
    """A row for each client: how many of its answers are those of `generate`."""
    expected = []
    for question in QUESTIONS:
        ids = tokenizer.chat([{"role": "user", "content": question}])
        new = generate(model, ids, N_NEW, stop_ids=tokenizer.stop_ids)
        expected.append(tokenizer.decode([t for t in new if t not in tokenizer.stop_ids]))
    for package, asks in ASKS.items():
        whole, streamed = asks(url, model.config.name)
        answers = [(whole(question), streamed(question)) for question in QUESTIONS]
        equal = sum((a == e) + (s == e) for (a, s), e in zip(answers, expected, strict=True))
        what = (
            f"{package} {version(package)}: of {2 * len(QUESTIONS)} answers, half of them streamed"
        )
        add(recording, f"{what}, those that are generate's", equal, "answers")


def compare_likelihoods(
    recording: Recording, url: str, model: "Decoder", tokenizer: "Tokenizer", folder: Path
) -> None:
    """A row: how far lm-eval's log-likelihoods of a text are from those in this process."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        model=model.config.name, base_url=f"{url}/completions", tokenizer=str(folder),
        tokenizer_backend="huggingface", num_concurrent=1, max_length=512,
    )  # fmt: skip
    words = (PACKAGE_DATA / "austen.txt").read_text(encoding="utf-8").split()
    # Cut between words, where the two parts have the tokens that they have as one text.
    pairs = [
        (" ".join(words[i : i + 40]), " " + " ".join(words[i + 40 : i + 60]))
        for i in range(0, 16 * 60, 60)
    ]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = [pair[0] for pair in client.loglikelihood(asked)]
    gaps = []
    for (context, more), likelihood in zip(pairs, found, strict=True):
        start = len(tokenizer.encode(context))
        rows = prompt_logprobs(model, tokenizer.encode(context + more))
        gaps.append(abs(sum(row.logprob for row in rows[start - 1 :]) - likelihood))
    what = f"lm-eval {version('lm_eval')}: largest difference of {len(pairs)} log-likelihoods"
    add(recording, f"{what} over HTTP", max(gaps), "nats")


@contextmanager
def tokenizer_folder() -> "Iterator[Path]":
    """The default checkpoint's tokenizer as transformers reads it, out of the GGUF file."""
    from transformers import PreTrainedTokenizerFast

    fields, _ = read_gguf(fetch_default())
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizers_twin(fields), eos_token="<|im_end|>")
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        yield Path(folder)


def add(recording: Recording, what: str, value: float, unit: str) -> None:
    """Print a row and record it."""
    print(f"{what}: {value:g} {unit}", flush=True)
    recording.add({"what": what, "value": value, "unit": unit}, {})


def load_by_vllm(recording: Recording, url: str, model: str, folder: Path) -> None:
    """Rows with what vLLM's generator counts at 1, 4 and 16 requests at once."""
    for n in (1, 4, 16):
        result = Path(folder, "result.json")
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", "openai", "--base-url", url.removesuffix("/v1"), "--model", model,
            "--tokenizer", str(folder), "--dataset-name", "random", "--random-input-len", "64",
            "--random-output-len", "32", "--ignore-eos", "--temperature", "0",
            "--max-concurrency", str(n), "--num-prompts", str(8 * n), "--save-result",
            "--result-filename", str(result), "--percentile-metrics", "ttft,itl",
            "--metric-percentiles", "50,99",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        counted = json.loads(result.read_text())
        what = f"vllm {version('vllm')} bench serve, int4, {n} at once"
        add(recording, f"{what}: completed of {8 * n}", counted["completed"], "requests")
        add(recording, f"{what}: output", counted["output_throughput"], "tokens/s")
        for name in ("ttft", "itl"):
            for p in (50, 99):
                value = counted[f"p{p}_{name}_ms"]
                add(recording, f"{what}: {name.upper()} p{p}", value, "ms")


def main() -> None:
    """Run all of them and write `figures/data/clients.HARDWARE.json`."""
    model, tokenizer = load(device="cpu", dtype="float32")
    recording = Recording("clients", torch.device("cpu"), {"new_tokens": N_NEW})
    with endpoint("float32") as server, tokenizer_folder() as folder:
        compare_answers(recording, server.url, model, tokenizer)
        compare_likelihoods(recording, server.url, model, tokenizer, folder)
    with endpoint("int4") as server, tokenizer_folder() as folder:
        load_by_vllm(recording, server.url, model.config.name, folder)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
