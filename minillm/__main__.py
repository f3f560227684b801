"""The command line: python -m minillm generate | chat | serve | count | fetch | mine | bench."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from minillm import __version__, serve
from minillm.bench import command as bench_command
from minillm.tools.command_line import Parser, run

if TYPE_CHECKING:
    from minillm.model import Decoder
    from minillm.sampling import Sampling
    from minillm.tokenizer import Tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m minillm",
        description="LLM inference, from first principles to the hardware limit.",
    )
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="generate|chat|serve|count|fetch|mine|bench"
    )
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model", help="a folder in Hugging Face format, a .gguf file or a hub id; default: "
        "SmolLM2-135M-Instruct",
    )  # fmt: skip
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    model.add_argument(
        "--dtype", default="auto", help="auto, float32, float16, bfloat16, int8, int4"
    )
    model.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    model.add_argument(
        "--temperature", type=float, metavar="T",
        help="0 is greedy; default: 1 with --top-k, --top-p or --seed, otherwise 0",
    )  # fmt: skip
    model.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    model.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that reach P"
    )
    model.add_argument("--seed", type=int, help="the same seed gives the same text")

    command = commands.add_parser(
        "generate", parents=[model], help="continue a prompt, and time it"
    )
    command.add_argument("prompt")
    commands.add_parser("chat", parents=[model], help="talk to the model; an empty line quits")

    serve.add_arguments(commands.add_parser("serve", help="an endpoint for OpenAI's clients"))

    command = commands.add_parser("count", help="what serving a published model costs")
    command.add_argument("preset")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--seq", type=int, default=2048, help="tokens per sequence")
    command.add_argument("--dtype", default="float16")
    command.add_argument("--gpu", default="h100", help="a hardware preset")

    commands.add_parser("fetch", help="download the default checkpoint into the cache folder")
    commands.add_parser("mine", help="the parts that you built in the lessons, checked again")
    bench_command.add_arguments(commands.add_parser("bench", help="run benchmarks"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Kept as they are, for a command that starts itself on several ranks.
    options = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    commands = {
        "generate": _generate, "chat": _chat, "count": _count, "fetch": _fetch,
        "mine": _mine, "serve": serve.run, "bench": bench_command.run,
    }  # fmt: skip
    return run(lambda: commands[options.command](options))


def _sampling(options: argparse.Namespace) -> "Sampling":
    from minillm.sampling import Sampling

    names = {"--top-k": options.top_k, "--top-p": options.top_p, "--seed": options.seed}
    given = [name for name, value in names.items() if value is not None]
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if given else 0.0  # who asks for one of these wants to sample
    if temperature == 0 and given:
        raise ValueError(
            f"--temperature 0 is greedy, which leaves nothing to {' and '.join(given)}; give "
            "another temperature, or leave it out."
        )
    return Sampling(temperature, options.top_k, options.top_p, options.seed)


def _stream(
    model: "Decoder", tokenizer: "Tokenizer", ids: list[int], options: argparse.Namespace
) -> tuple[list[int], list[float]]:
    """Generate and print tokens as they come; returns the ids and the time of each."""
    from minillm.generation import generate

    text, times, step = tokenizer.stream(), [], None
    if model.device.type == "cuda":
        from minillm.serving.cuda_graphs import graphed_step

        step = graphed_step(model, len(ids), options.max_new_tokens)  # a replayed CUDA graph

    def show(i: int) -> None:
        times.append(time.perf_counter())
        if i not in tokenizer.stop_ids:
            print(text.push(i), end="", flush=True)

    new = generate(
        model,
        ids,
        options.max_new_tokens,
        sampling=_sampling(options),
        stop_ids=tokenizer.stop_ids,
        on_token=show,
        step=step,
    )
    print(text.flush())
    return new, times


def _load(options: argparse.Namespace) -> "tuple[Decoder, Tokenizer]":
    from minillm.weights.loading import load

    _sampling(options)  # refuse bad numbers before loading anything
    model, tokenizer = load(options.model, device=options.device, dtype=options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer.json; text needs one.")
    return model, tokenizer


def _generate(options: argparse.Namespace) -> None:
    from minillm.measure import read_bandwidth
    from minillm.quantization.quantize import decode_bytes, stored_as

    model, tokenizer = _load(options)
    ids = tokenizer.encode(options.prompt)
    start = time.perf_counter()
    new, times = _stream(model, tokenizer, ids, options)
    if not new:
        return
    first = (times[0] - start) * 1e3  # ms: the prompt's pass and one token
    print(f"\n{len(ids)} prompt tokens, {len(new)} new; time to first token {first:.0f} ms", end="")
    if len(new) == 1:
        print()
        return
    each = (times[-1] - times[0]) / (len(new) - 1)
    moved = decode_bytes(model, len(ids) + len(new) // 2)  # with the cache at its mean length
    speed, bound = moved / each, read_bandwidth(model.device, model.dtype)
    print(f", then {each * 1e3:.1f} ms per token ({1 / each:.1f} tokens/s)")
    print(
        f"{stored_as(model)}: each token reads {moved / 1e6:.0f} MB: "
        f"{speed / 1e9:.1f} of {bound / 1e9:.1f} GB/s "
        f"({speed / bound:.0%})"
    )


def _chat(options: argparse.Namespace) -> None:
    from minillm.quantization.quantize import stored_as

    model, tokenizer = _load(options)
    messages: list[dict[str, str]] = []
    print(f"{model.config.name}, {stored_as(model)}. Ask something; an empty line quits.")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            question = ""
        if not question:
            return
        # The whole conversation is read again for every question.
        asked = {"role": "user", "content": question}
        room = model.config.max_seq_len - options.max_new_tokens
        talk = [*messages, asked]
        ids = tokenizer.chat(talk)  # starts a process for the template: once, if it fits
        if len(ids) > room:
            alone = len(tokenizer.chat([asked]))
            if alone > room:
                print(f"(This alone is {alone} tokens, and there is room for {room}; ask again.)")
                continue
            talk, ids = _fitting(talk, tokenizer, room)
        messages = talk
        new, _ = _stream(model, tokenizer, ids, options)
        answer = [i for i in new if i not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


def _fitting(
    messages: list[dict[str, str]], tokenizer: "Tokenizer", room: int
) -> tuple[list[dict[str, str]], list[int]]:
    """The conversation and its ids, without its oldest turns if it has more than `room` tokens."""
    kept, ids = messages, tokenizer.chat(messages)
    while len(ids) > room and len(kept) > 1:
        kept = kept[2:]  # a question and its answer
        ids = tokenizer.chat(kept)
    n_dropped = (len(messages) - len(kept)) // 2
    if n_dropped:
        turns = "turn is" if n_dropped == 1 else f"{n_dropped} turns are"
        print(f"(The conversation is too long for the model: its oldest {turns} forgotten.)")
    return kept, ids


def _count(options: argparse.Namespace) -> None:
    from minillm.card import card
    from minillm.config import ModelConfig
    from minillm.hardware import Hardware

    config, hardware = ModelConfig.preset(options.preset), Hardware.preset(options.gpu)
    print(card(config, hardware, options.batch, options.seq, options.dtype))


def _mine(options: argparse.Namespace) -> int:
    from minillm.mine.kept import report

    return report()


def _fetch(options: argparse.Namespace) -> None:
    from minillm.weights.default import fetch_default

    print(fetch_default())


if __name__ == "__main__":
    sys.exit(main())
