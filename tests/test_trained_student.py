"""The packaged student and heads: stored and read back, and what their records say of them."""

import importlib
import json

import pytest
import torch
from models import lively
from safetensors.torch import load_file, save_file

from minillm import generate, load_student, make_student, prepack, quantize
from minillm.distillation.__main__ import drafts, try_student
from minillm.distillation.student import PACKAGED, save_student
from minillm.distillation.teacher_text import Conversation
from minillm.evaluate import difference
from minillm.quantization.grid import to_int8
from minillm.quantization.linear import Int8Linear
from minillm.speculation.medusa import MedusaDrafter
from minillm.speculation.medusa_heads import PACKAGED_HEADS, load_heads

SIZES = {"d_model": 64, "d_head": 16, "d_ff": 64, "n_layers": 4}


def taught(**changes: object):
    """A teacher and a student of two layers that differs from it."""
    teacher = lively(**(SIZES | changes))
    student = make_student(teacher, 2)
    for p in student.layers.parameters():
        p += 0.05 * torch.randn_like(p)
    return teacher, student


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": False}, {"qkv_bias": True, "attn_out_bias": True}, {"qk_norm": True}],
    ids=str,
)
def test_what_is_saved_is_loaded(tmp_path, changes):
    """Matrices on their int8 grid, the rest in bfloat16, the embedding shared."""
    teacher, student = taught(**changes)
    path = tmp_path / "student.safetensors"
    save_student(student, path)
    loaded = load_student(teacher, path=path)
    assert loaded.embed is teacher.embed and loaded.head is teacher.head
    assert loaded.config == student.config and loaded.dtype == torch.float32
    for name, p in loaded.named_parameters():
        mine = student.get_parameter(name)
        if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight")):
            expected = to_int8(mine).dequantized()
        elif name.startswith(("embed", "head")):
            expected = mine
        else:
            expected = mine.bfloat16().float()
        assert torch.equal(p, expected), name
    assert len(generate(loaded, [1, 2, 3], 5)) == 5
    numbers = sum(p.numel() for p in student.layers.parameters())
    assert path.stat().st_size < 1.3 * numbers + 4000


def test_beside_a_quantized_teacher_the_numbers_stay_as_they_are(tmp_path):
    teacher, student = taught()
    path = tmp_path / "student.safetensors"
    save_student(student, path)
    few_bits = quantize(teacher, "int8")
    loaded = load_student(few_bits, path=path)
    assert loaded.embed is few_bits.embed and loaded.dtype == torch.bfloat16
    stored = load_file(path)
    assert type(loaded.layers[1].down) is Int8Linear
    assert torch.equal(loaded.layers[1].down.weight, stored["layers.1.down.weight"])
    plain = quantize(load_student(teacher, path=path), "int8")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(loaded(tokens).float(), plain(tokens).float(), atol=0.1, rtol=0.05)


def test_chosen_layers():
    teacher = lively(**SIZES)
    student = make_student(teacher, 2, chosen=[0, 3])
    for mine, i in zip(student.layers, (0, 3), strict=True):
        assert torch.equal(mine.down.weight, teacher.layers[i].down.weight)
    for chosen in ([0], [0, 4], [0, -1], [0, 1.0]):
        with pytest.raises(ValueError, match="give 2 numbers of layers, from 0 to 3"):
            make_student(teacher, 2, chosen=chosen)


