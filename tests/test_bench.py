"""Every benchmark's measured functions on a tiny model, so that none rots unseen."""

import copy
import importlib.util
import json
import math
from functools import partial

import pytest
import torch
from models import lively, tiny_config

from minillm import Decoder, EngineConfig, quantize, sparsify, weights
from minillm.__main__ import main
from minillm.bench import (
    BENCHMARKS,
    attention,
    decode,
    distill,
    load,
    models,
    peers,
    prefill,
    quality,
    serve,
    serve_gpu,
    speculate,
)
from minillm.bench import quantize as bench_quantize
from minillm.bench import recording as recording_module
from minillm.bench.recording import Recording, record_of
from minillm.bench.tables import results_table
from minillm.distillation.teacher_text import Conversation
from minillm.measure import alternate
from minillm.speculation.drafters import ModelDrafter, NgramDrafter
from minillm.tools.folders import data_folder
from minillm.weights.build import parameter_sources

CPU = torch.device("cpu")
REPEATS = {"repeats": 1}
IN_GROUPS = {"d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_head": 64, "d_ff": 128}
"""Sizes of a tiny model whose rows are a few groups of 32."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Bounds that cost nothing: this is about the code, not about this machine."""
    for module in (decode, serve_gpu, attention, bench_quantize):
        monkeypatch.setattr(module, "read_bandwidth", lambda *_: 1e13)
    for module in (prefill, attention):
        monkeypatch.setattr(module, "matmul_peak", lambda *_: 1e14)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(tiny_config()).eval().requires_grad_(False)


@pytest.fixture
def recording(tmp_path) -> Recording:
    return Recording("smoke", CPU, {"model": "tiny"}, tmp_path)


def rows(recording: Recording) -> list[dict]:
    """What the file holds."""
    document = json.loads(recording.path.read_text())
    assert document["hardware"]["label"].startswith("cpu-") and document["versions"]["torch"]
    for row in document["rows"]:
        # Differences of a few microseconds may come out below 0.
        assert math.isfinite(row["value"]) and row["what"] and row["unit"]
        assert all(math.isfinite(ratio) for ratio in row.get("against", {}).values())
    return document["rows"]


def test_decode(recording, model):
    decode.measure_decode(recording, model, [1, 2, 3], 4, **REPEATS)
    plain, prepacked = rows(recording)
    assert prepacked["what"] == plain["what"] + ", prepacked"
    for row in (plain, prepacked):
        assert row["against"].keys() == {"transformers"} and math.isfinite(row["of_bound"])


def test_prefill(recording, model):
    prefill.measure_prefill(recording, model, 16, **REPEATS)
    plain, prepacked = rows(recording)
    assert prepacked["what"] == plain["what"] + ", prepacked"
    assert plain["against"].keys() == prepacked["against"].keys() == {"transformers"}


def test_quantize(recording, monkeypatch):
    """Some forms of a tiny model, and how fast they are."""
    monkeypatch.setattr(bench_quantize, "llama_cpp_decode_seconds", lambda *_: 1e-3)
    model = Decoder(tiny_config(**IN_GROUPS)).eval().requires_grad_(False)
    forms = {"float32": model, "int8": quantize(model, "int8"), "2:4": sparsify(model)}
    bench_quantize.measure_speed(recording, forms, [1, 2], n=2, prompt_tokens=8, **REPEATS)
    assert [row["what"] for row in rows(recording)] == [
        f"{kind}, {name}" for kind in ("decode", "prefill of 8 tokens") for name in forms
    ]


