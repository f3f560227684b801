"""Distillation: the student's layers, the loss by its formula, training that goes on."""

import math

import pytest
import torch
import torch.nn.functional as F
from models import lively, tiny_config

from minillm import Decoder, generate, quantize
from minillm.distillation.distill import distill, distillation_loss
from minillm.distillation.student import make_student
from minillm.evaluate import difference
from minillm.training import fit, warmup_and_decay


def batches(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (2, 12), generator=generator) for _ in range(n)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("L", "n", "chosen"), [(6, 2, [2, 5]), (6, 3, [1, 3, 5]), (5, 5, [0, 1, 2, 3, 4]), (4, 1, [3])]
)
def test_the_students_layers_are_the_teachers(L, n, chosen, tied):
    teacher = lively(n_layers=L, tie_embeddings=tied)
    student = make_student(teacher, n)
    assert student.config.n_layers == n == len(student.layers)
    for mine, i in zip(student.layers, chosen, strict=True):
        for a, b in zip(mine.parameters(), teacher.layers[i].parameters(), strict=True):
            assert torch.equal(a, b) and a is not b
    assert student.embed.weight is teacher.embed.weight
    assert student.head.weight is teacher.head.weight and student.norm is not teacher.norm
    assert len(generate(student, [1, 2, 3], 5)) == 5
    if n == L:
        assert generate(student, [1, 2, 3], 9) == generate(teacher, [1, 2, 3], 9)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    ("text_weight", "states"), [(0.0, 0.0), (1.0, 0.0), (0.3, 0.0), (0.5, 2.0)]
)
def test_the_loss_by_its_formula(text_weight, states, temperature):
    teacher, student = lively(n_layers=3), make_student(lively(n_layers=3), 1)
    (tokens,) = batches(1)
    loss = distillation_loss(
        teacher, student, text_weight=text_weight, temperature=temperature, states=states
    )(tokens)
    with torch.no_grad():
        z_t, z_s = (m(tokens[:, :-1]).double().flatten(0, 1) for m in (teacher, student))
        p, q = ((z / temperature).softmax(-1) for z in (z_t, z_s))
        kl = (p * (p / q).log()).sum(-1).mean()
        text = F.cross_entropy(z_s, tokens[:, 1:].flatten())
        apart = (teacher.hidden(tokens[:, :-1]) - student.hidden(tokens[:, :-1])).square().mean()
    expected = text_weight * text + (1 - text_weight) * temperature**2 * kl + states * apart
    torch.testing.assert_close(loss.double(), expected.double(), atol=1e-4, rtol=1e-4)


def test_a_twin_has_nothing_to_learn():
    teacher = lively(n_layers=2)
    loss = distillation_loss(teacher, make_student(teacher, 2), text_weight=0.0, temperature=2.0)
    assert abs(float(loss(batches(1)[0]))) < 1e-5


def test_the_student_comes_nearer():
    """Loss and KL fall, on text that it has not seen, and what is shared stays as it was."""
    teacher = lively(n_layers=4)
    student = make_student(teacher, 2)
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    asked = {name: p.requires_grad for name, p in student.named_parameters()}
    exam = [i for row in batches(3, seed=9) for i in row.flatten().tolist()]
    far = difference(student, teacher, exam).kl
    losses = distill(teacher, student, batches(60), text_weight=0.1, temperature=2.0, lr=0.01)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert difference(student, teacher, exam).kl < 0.8 * far
    for name, p in teacher.named_parameters():
        assert torch.equal(p, before[name])
    assert {name: p.requires_grad for name, p in student.named_parameters()} == asked
    assert all(p.grad is None for p in (*student.parameters(), *teacher.parameters()))


def test_resumed_equals_uninterrupted(tmp_path):
    """Also after an interrupt between two checkpoints."""
    teacher, path = lively(n_layers=3), tmp_path / "run" / "student.safetensors"
    rate = warmup_and_decay(0.01, 20)
    options = {"text_weight": 0.2, "temperature": 2.0, "lr": rate}
    straight = make_student(teacher, 1)
    losses = distill(teacher, straight, batches(20), **options)

    class Interrupted(Exception):
        pass

    def broken():
        yield from batches(20)[:13]
        raise Interrupted

    with pytest.raises(Interrupted):
        fit(
            first := make_student(teacher, 1),
            [p for p in first.parameters() if p is not teacher.embed.weight
             and p is not teacher.head.weight],
            broken(), distillation_loss(teacher, first, text_weight=0.2, temperature=2.0),
            lr=rate, checkpoint=path, every=5,
        )  # fmt: skip
    resumed = make_student(teacher, 1)
    again = distill(teacher, resumed, batches(20), checkpoint=path, **options)
    assert again == pytest.approx(losses, rel=1e-6) and len(again) == 20
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert [p.name for p in path.parent.iterdir()] == ["student.safetensors"]
    # Done: nothing is trained again.
    assert (
        distill(teacher, make_student(teacher, 1), batches(20), checkpoint=path, **options) == again
    )


