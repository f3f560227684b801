"""Several ranks, started by torchrun as users start them, and the plan that needs none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import lively, lively_heads, save_folder, tiny_config

from minillm import (
    Decoder,
    EngineConfig,
    MedusaDrafter,
    ModelConfig,
    generate,
    load,
    pipeline_parallel,
    quantize,
    sparsify,
    tensor_parallel,
)
from minillm.costs import decode_bytes, kv_cache_bytes, matmul_params
from minillm.hardware import Hardware
from minillm.parallel import serving
from minillm.parallel.__main__ import main
from minillm.parallel.loading import check_split, load_pipeline
from minillm.parallel.plan import Plan, bubble_share, fitting_sizes, part
from minillm.parallel.ranks import cause, on_ranks
from minillm.parallel.serving import shared_engine
from minillm.parallel.step_time import Cluster, decode_time, prefill_time
from minillm.quantization.grid import to_int4
from minillm.quantization.linear import Int4Linear

HERE = Path(__file__).parent


def torchrun(
    n: int, *checks: str, timeout: int = 240, folder: Path | None = None
) -> subprocess.CompletedProcess:
    """Checks as `ranks.py` takes them. folder: where the ranks may write models for each other."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINILLM_TEST_FOLDER": str(folder)}
    return subprocess.run(
        [*command, str(HERE / "ranks.py"), *checks], capture_output=True, text=True,
        timeout=timeout, env=environment, check=False,
    )  # fmt: skip


def all_pass(n: int, *checks: str, folder: Path) -> None:
    done = torchrun(n, *checks, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for check in checks:
        assert done.stdout.count(f"{check}: all checks passed") == n


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks",
    [
        (2, "ranks_tensor"),
        (3, "ranks_tensor", "ranks_pipeline", "ranks_pytorch:check_pipeline"),
        (4, "ranks_tensor", "ranks_pipeline", "ranks_pytorch:check_tensor"),
    ],
    ids=lambda checks: f"{checks[0]} ranks",
)
def test_several_ranks_are_one_process(checks, tmp_path):
    """What is cut over ranks, our way and PyTorch's, computes what a single process does.

    One start for all checks of so many ranks: starting takes longer than most of them.
    """
    all_pass(*checks, folder=tmp_path)


@pytest.mark.slow
def test_a_rank_holds_its_part(tmp_path):
    heads = {"n_heads": 12, "n_kv_heads": 3, "vocab_size": 300}
    large = heads | {"d_model": 1024, "d_ff": 3072, "n_layers": 8, "d_head": 64}
    for name, sizes in (("small", heads), ("large", large)):
        save_folder(Decoder(tiny_config(**sizes)), tmp_path / name)
    all_pass(3, "ranks_tensor:check_memory", folder=tmp_path)