def test_quality(recording):
    """Every form of a tiny model, its quality and its cache, and of the same one renumbered."""
    model = Decoder(tiny_config(n_layers=1, **IN_GROUPS)).eval().requires_grad_(False)
    known = list(torch.arange(80).view(2, 1, 40))
    texts = {"one": list(range(60)), "two": list(range(30, 90))}
    forms = quality.forms(model, known, known[:1])
    quality.measure_quality(recording, model, forms, texts)
    shifted = quality.four_bits(quality.renumbered(model, 16), known, "{}, shifted")
    quality.measure_quality(recording, model, shifted, texts)
    quality.measure_caches(recording, model, texts["one"])
    document = json.loads(recording.path.read_text())
    found = document["quality"]
    assert found.keys() == {*forms, *shifted} and len(document["caches"]) == 4
    assert found["float32"]["kl"] == pytest.approx(0, abs=1e-6)
    assert found["float32, shifted"]["kl"] == pytest.approx(0, abs=1e-6)
    assert found["int4"]["bytes"] < found["int8"]["bytes"] < found["float32"]["bytes"]
    assert found["3 bits"]["perplexity"].keys() == texts.keys()


def test_kinds_of_distillation(recording):
    """Every kind on a tiny teacher, at equal compute, for two seeds."""
    teacher = lively(n_layers=3)
    pool = distill.rows_of(torch.randint(0, 97, (10 * distill.ROW + 5,)).tolist())
    exam = [Conversation([1, 2, 3], [4, 5, 6, 7]), Conversation([5], [6, 7])]
    size = distill.Size(layers=2, steps=3, seeds=2)
    distill.measure_kinds(recording, teacher, {"person": pool, "teacher": pool}, exam, size)
    document = json.loads(recording.path.read_text())
    kinds = document["kinds"]
    assert kinds.keys() == distill.KINDS.keys()
    soft, text = (distill.step_flops(teacher.config, 2, soft=soft) for soft in (True, False))
    for name, (_, options) in distill.KINDS.items():
        of_one = text if options["text_weight"] == 1 else soft
        assert kinds[name]["steps"] == round(3 * soft / of_one)
        assert len(kinds[name]["kl"]) == len(kinds[name]["agreement"]) == 2
    assert document["untrained"]["kl"] > 0
    # The same rows and seeds, and another loss.
    assert kinds["a person's text, soft targets"] == kinds["the teacher's text, soft targets"]
    with_states = kinds["the teacher's text, soft targets, states"]
    assert with_states["kl"] != kinds["the teacher's text, soft targets"]["kl"]


def test_recorded_kinds_are_complete():
    """Lesson 11 compares these kinds by three students each."""
    for path in data_folder().glob("distill.*.json"):
        document = json.loads(path.read_text())
        kinds, untrained = document["kinds"], document["untrained"]["kl"]
        assert kinds.keys() == distill.KINDS.keys()
        for kind in kinds.values():
            assert len(kind["kl"]) == len(kind["agreement"]) == document["settings"]["seeds"] >= 3
            assert max(kind["kl"]) < untrained


def test_drawn_rows():
    """All of them before one comes again, and other ones for each seed."""
    rows = torch.arange(5 * distill.ROW).view(5, 1, distill.ROW)
    first, other = (distill.drawn(rows, 8, seed) for seed in (0, 1))
    assert len(first) == 8 and len({int(row[0, 0]) for row in first[:5]}) == 5
    assert [int(row[0, 0]) for row in first] != [int(row[0, 0]) for row in other]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "qkv_bias": True}])
def test_renumbered_channels_are_the_same_function(changes):
    """With other weights in each group of 32: half of the group's own, half of its neighbour's."""
    model = lively(**IN_GROUPS, **changes)
    other = quality.renumbered(model, 16)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(other(tokens), model(tokens), atol=1e-4, rtol=1e-4)
    for name in ("qkv", "out", "gate_up", "down"):
        ours = getattr(model.layers[0], name).weight[-1, :32]
        theirs = [set(row[:32].tolist()) for row in getattr(other.layers[0], name).weight]
        assert set(ours.tolist()) not in theirs


def test_attention(recording):
    kinds = attention.attention_peers(CPU)
    cases = [(8, 16, True), (8, 16, False)]
    attention.measure_attention(recording, kinds, cases, cases[:1], **REPEATS)
    attention.measure_decode_attention(recording, "sdpa", length=64, n_caches=2, **REPEATS)
    assert [row["what"].split(" (")[0] for row in rows(recording)] == [
        "attention forward", "attention backward", "decode attention",
    ]  # fmt: skip


