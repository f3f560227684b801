"""The command line: python -m minillm generate | chat | count | fetch | bench.

Bad input ends with one sentence on standard error and exit code 2, never with a traceback.
"""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from minillm.model import Decoder
    from minillm.sampling import Sampling
    from minillm.tokenizer import Tokenizer


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"minillm: {message}; see `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m minillm", description="LLM inference, from first principles to the hardware limit.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate|chat|count|fetch|bench")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", help="a folder in Hugging Face format, a .gguf file or a hub id; default: SmolLM2-135M-Instruct")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    model.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    model.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    model.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    model.add_argument("--top-k", type=int, metavar="K")
    model.add_argument("--top-p", type=float, metavar="P")
    model.add_argument("--seed", type=int)

    command = commands.add_parser("generate", parents=[model], help="continue a prompt, and say how fast")
    command.add_argument("prompt")
    commands.add_parser("chat", parents=[model], help="talk to the model; an empty line ends")

    command = commands.add_parser("count", help="a card: parameters, bytes, FLOPs and bounds of a published model")
    command.add_argument("preset")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--seq", type=int, default=2048, help="tokens per sequence")
    command.add_argument("--dtype", default="float16")
    command.add_argument("--gpu", default="h100", help="a hardware preset")

    commands.add_parser("fetch", help="fetch the default checkpoint into the cache folder")
    command = commands.add_parser("bench", help="run benchmarks: decode, prefill, attention, serve, load; all if none is named")
    command.add_argument("names", nargs="*", metavar="NAME")
    command.add_argument("--device")
    command.add_argument("--rate", help="with serve: requests per second to send; prints what their users felt")
    command.add_argument("--requests", help="with --rate: how many requests")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        {"generate": _generate, "chat": _chat, "count": _count, "fetch": _fetch, "bench": _bench}[options.command](options)
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        sys.stderr.close()
        return 141
    except (ValueError, TypeError, OSError) as error:
        print(f"minillm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _sampling(options: argparse.Namespace) -> "Sampling":
    from minillm.sampling import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.seed)


