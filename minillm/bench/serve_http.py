"""What HTTP costs: the engine alone, the endpoint over it, and llama.cpp's server, in turns.

1, 4 and 16 clients ask at once, each for a streamed answer to a prompt that nobody knows. All three
read the same file. Tokens per second count from the first request to the last token; TTFT and
inter-token latency (ITL) are what the clients see, and they share the processor with the servers.
The endpoint is compared with an engine in this process that gets the same requests. Differences
of a few per cent are noise, so the event loop's share of the processor time is read as well, which
is not.
"""

import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import torch

from minillm.bench.peers import LLAMA_CPP, PATIENCE, has, llama_cpp_endpoint
from minillm.bench.recording import Recording
from minillm.measure import alternate, multiplies_bfloat16
from minillm.prepacked import prepack
from minillm.serving.engine import Engine, EngineConfig
from minillm.serving.metrics import percentile
from minillm.weights.loading import load

AT_ONCE, N_PROMPT, N_NEW = (1, 4, 16), 64, 32
_FIRST_ID = 1000  # the ids below hold control tokens, bytes and very short words


@dataclass
class Seen:
    """What the clients of one server saw, in seconds, over all rounds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


def bench(device: torch.device, *, repeats: int = 5) -> Path:
    """Measure the default checkpoint, in 4 bits and in the fastest format of many at once."""
    if device.type != "cpu":
        raise ValueError(f"bench serve --http compares servers on a CPU; this is {device}.")
    forms = ("int4", "bfloat16" if multiplies_bfloat16(device) else "float32")
    settings = {"clients": list(AT_ONCE), "prompt_tokens": N_PROMPT, "new_tokens": N_NEW}
    recording = Recording("serve_http", device, settings)
    llama_cpp = has("xllamacpp", recording, LLAMA_CPP)
    with ExitStack() as stack:
        servers = {form: stack.enter_context(endpoint(form)) for form in forms}
        engines = {form: _engine(form) for form in forms}
        for n in AT_ONCE:
            _measure(recording, n, engines, servers, llama_cpp=llama_cpp, repeats=repeats)
        for form, server in servers.items():
            _add_share(recording, form, server)
    return recording.path


@dataclass
class _Server:
    url: str
    process: subprocess.Popen
    before: dict[int, int]  # processor time of its threads when it was ready


@contextmanager
def endpoint(form: str) -> Iterator[_Server]:
    """`python -m minillm serve` on the default checkpoint, in a process of its own."""
    command = [sys.executable, "-m", "minillm", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen([*command, "--dtype", form], stdout=subprocess.PIPE, text=True) as server:
        said = server.stdout.readline()  # "NAME answers at URL/v1; …", once it is loaded
        url = said.partition(" answers at ")[2].partition(";")[0]
        try:
            yield _Server(url, server, _ticks(server.pid))
        finally:
            server.terminate()


def _engine(form: str) -> Engine:
    """The same engine as the endpoint's."""
    model, _ = load(device="cpu", dtype=form)
    if form != "int4":
        model = prepack(model)
    return Engine(model, EngineConfig(n_blocks=1024, max_seqs=16))


def _measure(
    recording: Recording,
    n: int,
    engines: dict[str, Engine],
    servers: dict[str, _Server],
    *,
    llama_cpp: bool,
    repeats: int,
) -> None:
    """Rows for n clients at once: tokens per second, TTFT and ITL of each server."""
    seen = {name: Seen() for name in (*servers, LLAMA_CPP)}
    calls: dict[str, Callable[[], float]] = {}
    for form, engine in engines.items():
        calls[f"engine, {form}"] = partial(_without_http, engine, n)
        calls[f"endpoint, {form}"] = partial(_over_http, servers[form].url, n, seen[form], {})
    if llama_cpp:
        calls[LLAMA_CPP] = partial(_llama_cpp, n, seen[LLAMA_CPP])
    took = alternate(calls, repeats)
    tokens = n * N_NEW
    speeds = {name: tokens / median(values) for name, values in took.items()}
    print(f"{n} at once: " + ", ".join(f"{k} {v:.0f}" for k, v in speeds.items()) + " tokens/s")
    raw = {f"{name}, {n} at once": values for name, values in took.items()}
    for name, own in seen.items():
        if own.ttft:
            raw |= {f"TTFT, {name}, {n} at once": own.ttft, f"ITL, {name}, {n} at once": own.itl}
    for form in engines:
        speed = speeds[f"endpoint, {form}"]
        others = {"the engine without HTTP": f"engine, {form}", LLAMA_CPP: LLAMA_CPP}
        against = {k: speed / speeds[other] for k, other in others.items() if other in speeds}
        what = f"serve over HTTP, {n} at once, {form}"
        recording.add({"what": what, "value": speed, "unit": "tokens/s", "against": against}, raw)
        _add_latencies(recording, what, seen[form], seen[LLAMA_CPP] if llama_cpp else None)