def test_serve(recording, model):
    prompts, answers = [[1, 2, 3], [4, 5], [6]], {"of many lengths": [3, 1, 2]}
    forms = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
    serve.measure_requests(recording, model, forms, prompts, answers, llama_cpp=False, **REPEATS)
    serve.measure_paging_waste(recording, n_requests=8, **REPEATS)
    serve.measure_prefix(recording, model, n=64, **REPEATS)
    serve.measure_overhead(recording, model, n=3, n_new=2, **REPEATS)
    assert rows(recording)[0]["against"].keys() == {"one at a time", "transformers"}
    assert rows(recording)[1]["against"].keys() == {"float32"}
    assert len(rows(recording)) == 6


def test_speculate(recording, model, monkeypatch):
    """Each way of guessing once, alone and in the engine, against the table of passes."""
    for name, value in {"N_NEW": 4, "KS": (1,), "REPEATS": 1, "ROWS": (1, 2, 4)}.items():
        monkeypatch.setattr(speculate, name, value)
    table = {name: speculate.pass_milliseconds(model) for name in ("float32", "student")}
    recording.document["milliseconds a pass"] = table
    assert all(list(row) == [1, 2, 4] and min(row.values()) > 0 for row in table.values())
    drafters = {"student": ModelDrafter(model), "n-grams": NgramDrafter()}
    prompts = [[1, 2, 3, 1, 2], [4, 5]]
    speculate.measure_text(recording, "text", prompts, "float32", model, drafters, None)
    case = recording.document["cases"]["text, student, k = 1"]
    # The target drafts for itself: every guess is kept, so a pass yields two tokens.
    assert case["tokens per pass"] == 2 and case["alpha"] > 0.999 and case["predicted"] > 0
    speculate.measure_engine(recording, prompts, model, drafters)
    assert len(rows(recording)) == 2 + 3 * 3


