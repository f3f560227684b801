"""A check of each part against the package.

A check takes the module of the kept file and raises AssertionError with one sentence where the
part differs from the package on random cases. The lessons' own checks say more about the slip.
"""

import os
import random
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from minillm import costs
from minillm.blocks import BlockManager, BlockTable, OutOfBlocks
from minillm.cache import NoCache
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.hardware import Hardware
from minillm.kv_cache import KVCache
from minillm.layers.attention import attention
from minillm.model import Decoder
from minillm.quantization.sparsity import compress, mask_2_4
from minillm.serving.metrics import summarize
from minillm.serving.request import Completion, Request
from minillm.serving.scheduler import Scheduler
from minillm.serving.virtual_time import VirtualEngine
from minillm.serving.workload import TimedRequest
from minillm.speculation.drafters import NgramDrafter


@dataclass(frozen=True)
class Item:
    """A request as `plan_step` of lesson 07 sees it, in numbers of tokens."""

    name: int
    prompt: int
    produced: int
    done: int  # of its tokens, how many are in the cache

    @property
    def pending(self) -> int:
        return self.prompt + self.produced - self.done

    @property
    def decoding(self) -> bool:
        return self.produced > 0 and self.pending == 1


def tiny_model(seed: int = 0) -> Decoder:
    """A random model whose every position and head shows in its logits."""
    torch.manual_seed(seed)
    config = ModelConfig(2, 24, 4, 2, 8, 40, 97, 256, tie_embeddings=True)
    model = Decoder(config).eval().requires_grad_(False)
    for p in model.parameters():
        p += 0.2 * torch.randn_like(p)
    return model


def greedy_loop(mine: ModuleType) -> None:
    """The tokens of `generate`, and the end at a stop token."""
    model = tiny_model()
    for prompt in ([5, 17, 3], [9]):
        theirs = generate(model, prompt, 12)
        found = mine.answer_greedily(model, prompt, 12, KVCache(model, 1, 32))
        assert found == theirs, f"After {prompt} come {theirs}, and not {found}."
        found = mine.answer_greedily(model, prompt, 12, KVCache(model, 1, 32), {theirs[2]})
        assert found == theirs[: theirs.index(theirs[2]) + 1], "It does not end at a stop token."


def decoder(mine: ModuleType) -> None:
    """The package's logits, without a cache and with one."""
    model, tokens = tiny_model(), torch.randint(97, (2, 9))
    weights = dict(model.named_parameters())
    for cache in (NoCache, lambda: KVCache(model, 2, 16)):
        ours, yours = cache(), cache()
        for part in tokens.split((6, 1, 2), 1) if cache is not NoCache else (tokens,):
            found = mine.my_decoder(weights, model.config, part, yours)
            assert torch.allclose(found, model(part, ours), atol=1e-4), (
                f"The logits of {part.shape[1]} tokens differ from the package's."
            )


def predictor(mine: ModuleType) -> None:
    """The slower of reading and arithmetic, for small and large models and batches."""
    for chip, dtype in ((Hardware.preset("h100"), "bfloat16"), (Hardware.preset("t4"), "float16")):
        for name in ("llama-3-8b", "llama-2-70b"):
            config = ModelConfig.preset(name)
            for batch, context in ((1, 5000), (1000, 50)):
                reading = costs.decode_bytes(config, batch, context, dtype) / chip.bandwidth
                arithmetic = batch * costs.decode_flops(config, context) / chip.peak(dtype)
                right = max(reading, arithmetic)
                found = mine.step_seconds(config, chip, batch, context, dtype)
                assert abs(found / right - 1) < 2e-3, (
                    f"A step of {name} for {batch} users takes {right:.5g} s, not {found:.5g}."
                )


def cache(mine: ModuleType) -> None:
    """The logits of the whole text, when it comes in parts."""
    model, tokens = tiny_model(), torch.randint(97, (1, 9))
    cache, right = mine.MyCache(model), model(tokens)
    found = torch.cat([model(part, cache) for part in tokens.split((4, 1, 1, 3), 1)], 1)
    assert torch.allclose(found, right, atol=1e-4), "With the cache the logits are others."


def grouped_attention(mine: ModuleType) -> None:
    """The package's attention for several K, T and S."""
    for K, T, S in ((6, 1, 9), (3, 4, 9), (2, 5, 5), (1, 1, 7)):
        q, k, v = torch.randn(2, T, 6, 8), torch.randn(2, S, K, 8), torch.randn(2, S, K, 8)
        same = torch.allclose(mine.grouped(q, k, v), attention(q, k, v), atol=1e-5)
        assert same, f"Other numbers than the package's for K = {K}, T = {T}, S = {S}."