@pytest.mark.slow
def test_the_command():
    """The default checkpoint on three ranks says what it says on one."""
    command = [sys.executable, "-m", "minillm.parallel", "generate", "--dtype", "float32"]
    prompt, n = "The capital of France is", 8
    done = subprocess.run(
        [*command, "--tp", "3", "--max-new-tokens", str(n), prompt], capture_output=True,
        text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    model, tokenizer = load(dtype="float32")
    alone = tokenizer.decode(generate(model, tokenizer.encode(prompt), n))
    assert done.stdout.startswith(alone) and "3 ranks; rank 0 sent" in done.stdout


@pytest.mark.slow
def test_the_command_refuses(capsys):
    for given, said in (
        (["--tp", "2"], "2 ranks cannot share the 9 query heads and 3 key/value heads"),
        (["--pp", "31"], "31 ranks cannot share 30 layers"),
        (["--tp", "0"], "--tp is 0; it must be a whole number, 1 or more"),
        (["--pp", "2", "--dtype", "int8"], "shards are read in float32, float16 or bfloat16"),
        (["--tp", "3", "--dtype", "nonsense"], "nonsense"),
        (["--max-new-tokens", "9999"], "9999 new ones exceed the 8192 positions"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--tp", "3", "--model", "no/where/here"], "does not exist"),
    ):
        assert main(["generate", *given, "hi"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.startswith("minillm: ") and err.count("\n") == 1
    assert main(["generate", "--tp", "3", ""]) == 2  # before any rank starts
    assert capsys.readouterr().err == "minillm: prompt_ids is empty; give at least one token.\n"


def test_int4_groups_that_ranks_would_cut_are_told_before_loading(tmp_path):
    save_folder(Decoder(tiny_config(n_heads=4, n_kv_heads=2, d_head=8, d_ff=64)), tmp_path)
    with pytest.raises(ValueError, match="out has groups of 32 numbers, which 2 ranks would cut"):
        check_split(tmp_path, "int4", 2)
    with pytest.raises(ValueError, match="no tokenizer"):  # as far as the others get
        check_split(tmp_path, "int8", 2)


@pytest.mark.slow
def test_what_only_the_ranks_can_find_out_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["generate", "--tp", "3", "--max-new-tokens", "2", "hi"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("minillm: ") and err.count("\n") == 1 and "nothing0" in err


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("W1128 torchrun:\nminillm: too long.\nminillm: too long.\nTraceback\n", "too long."),
        ("minillm: [enforce fail at device.cc:84] no address for: x\n", "no address for: x"),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: AssertionError: odd\n",
            "A rank ended before the others (AssertionError: odd); look at its memory, or start",
        ),
        (
            "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 7\n",
            "A rank ended before the others (Signal 9 (SIGKILL) received by PID 7); look",
        ),
        (
            "minillm: [pair.cc:553] Connection closed by peer [127.0.0.1]:4.\n"
            "[rank0]: RuntimeError: Read error: Connection reset by peer.\n"
            "Failures:\n  exitcode  : 2 (pid: 6)\nRoot Cause:\n  exitcode  : -9 (pid: 7)\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 7\n",
            "A rank ended before the others (Signal 9 (SIGKILL) received by PID 7); look",
        ),
        ("", "A rank ended before the others (torchrun failed); look"),
    ],
)
def test_a_report_of_torchrun_becomes_a_sentence(report, said):
    assert cause(report).startswith(said) and "\n" not in cause(report)


@pytest.mark.slow
def test_ranks_that_differ_end_together():
    done = torchrun(2, "ranks_tensor:differ", timeout=60)
    assert done.returncode != 0
    assert "Rank 1 has another model than rank 0" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("check, n", [("ranks_tensor:die", 2), ("ranks_pipeline:die", 3)])
def test_a_rank_that_dies_ends_the_run(check, n):
    done = torchrun(n, check, timeout=60)
    assert done.returncode != 0
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s+exitcode\s*: 7", done.stderr)


LLAMA = ModelConfig.preset("llama-2-70b")
H100S = Cluster(Hardware.preset("h100"))
STEP = {"batch_size": 4, "context_len": 1000, "dtype": "bfloat16"}


def test_the_parts_of_a_step():
    """Eight GPUs: an eighth of the bytes, and what the ledger counts over the link's bandwidth."""
    alone, eight = (decode_time(LLAMA, H100S, tp=tp, **STEP) for tp in (1, 8))
    assert alone.latency == alone.transfer == 0
    n_bytes = decode_bytes(LLAMA, 4, 1000, "bfloat16")
    assert alone.total == pytest.approx(n_bytes / 3.35e12)  # four tokens: memory decides
    assert eight.compute == pytest.approx(alone.compute / 8)
    stream, logits = (2 * 4 * width for width in (LLAMA.d_model, LLAMA.vocab_size))
    sent = 161 * 2 * stream * 7 / 8 + logits * 7 / 8  # 161 sums, and all logits
    assert eight.transfer == pytest.approx(sent / (450e9 / 2))  # LL: half of it are flags
    assert eight.latency == pytest.approx(161 * (6.6e-6 + 14 * 0.6e-6) + 6.6e-6 + 7 * 0.6e-6)


def test_when_more_ranks_do_not_pay():
    """Over PCIe a prefill mostly waits for bytes; across nodes a decode step for its messages."""
    prefill = {"n_tokens": 2048, "dtype": "bfloat16"}
    slow = prefill_time(LLAMA, Cluster(Hardware.preset("h100"), "pcie-5"), tp=8, **prefill)
    fast = prefill_time(LLAMA, H100S, tp=8, **prefill)
    assert slow.transfer > slow.compute > fast.transfer
    assert slow.compute == fast.compute
    totals = {tp: decode_time(LLAMA, H100S, tp=tp, **STEP).total for tp in (1, 2, 4, 8, 16, 32, 64)}
    assert totals[1] > totals[2] > totals[4] > totals[8] < totals[16] < totals[32] < totals[64]


def test_large_messages_go_another_way():
    """Over 8 ranks LL is first for a token, Simple for many: it leaves all of the bandwidth."""
    latency, transfer = H100S.ring(8, 16_384, 2)
    assert latency == pytest.approx(15e-6) and transfer == pytest.approx(1.75 * 16_384 / 225e9)
    latency, transfer = H100S.ring(8, 1e9, 2)
    assert latency == pytest.approx(56e-6) and transfer == pytest.approx(1.75e9 / 450e9)
    latency, _ = H100S.ring(16, 16_384, 2)  # each hop costs the network's overhead
    assert latency == pytest.approx((6.6 + 28 * 1.0 + 2 * 2.7) * 1e-6)


def test_products_and_attention_follow_each_other():
    """With many requests the products are limited by arithmetic, attention by memory."""
    config, chip, n = LLAMA, H100S.hardware, 1000
    time = decode_time(config, H100S, tp=1, batch_size=n, context_len=1000, dtype="bfloat16")
    products = 2 * n * matmul_params(config) / chip.peak("bfloat16")
    cache = kv_cache_bytes(config, n, 1000, "bfloat16") / chip.bandwidth
    assert time.total == pytest.approx(products + cache)


def test_stages_make_no_token_faster():
    one = decode_time(LLAMA, H100S, tp=8, **STEP)
    two = decode_time(LLAMA, H100S, tp=8, pp=2, **STEP)
    assert two.compute == one.compute and one.total < two.total < 1.01 * one.total


def test_unknown_links_and_ranks_are_refused():
    with pytest.raises(ValueError, match="no link 'string'; choose one of nvlink-3, "):
        Cluster(Hardware.preset("h100"), "string")
    with pytest.raises(ValueError, match="3 ranks cannot share the 64 query heads"):
        decode_time(LLAMA, H100S, tp=3, **STEP)


def test_after_a_step_that_failed_on_rank_0_alone(monkeypatch):
    """The others are in the middle of it; another step would meet them there."""

    def fails(*_):
        raise MemoryError("no room")

    told = []
    monkeypatch.setattr(serving.dist, "broadcast_object_list", lambda x, *_, **__: told.append(x))
    monkeypatch.setattr("minillm.serving.engine.forward", fails)
    engine = serving.LeadingEngine(lively(), EngineConfig(n_blocks=8), None)
    for _ in range(2):
        engine.submit([1, 2, 3], 4)
    with pytest.raises(MemoryError), engine:
        engine.step()
    engine.submit([1, 2, 3], 4)
    with pytest.raises(RuntimeError, match="failed on this rank alone; start all ranks again"):
        engine.step()
    assert len(told) == 1  # the plan, and no more


@pytest.mark.parametrize("n, size", [(10, 3), (9, 9), (4, 5), (0, 2)])
def test_parts_follow_one_another(n, size):
    parts = [part(n, size, rank) for rank in range(size)]
    assert [i for p in parts for i in p] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_bubble():
    assert bubble_share(4, 1) == 0.75 and bubble_share(4, 12) == 0.2 and bubble_share(1, 5) == 0


def test_which_numbers_of_ranks_fit():
    assert fitting_sizes(ModelConfig.preset("smollm2-135m")) == [1, 3, 9]
    assert fitting_sizes(ModelConfig.preset("llama-2-70b")) == [1, 2, 4, 8, 16, 32, 64]
    assert fitting_sizes(tiny_config(n_heads=12, n_kv_heads=4)) == [1, 2, 4, 12]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3-8b", "llama-2-70b"])
def test_the_ranks_together_hold_everything(name):
    """Each row once, except those of key/value heads that several ranks need."""
    config = ModelConfig.preset(name)
    for size in fitting_sizes(config)[:4]:
        plans = [Plan(config, size, rank) for rank in range(size)]
        copies = max(1, size // config.n_kv_heads)
        for matrix, n in (
            ("gate_up", 2 * config.d_ff),
            ("embed", config.vocab_size),
            ("qkv", (config.n_heads + 2 * config.n_kv_heads) * config.d_head),
        ):
            rows = sorted({i for plan in plans for r in plan.rows(matrix) for i in r})
            assert rows == list(range(n))
        for matrix, n in (("out", config.n_heads * config.d_head), ("down", config.d_ff)):
            assert [i for plan in plans for i in plan.columns(matrix)] == list(range(n))
        kv = sum(len(plan.kv_heads) for plan in plans)
        assert kv == copies * config.n_kv_heads
        groups = config.n_heads // config.n_kv_heads
        for plan in plans:
            assert {h // groups for h in plan.heads} == set(plan.kv_heads)


@pytest.mark.parametrize("N, K, group", [(32, 64, 32), (48, 128, 64), (960, 576, 32)])
def test_the_grid_of_packed_numbers_comes_back(N, K, group):
    matrix = to_int4(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), group)
    found = Int4Linear(matrix).matrix()
    assert torch.equal(found.q, matrix.q)
    assert torch.equal(found.scale, matrix.scale) and torch.equal(found.zero, matrix.zero)


def test_refused_before_any_rank_is_asked(monkeypatch):
    model = lively()
    with pytest.raises(RuntimeError, match="was not started by torchrun; start torchrun"):
        tensor_parallel(model)
    with pytest.raises(RuntimeError, match="was not started by torchrun; start torchrun"):
        pipeline_parallel(model, n_microbatches=1)
    with pytest.raises(ValueError, match="n_microbatches is 0"):
        pipeline_parallel(model, n_microbatches=0)
    with pytest.raises(ValueError, match="dtype is 'int8', but shards are read in float32"):
        load_pipeline(dtype="int8", n_microbatches=1)
    graphs = EngineConfig(n_blocks=8, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs is for one rank"):
        shared_engine(model, graphs)
    medusa = EngineConfig(n_blocks=8, drafter=MedusaDrafter(lively_heads(2)))
    with pytest.raises(ValueError, match="A MedusaDrafter multiplies with the target's own head"):
        shared_engine(model, medusa)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ValueError, match=r"3 ranks cannot share the 4 query heads and 2 .* start 1 or"
    ):
        tensor_parallel(model)
    with pytest.raises(ValueError, match="3 ranks cannot share 2 layers; start at most 2"):
        pipeline_parallel(model, n_microbatches=1)
    with pytest.raises(ValueError, match="3 ranks cannot be cut into stages of 2"):
        pipeline_parallel(model, n_microbatches=1, tp=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    wide = quantize(lively(d_model=64, d_ff=320, d_head=32), "int4", group_size=64)
    with pytest.raises(ValueError, match=r"down has groups of 64 numbers, which 2 ranks would cut"):
        tensor_parallel(wide)
    pruned = sparsify(lively(d_model=32, d_ff=64, d_head=16))
    with pytest.raises(ValueError, match=r"is a SparseLinear, which cannot be cut over ranks"):
        tensor_parallel(pruned)


def summed(by):
    dist.init_process_group("gloo")  # noqa: F821, imported on the ranks
    number = torch.tensor([by * (dist.get_rank() + 1)])  # noqa: F821
    dist.all_reduce(number)  # noqa: F821
    return {"rank": dist.get_rank(), "sum": shifted(int(number))}  # noqa: F821


def shifted(x):
    assert x < 1000, f"{x} is too much"
    return x + 1


@pytest.mark.slow
def test_functions_on_ranks():
    assert on_ranks(2, summed, shifted, by=10) == [{"rank": rank, "sum": 31} for rank in (0, 1)]
    with pytest.raises(RuntimeError, match="AssertionError: 3000 is too much"):
        on_ranks(2, summed, shifted, by=1000)