def test_serve_on_a_gpu_but_for_the_gpu(recording, model):
    """Its functions run on a CPU as well, without graphs and the peer."""
    serve_gpu.measure_one_user(recording, model, cuda_graphs=False, n=4, **REPEATS)
    config = EngineConfig(n_blocks=64, max_seqs=4)
    serve_gpu.measure_many(recording, model, config, 3, scale=0.01, **REPEATS)
    serve_gpu.measure_layouts(recording, n=2, length=64, **REPEATS)
    assert len(rows(recording)) == 3
    both = serve_gpu.paged_and_contiguous(CPU, 2, 64)
    torch.testing.assert_close(both["paged"](), both["contiguous"](), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_load(recording, default):
    load.measure_load(recording, load.fetch_default(), **REPEATS)
    assert [row["unit"] for row in rows(recording)] == ["s", "×"]


@pytest.mark.slow
def test_llama_cpp(default):
    assert peers.llama_cpp_seconds([[1, 2, 3], [4]], [2, 3], 1) > 0


def test_load_test_prints_the_table(model, monkeypatch, capsys):
    monkeypatch.setattr(serve, "default_model", lambda *_: (model, []))
    monkeypatch.setattr(serve, "azure_load", partial(serve.azure_load, scale=0.001))
    scaled = serve.azure_load.func
    monkeypatch.setattr(
        serve, "azure_load", lambda *a, scale, seed: scaled(*a, scale=0.01, seed=seed)
    )
    serve.load_test(CPU, 1e6, 3)
    assert "p99 TTFT (ms)" in capsys.readouterr().out


def test_on_a_gpu_no_checkpoint_is_needed(monkeypatch):
    """Weights are random and prompts are bytes: nothing is fetched."""
    monkeypatch.setattr(models, "random_model", lambda preset, device: (preset, device))
    monkeypatch.setattr(weights, "load", None)
    gpu = torch.device("cuda")
    model, prompts = models.default_model(gpu, ["ab", "c"])
    assert model == ("smollm2-135m", gpu) and prompts == [[97, 98], [99]]


def test_random_weights_have_the_published_shapes():
    model = models.random_model("smollm2-135m", torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32


# Recording


def test_a_missing_peer_is_a_gap(recording, model, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    decode.measure_decode(recording, model, [1, 2, 3], 2, **REPEATS)
    row, _ = rows(recording)
    assert row["against"] == {} and row["gaps"] == {"transformers": "transformers is not installed"}
    recording.path.rename(recording.path.with_name("decode.cpu.json"))
    assert "| transformers: transformers is not installed |" in results_table(recording.path.parent)


def test_a_peer_that_fails_is_a_gap(recording):
    """The others are measured, and the reason is one line."""

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this\nand a long trace")

    peers = attention.attention_peers(CPU)
    attention.measure_attention(
        recording, peers | {"broken": broken}, [(16, 32, True)], [(16, 32, True)], **REPEATS
    )
    forward, backward = rows(recording)
    assert forward["gaps"] == {"broken at D 16, N 32": "no kernel for this"}
    assert "broken" not in forward["against"] and "reference" in backward["against"]


def test_more_than_the_bound_is_not_recorded(recording):
    recording.add({"what": "w", "value": 1.0, "unit": "s", "of_bound": 1.0}, {})
    with pytest.raises(RuntimeError, match=r"w: 104\.0% of the bound is impossible"):
        recording.add({"what": "w", "value": 1.0, "unit": "s", "of_bound": 1.04}, {"b": [1.0]})
    document = json.loads(recording.path.read_text())
    assert len(document["rows"]) == 1 and "b" not in document["repeats"]


def test_an_uninstalled_package_has_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "PACKAGES", ("torch", "no-such-package"))
    document = Recording("x", CPU, {}, tmp_path).document
    assert document["versions"]["no-such-package"] is None and document["versions"]["torch"]


def test_parts_are_written_at_once(recording):
    recording.add(None, {"a": [1.0]})
    assert json.loads(recording.path.read_text())["repeats"] == {"a": [1.0]}
    recording.add({"what": "w", "value": 2.0, "unit": "s"}, {"b": [2.0]})
    document = json.loads(recording.path.read_text())
    assert document["repeats"] == {"a": [1.0], "b": [2.0]} and len(document["rows"]) == 1


def test_a_record_is_found(tmp_path):
    """The newest, of a CPU."""
    dates = {"cpu-2-threads": "2026-11-01", "cpu-8-threads": "2027-01-02", "nvidia-h200": "2027-02"}
    for label, date in dates.items():
        (tmp_path / f"load.{label}.json").write_text(json.dumps({"date": date}))
    assert record_of("load", tmp_path) == {"date": "2027-01-02"}
    with pytest.raises(FileNotFoundError, match=r"record of the benchmark serve.*bench serve"):
        record_of("serve", tmp_path)


def test_peers_take_turns():
    order = []
    fns = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    repeats = alternate(fns, 3)
    assert "".join(order) == "cba" + "abc" + "cba" + "abc" + "cba"
    assert repeats["b"] == [8.0, 11.0, 14.0]


def test_the_peer_has_the_same_weights(model):
    """So the comparison is a fair one."""
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        ours, theirs = model(tokens), peers.transformers_twin(model)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert parameter_sources(model.config)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_name_has_a_benchmark(name):
    assert callable(importlib.import_module(f"minillm.bench.{name}").bench)


@pytest.mark.parametrize("extra", [[], ["--device", "cpu"]], ids=str)
def test_an_unknown_name_is_one_sentence(extra, capsys):
    assert main(["bench", "nothing", *extra]) == 2
    said = "minillm: There is no benchmark 'nothing'; choose from decode, prefill, attention,"
    assert capsys.readouterr().err.startswith(said)