def _add_latencies(recording: Recording, what: str, own: Seen, peer: Seen | None) -> None:
    """Rows for TTFT and ITL; the ratio says how many times as long the peer's clients wait."""
    for name, p in (("ttft", 50), ("itl", 50), ("itl", 99)):
        value = percentile(getattr(own, name), p)
        row = {"what": f"{what}, {name.upper()} p{p}", "value": value * 1e3, "unit": "ms"}
        if peer is not None:
            row["against"] = {LLAMA_CPP: percentile(getattr(peer, name), p) / value}
        print(f"  {row['what']}: {value * 1e3:.1f} ms")
        recording.add(row, {})


def _prompts(n: int) -> list[list[int]]:
    """n random prompts, never the same twice: a known prefix would be cheaper."""
    return [[random.randrange(_FIRST_ID, 40_000) for _ in range(N_PROMPT)] for _ in range(n)]


def _without_http(engine: Engine, n: int) -> float:
    prompts = _prompts(n)
    start = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, N_NEW)
    engine.run()
    return time.perf_counter() - start


def _llama_cpp(n: int, seen: Seen) -> float:
    # A process for each round, since its idle threads would slow the others.
    with llama_cpp_endpoint(max(AT_ONCE), torch.get_num_threads()) as url:
        _over_http(url, n, Seen(), {"cache_prompt": False})  # warms up
        return _over_http(url, n, seen, {"cache_prompt": False})


def _over_http(url: str, n: int, seen: Seen, more: dict[str, object]) -> float:
    """Seconds from the first request to the last token, of n clients at once."""
    prompts = _prompts(n)
    with ThreadPoolExecutor(n) as pool:
        start = time.perf_counter()
        answers = list(pool.map(lambda prompt: _answer(url, prompt, more), prompts))
        end = time.perf_counter()
    for asked, times in answers:
        seen.ttft.append(times[0] - asked)
        seen.itl += [after - before for before, after in pairwise(times)]
    return end - start


def _answer(url: str, prompt: list[int], more: dict[str, object]) -> tuple[float, list[float]]:
    """When a client asked, and when each piece of its answer came."""
    body = {
        "prompt": prompt, "max_tokens": N_NEW, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    at, usage, times = urlsplit(url), None, []
    asked = time.perf_counter()
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | more), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            chunk = json.loads(line[len(b"data: ") :])
            usage = chunk.get("usage") or usage
            if chunk.get("choices") and chunk["choices"][0]["finish_reason"] is None:
                times.append(time.perf_counter())
    connection.close()
    assert usage is not None and usage["completion_tokens"] == N_NEW, usage
    return asked, times


def _ticks(process: int) -> dict[int, int]:
    """Processor time of each thread of a process so far, in clock ticks; only Linux tells."""
    stats = Path(f"/proc/{process}/task").glob("*/stat")
    return {int(stat.parent.name): _spent(stat.read_text()) for stat in stats}


def _spent(stat: str) -> int:
    user, system = stat.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _add_share(recording: Recording, form: str, server: _Server) -> None:
    """A row: the event loop's part of the server's processor time since it was ready."""
    loop = server.process.pid  # the main thread's id
    spent = {i: n - server.before.get(i, 0) for i, n in _ticks(loop).items()}
    if not spent:
        return
    share = 100 * spent[loop] / sum(spent.values())
    what = f"the event loop's part of the endpoint's processor time, {form}"
    print(f"{what}: {share:.1f}%")
    recording.add({"what": what, "value": share, "unit": "%"}, {})