def kernel(mine: ModuleType) -> None:
    """Two sequences of four heads on two, with the causal mask."""
    q, k, v = torch.randn(2, 20, 4, 16), torch.randn(2, 37, 2, 16), torch.randn(2, 37, 2, 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.to(device) for x in (q, k, v))
    out = torch.full_like(q, torch.nan)
    grid = (2 * 4 * 2,)  # two tiles of 16 queries, four heads, two sequences
    mine.heads[grid](q, k, v, out, 20, 37, 4, 2, 0.25, CAUSAL=True, D=16, BLOCK=16, SHOW=False)
    expected = attention(q, k, v, backend="reference")
    assert torch.allclose(out, expected, atol=1e-3), "Other numbers than the package's attention."


def allocator(mine: ModuleType) -> None:
    """2,000 events of sequences that grow, fork and leave, beside a `BlockManager`."""
    dice, pool, package = random.Random(1), mine.CountingPool(9), BlockManager(9, 4)
    live: list[tuple[list[int], BlockTable]] = []
    for _ in range(2000):
        kind = dice.choice(("start", "fork", "leave", *["write"] * 6)) if live else "start"
        table, theirs = dice.choice(live) if live else ([], BlockTable())
        if kind == "start":
            live.append(([], BlockTable()))
        elif kind == "fork":
            live.append(([*table], package.fork(theirs)))
            for block in table:
                pool.share(block)
        elif kind == "leave" or len(live) > 6 or not package.n_available:
            live = [each for each in live if each[0] is not table]  # forks may be equal
            for block in table:
                pool.free(block)
            package.release(theirs)
        else:
            copy = mine.room_for_next(pool, table, theirs.n_tokens, 4)
            assert bool(copy) == bool(package.reserve(theirs, 1)), "A copy too many, or too few."
            slot = mine.slots_of(table, theirs.n_tokens, 1, 4)
            at, inside = divmod(theirs.n_tokens, 4)
            assert slot == [table[at] * 4 + inside], "slots_of names another slot."
            theirs.n_tokens += 1
        assert pool.n_free() == package.n_available, f"After {kind}: other free blocks."
    full = mine.CountingPool(1)
    full.allocate()
    try:
        full.allocate()
    except OutOfBlocks:
        return
    raise AssertionError("allocate must raise OutOfBlocks when no block is free.")


def items_of(requests: list[Request]) -> list[Item]:
    """Requests of a scheduler as `plan_step` takes them."""
    return [Item(r.id, r.n_prompt, r.n_produced, r.table.n_tokens) for r in requests]


def scheduler(mine: ModuleType) -> None:
    """The plans of the package's `Scheduler` in every step of 40 traces."""
    for seed in range(40):
        dice = random.Random(seed)
        manager = BlockManager(dice.randint(13, 30), 4, prefix_caching=False)
        theirs = Scheduler(manager, max_seqs=5, max_batch_tokens=dice.randint(5, 25))
        for i in range(10):
            theirs.submit(Request(i, [0] * dice.randint(1, 30), dice.randint(1, 20)))
        while theirs.running or theirs.waiting:
            before = list(theirs.running)
            state = items_of(before), items_of(theirs.waiting)
            limits = 5, theirs.max_batch_tokens, manager.n_available, 4
            found, plan = mine.plan_step(*state, *limits), theirs.schedule()
            sent_back = [r.id for r in reversed(before) if r not in theirs.running]
            right = {work.request.id: len(work.tokens) for work in plan.work}, sent_back
            assert found == right, f"For {state} the plan is {right}, and not {found}."
            for work in plan.work:
                work.request.table.n_tokens += len(work.tokens)
                if not work.request.n_pending:
                    work.request.accept([0], 0.0)
                if work.request.reached:
                    theirs.finish(work.request)


def metrics(mine: ModuleType) -> None:
    """The percentiles of `summarize`."""
    dice = random.Random(2)
    requests, completions = [], []
    for n in (1, 1, *(dice.randint(2, 30) for _ in range(40))):
        times = sorted(dice.uniform(0.1, 9) for _ in range(n))
        requests.append((1.5, [1.5 + t for t in times]))
        completions.append(Completion(0, 5, [1] * n, "length", 1.5, times, times[-1]))
    found, s = mine.stamps_to_metrics(requests), summarize(completions)
    for name, values in (("ttft", s.ttft), ("tpot", s.tpot), ("itl", s.inter_token)):
        expected = values[1], values[3]
        close = all(abs(a - b) < 1e-9 for a, b in zip(found[name], expected, strict=True))
        assert close, f"{name} is {found[name]}, and not {expected}."
    assert abs(found["longest"] - s.longest_pause) < 1e-9, "The longest gap is another one."