def test_files_of_something_else(tmp_path):
    teacher, student = taught()
    path = tmp_path / "student.safetensors"
    with pytest.raises(FileNotFoundError, match="does not exist; train a student with python -m"):
        load_student(teacher, path=path)
    path.write_bytes(b"{" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        load_student(teacher, path=path)
    save_student(student, path)
    with pytest.raises(ValueError, match="was made for another model than"):
        load_student(lively(), path=path)
    tensors = load_file(path)
    for change in (
        {"layers.0.qkv.weight": tensors["layers.0.qkv.weight"][:-1]},
        {"layers.7.attn_norm": tensors["norm"].clone()},
        {"more": tensors["norm"].clone()},
    ):
        save_file(tensors | change, path)
        with pytest.raises(ValueError, match="was made for another model than"):
            load_student(teacher, path=path)


def test_the_command(tmp_path, monkeypatch, capsys):
    """Text, training, file and record, on a tiny teacher; the second run has nothing to do."""
    from test_teacher_text import Words

    class Brief(Words):
        stop_ids = tuple(range(3, 97, 8))  # so that most turns end early

    teacher = lively(**SIZES)

    def tiny(**_):
        return teacher, Brief()

    module = importlib.import_module("minillm.distillation.__main__")
    monkeypatch.setattr(module, "load", tiny)
    monkeypatch.setattr(module, "conversations", short_conversations)
    arguments = ["--layers", "2", "--conversations", "48", "--steps", "3",
                 "--folder", str(tmp_path)]  # fmt: skip
    for _ in range(2):
        assert module.main(arguments) == 0
        record = json.loads((tmp_path / "student.json").read_text())
        assert len(record["loss"]) == 3 and record["settings"]["layers"] == 2
        assert record["after"]["kl"] > 0 and len(record["tried"]) > 0
    student = load_student(teacher, path=tmp_path / "student.safetensors")
    prompt, answer = record["tried"][0]
    assert difference(student, teacher, prompt + answer, first=len(prompt)).kl > 0
    assert "tokens of text" in capsys.readouterr().out
    heads = ["--heads", "2", "--conversations", "48", "--steps", "3", "--folder", str(tmp_path)]
    assert module.main(heads) == 0
    record = json.loads((tmp_path / "medusa.json").read_text())
    assert len(record["loss"]) == 3 and record["settings"]["heads"] == 2
    trained = load_heads(tmp_path / "medusa.safetensors")
    assert trained.weight.shape == (2, 64, 64) and bool(trained.weight.any())


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--layers", "5", "--layers is 5; custom has 4, so give at most 4."),
        ("--layers", "0", "--layers is 0; it must be a whole number, 1 or more."),
        ("--heads", "-1", "--heads is -1; it must be a whole number, 0 or more."),
        ("--steps", "0", "--steps is 0; it must be a whole number, 1 or more."),
        ("--conversations", "0", "--conversations is 0; it must be a whole number, 1 or more."),
        ("--conversations", "1", "--conversations 1 gave less text than one step learns from"),
        ("--lr", "nan", "--lr is nan; it must be a positive number."),
    ],
)
def test_bad_options_are_one_sentence(option, value, words, tmp_path, monkeypatch, capsys):
    from test_teacher_text import Words

    module = importlib.import_module("minillm.distillation.__main__")
    monkeypatch.setattr(module, "load", lambda **_: (lively(**SIZES), Words()))
    monkeypatch.setattr(module, "conversations", lambda *_, **__: [])
    monkeypatch.setattr(module, "continued_code", lambda *_, **__: [])
    assert module.main([option, value, "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def short_conversations(teacher, tokenizer, n, **options):
    from minillm.distillation.teacher_text import conversations

    return conversations(teacher, tokenizer, n, question=40, answer=30, **options)


def test_the_packaged_student_is_as_its_record_says(default):
    """KL, agreement and accepted guesses, computed again on conversations it was not trained on."""
    record = json.loads(PACKAGED.with_suffix(".json").read_text())
    teacher, student = prepack(default[0]), prepack(load_student(default[0]))
    tried = [Conversation(*pair) for pair in record["tried"]]
    found = try_student(student, teacher, tried[:6], n_drafted=1)
    each = record["after"]["each"]
    for (kl, agreement), (its_kl, its_agreement) in zip(found["each"], each, strict=False):
        assert kl == pytest.approx(its_kl, rel=0.01)
        assert agreement == pytest.approx(its_agreement, abs=0.02)
    lengths = [len(c.answer) for c in tried]
    for i, name in enumerate(("kl", "agreement")):
        mean = sum(n * x[i] for n, x in zip(lengths, each, strict=True)) / sum(lengths)
        assert mean == pytest.approx(record["after"][name], rel=0.01)
    # A tie between two tokens may fall another way on another machine.
    for mine, theirs in zip(found["drafts"], record["after"]["drafts"], strict=False):
        assert mine == pytest.approx(theirs, abs=12)
    assert record["after"]["kl"] < 0.2 * record["before"]["kl"]
    assert PACKAGED.stat().st_size < 16e6
    assert len(record["loss"]) == record["settings"]["steps"]


def test_the_packaged_heads_are_as_their_record_says(default):
    record = json.loads(PACKAGED_HEADS.with_suffix(".json").read_text())
    teacher = prepack(default[0])
    heads, conversation = load_heads(), Conversation(*record["tried"][0])
    found = drafts(MedusaDrafter(heads), teacher, [conversation], len(heads.weight))
    assert found[0] == pytest.approx(record["after"]["drafts"][0], abs=12)
    assert record["loss"][-1] < 0.8 * record["loss"][0]
    assert len(record["loss"]) == record["settings"]["steps"]
    assert PACKAGED_HEADS.stat().st_size + PACKAGED.stat().st_size < 16e6


def test_the_student_of_the_default_checkpoint():
    student = load_student(dtype="int4")
    assert student.config.n_layers == 4 and len(generate(student, [1, 2, 3], 3)) == 3