def _stream(model: "Decoder", tokenizer: "Tokenizer", ids: list[int], options: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Generate and print as the tokens come; returns the ids and the time at which each was known."""
    from minillm.generate import generate

    text, times = tokenizer.stream(), []

    def show(i: int) -> None:
        times.append(time.perf_counter())
        if i not in tokenizer.stop_ids:
            print(text.push(i), end="", flush=True)

    new = generate(model, ids, options.max_new_tokens, sampling=_sampling(options), stop_ids=tokenizer.stop_ids, on_token=show)
    print(text.flush())
    return new, times


def _load(options: argparse.Namespace) -> "tuple[Decoder, Tokenizer]":
    from minillm.weights import load

    _sampling(options)  # refuse bad numbers before loading anything
    model, tokenizer = load(options.model, device=options.device, dtype=options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer.json; text needs one.")
    return model, tokenizer


def _generate(options: argparse.Namespace) -> None:
    from minillm import costs
    from minillm.hardware import read_bandwidth

    model, tokenizer = _load(options)
    ids = tokenizer.encode(options.prompt)
    start = time.perf_counter()
    new, times = _stream(model, tokenizer, ids, options)
    if not new:
        return
    print(f"\n{len(ids)} prompt tokens, {len(new)} new; time to first token {(times[0] - start) * 1e3:.0f} ms", end="")
    if len(new) > 1:
        per_token = (times[-1] - times[0]) / (len(new) - 1)
        moved = costs.decode_bytes(model.config, 1, len(ids) + len(new) // 2, model.dtype)
        reached, bound = moved / per_token, read_bandwidth(model.device, model.dtype)
        print(f", then {per_token * 1e3:.1f} ms per token ({1 / per_token:.1f} tokens/s)")
        print(f"each token reads {moved / 1e6:.0f} MB: {reached / 1e9:.1f} of {bound / 1e9:.1f} GB/s ({reached / bound:.0%})")
    else:
        print()


def _chat(options: argparse.Namespace) -> None:
    model, tokenizer = _load(options)
    messages: list[dict[str, str]] = []
    print("Ask something; an empty line ends.")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            question = ""
        if not question:
            return
        messages.append({"role": "user", "content": question})
        new, _ = _stream(model, tokenizer, tokenizer.chat(messages), options)
        answer = [i for i in new if i not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


def _count(options: argparse.Namespace) -> None:
    from minillm.config import ModelConfig
    from minillm.hardware import Hardware

    print(card(ModelConfig.preset(options.preset), Hardware.preset(options.gpu), options.batch, options.seq, options.dtype))


def card(config: Any, hardware: Any, batch: int, seq: int, dtype: str) -> str:
    """What serving `batch` sequences of `seq` tokens costs, as a text of about 20 lines."""
    from minillm import costs
    from minillm.hardware import roofline_seconds

    for name, value in (("--batch", batch), ("--seq", seq)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more.")
    if seq > config.max_seq_len:
        raise ValueError(f"--seq is {seq}; {config.name} was trained for at most {config.max_seq_len} positions.")
    bits = costs.dtype_bits(dtype)
    # Weights narrower than any arithmetic the chip has are multiplied in 16 bits (lesson 09).
    arithmetic = "float32" if bits == 32 else next(d for d in ("float16", "float32") if d in hardware.peak_flops)
    prompt_flops, token_flops = costs.prefill_flops(config, seq, last_logits_only=True), costs.decode_flops(config, seq)
    intensity = costs.decode_intensity(config, batch, seq, dtype)
    total, weights, cache = costs.param_count(config), costs.weight_bytes(config, dtype), costs.kv_cache_bytes(config, batch, seq, dtype)
    lines = [f"{config.name}, {dtype}, {batch} × {seq} tokens, on {hardware.name}", "", f"parameters       {total:>18,}"]
    lines += [f"  {part:<14} {n:>18,}  {n / total:6.1%}" for part, n in costs.param_breakdown(config).items() if n]
    lines += [
        f"weights          {weights / 1e9:>15.2f} GB  ({weights / 2**30:.2f} GiB)",
        f"KV cache         {cache / 1e9:>15.2f} GB  ({costs.kv_bytes_per_token(config, dtype):,} bytes a token)",
        "",
        f"prefill          {prompt_flops / 1e12:>12.2f} TFLOP  for one prompt of {seq} tokens",
        f"decode           {token_flops / 1e9:>12.2f} GFLOP  for one token after {seq}",
        f"decode intensity {intensity:>12.1f} FLOP per byte  (ridge point {hardware.ridge_point(arithmetic):.0f})",
        "",
    ]
    if weights > hardware.memory_bytes:
        n = -(-weights // hardware.memory_bytes)
        lines.append(f"does not fit: the weights alone need {n} × {hardware.name} ({hardware.memory_bytes / 1e9:.0f} GB each)")
    else:
        step = roofline_seconds(hardware, batch * token_flops, costs.decode_bytes(config, batch, seq, dtype), arithmetic)
        first = roofline_seconds(hardware, prompt_flops, costs.weight_read_bytes(config, dtype), arithmetic)
        largest = costs.max_batch_size(config, seq, hardware.memory_bytes, dtype)
        lines += [
            f"prefill bound    {first * 1e3:>15.2f} ms  for one prompt",
            f"decode bound     {step * 1e3:>15.2f} ms  a step, {batch / step:,.0f} tokens/s",
            f"largest batch    {largest:>18,}  sequences of {seq} tokens in {hardware.memory_bytes / 1e9:.0f} GB",
        ]
        if batch > largest:
            lines.append(f"a batch of {batch} does not fit beside the weights")
    return "\n".join(lines)


def _fetch(options: argparse.Namespace) -> None:
    from minillm.weights import fetch_default

    print(fetch_default())


def _bench(options: argparse.Namespace) -> None:
    from minillm import bench

    named = {"--device": options.device, "--rate": options.rate, "--requests": options.requests}
    bench.main(options.names + [part for name, value in named.items() if value is not None for part in (name, value)])


if __name__ == "__main__":
    sys.exit(main())