def admission(mine: ModuleType) -> None:
    """An idle engine takes a request, and a crowded one does not."""
    config, chip = ModelConfig.preset("llama-3-8b"), Hardware.preset("h100")
    engine = VirtualEngine(config, chip, max_seqs=4, max_batch_tokens=512)
    request = TimedRequest(0.0, [0] * 500, 50)
    assert mine.admit(engine, request), "Nobody runs or waits, and a request is refused."
    for _ in range(200):
        engine.submit([0] * 2000, 200)
    assert not mine.admit(engine, request), "200 long requests wait, and one more is let in."


def packer(mine: ModuleType) -> None:
    """Two numbers a byte, at most half a step away, and the product with them."""
    for n_out, n_in, group in ((3, 32, 32), (8, 256, 64)):
        w, x = torch.randn(n_out, n_in), torch.randn(4, n_in)
        packed, scale, zero = mine.store(w, group)
        assert packed.shape == (n_out, n_in // 2), "Two numbers go into each byte."
        q = torch.stack((packed & 15, packed >> 4), -1).flatten(1).float() - 8
        stored = (q.unflatten(1, (-1, group)) * scale[..., None] + zero[..., None]).flatten(1)
        assert ((stored - w).abs() <= scale.amax() / 2 + 1e-4).all(), "Numbers move too far."
        found = mine.multiply(x, packed, scale, zero)
        assert torch.allclose(found, x @ stored.T, atol=1e-3), "The product is another one."


def sparsity(mine: ModuleType) -> None:
    """Wanda's choice, the bytes of `compress`, and the product."""
    w, x = torch.randn(5, 64), torch.randn(20, 64) * torch.logspace(-1, 1, 64)
    mask = mine.wanda_mask(w, x)
    right = mask_2_4(w.abs() * torch.linalg.vector_norm(x, dim=0))
    assert torch.equal(mask, right), "Other weights are chosen than by |w| times the norm of x."
    places = mask.view(-1, 4).nonzero()[:, 1].view(5, -1)
    packed = mine.pack_places(places)
    assert torch.equal(packed, compress(w, mask).indices), "The bytes of places are others."
    found = mine.sparse_product(x[0], w[mask].view(5, -1), packed)
    assert torch.allclose(found, (w * mask) @ x[0], atol=1e-4), "The product is another one."


def loss(mine: ModuleType) -> None:
    """Equation and mask on random logits."""
    student, teacher = torch.randn(6, 11), torch.randn(6, 11)
    targets, counted = torch.randint(11, (6,)), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    q, p = (x[counted].div(2).log_softmax(-1) for x in (student, teacher))
    soft = 4 * F.kl_div(q, p, log_target=True, reduction="batchmean")
    right = 0.3 * F.cross_entropy(student[counted], targets[counted]) + 0.7 * soft
    found = mine.masked_loss(student, teacher, targets, counted, 0.3, 2.0)
    assert torch.allclose(found, right, atol=1e-5), f"The loss is {right:.4f}, not {found:.4f}."


def accept_rule(mine: ModuleType) -> None:
    """What comes out is distributed as p."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    grid = [(i + 0.5) / 100 for i in range(100)]
    share = [0.0] * 3
    for x in range(3):
        for u in grid:
            for w in grid[::10]:
                share[mine.accept(x, p, q, u, w)] += q[x] / 1000
    off = max(abs(a - b) for a, b in zip(share, p, strict=True))
    assert off < 0.02, f"Out comes {[round(s, 2) for s in share]}, and not p = {p}."


def drafter(mine: ModuleType) -> None:
    """The guesses of an `NgramDrafter`."""
    for seed in range(100):
        ids, n = random.Random(seed).choices(range(3), k=30), 1 + seed % 3
        right = NgramDrafter(n, n).start(None, 64, None).propose(ids, 3, []).tokens
        found = mine.look_up(ids, n, 3)
        assert found == right, f"After {ids} come {right}, and not {found}."


def parallel_linears(mine: ModuleType) -> None:
    """Two linears on one, two and three ranks give the sum of one."""
    x, first = torch.randn(2, 5, 4), (torch.randn(12, 4), torch.randn(12))
    second = torch.randn(7, 12), torch.randn(7)
    right = F.linear(F.linear(x, *first).relu(), *second)
    for size in (1, 2, 3):
        hidden = [mine.column_linear(x, *first, rank, size).relu() for rank in range(size)]
        parts: list[torch.Tensor] = []

        def collect(y: torch.Tensor, parts: list[torch.Tensor] = parts) -> torch.Tensor:
            parts.append(y)
            return y

        for rank in range(size):
            mine.row_linear(hidden[rank], *second, rank, size, collect)
        total = sum(parts)
        found = mine.row_linear(hidden[0], *second, 0, size, lambda _, total=total: total)
        assert torch.allclose(found, right, atol=1e-4), f"On {size} ranks the sum is another one."


def let_kernels_run() -> None:
    """Triton's interpreter where there is no GPU; before the first kernel is loaded."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