def test_a_checkpoint_of_something_else(tmp_path):
    teacher, path = lively(n_layers=3), tmp_path / "c.safetensors"
    options = {"text_weight": 0.5, "temperature": 1.0, "lr": 0.01, "checkpoint": path}
    distill(teacher, make_student(teacher, 1), batches(2), **options)
    with pytest.raises(ValueError, match="is a checkpoint of other parameters; give another path"):
        distill(teacher, make_student(teacher, 2), batches(2), **options)


def test_remembered_states_are_the_teachers():
    """A batch that comes again is not computed again, and what is learned is nearly the same."""
    teacher, (first, second) = lively(n_layers=3), batches(2)
    options = {"text_weight": 0.0, "temperature": 1.0, "lr": 0.01}
    found, hidden, calls = [], teacher.hidden, 0

    def counted(tokens):
        nonlocal calls
        calls += 1
        return hidden(tokens)

    for known in (None, {}):
        student, calls, teacher.hidden = make_student(teacher, 1), 0, counted
        again = [first, second, first, second]
        losses = distill(teacher, student, again, known=known, **options)
        found.append((calls, losses))
    assert [calls for calls, _ in found] == [4, 2]
    assert found[1][1] == pytest.approx(found[0][1], rel=0.05)


def test_the_rate_rises_and_falls():
    rate = warmup_and_decay(1.0, 100, warmup=0.1)
    values = [rate(i) for i in range(101)]
    assert values[0] == pytest.approx(0.1) and values[9] == pytest.approx(1.0)
    assert values == [*sorted(values[:10]), *sorted(values[10:], reverse=True)]
    assert values[55] == pytest.approx(0.5) and values[100] == pytest.approx(0)


def test_autocast_trains_as_well(monkeypatch):
    """And is left out on a CPU without instructions for it, where it would take very long."""
    teacher = lively(n_layers=2)

    def losses(autocast: bool, has_bfloat16: bool) -> list[float]:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
        student = make_student(teacher, 1)
        losses = distill(
            teacher, student, batches(5), text_weight=0.5, temperature=1.0, lr=0.01,
            autocast=autocast,
        )  # fmt: skip
        assert student.dtype == torch.float32
        return losses

    plain, half = losses(False, True), losses(True, True)
    assert half == pytest.approx(plain, rel=0.05) and half != plain
    assert losses(True, False) == plain


def test_a_damaged_checkpoint_and_nothing_to_do(tmp_path):
    """What is refused leaves the student as it was."""
    teacher, path = lively(n_layers=3), tmp_path / "c.safetensors"
    options = {"text_weight": 0.5, "temperature": 1.0, "lr": 0.01}
    student = make_student(teacher, 1)
    assert distill(teacher, student, [], checkpoint=path, **options) == []
    assert not path.exists()
    path.write_bytes(b"no tensors")
    asked = [p.requires_grad for p in student.parameters()]
    with pytest.raises(ValueError, match=r"is damaged .*; delete it to start again"):
        distill(teacher, student, batches(1), checkpoint=path, **options)
    with pytest.raises(ValueError, match="nothing to learn"):
        distill(teacher, teacher, batches(1), **options)
    with pytest.raises(ValueError, match="Batch 0 is empty; give each at least one row"):
        distill(teacher, student, [torch.empty(0, 8, dtype=torch.long)], **options)
    assert [p.requires_grad for p in student.parameters()] == asked


def test_a_parameter_that_never_learns_is_kept_too(tmp_path):
    teacher, path = lively(n_layers=2), tmp_path / "c.safetensors"
    model = make_student(teacher, 1)
    learned = [model.layers[0].down.weight, model.layers[0].out.weight]
    for n in (2, 4):
        loss = fit(model, learned, batches(n), lambda b: (learned[0] * b.float().mean()).sum(),
                   lr=0.01, checkpoint=path)  # fmt: skip
        assert len(loss) == n


def test_refusals():
    teacher = lively(n_layers=3)
    student = make_student(teacher, 1)
    with pytest.raises(ValueError, match=r"n_layers is 4; .* has 3, so give at most 3"):
        make_student(teacher, 4)
    with pytest.raises(ValueError, match=r"is not a plain Linear but a .* already; make a student"):
        make_student(quantize(lively(d_model=32, d_ff=32), "int8"), 1)
    for options, message in (
        ({"text_weight": 1.5}, "text_weight is 1.5; give a number from 0 to 1"),
        ({"temperature": 0}, "temperature is 0; give a number"),
        ({"states": math.nan}, "states is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(
                teacher, student, [], **({"text_weight": 0.5, "temperature": 1, "lr": 1} | options)
            )
    other = Decoder(tiny_config(vocab_size=50))
    with pytest.raises(ValueError, match="student has 50 token ids and the teacher 97; both must"):
        distill(teacher, other, [], text_weight=0.5, temperature=1, lr=1)
    wide = Decoder(tiny_config(d_model=32))
    with pytest.raises(ValueError, match="student is 32 wide and the teacher 24; leave states"):
        distill(teacher, wide, [], text_weight=0.5, temperature=1, lr=1, states=1)
