"""What a reader builds is kept in files that work alone, and never lost."""

import linecache
import math
import random
from types import SimpleNamespace

import pytest
import torch

from minillm import costs
from minillm.cache import Cache
from minillm.hardware import Hardware
from minillm.layers.attention import attention as attend_package
from minillm.mine import checks
from minillm.mine import kept as keeping
from minillm.mine.kept import keep, load
from minillm.mine.ours import OURS, part
from minillm.mine.parts import PARTS
from minillm.mine.source import NotStandalone, _source, standalone

SCALE, CHIP = {"by": 2.0, "of": [1, 2]}, Hardware.preset("h100")
LIVE = torch.zeros(3)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_MINE", str(tmp_path / "mine"))
    return tmp_path / "mine"


def scaled(q, k):
    return q @ k.T / math.sqrt(q.shape[1])


def answer_greedily(model, prompt_ids, max_new_tokens, cache, stop_ids=()):
    new, fed = [], list(prompt_ids)
    while len(new) < max_new_tokens:
        new.append(int(model(torch.tensor([fed]), cache)[0, -1].argmax()))
        if new[-1] in stop_ids:
            break
        fed = new[-1:]
    return new


class MyCache(Cache):
    def __init__(self, model):
        self.length, self.kept = 0, {}

    def positions(self, n_new):
        return range(self.length, self.length + n_new)

    def attend(self, layer, q, k, v):
        old = self.kept.get(layer, (k[:, :0], v[:, :0]))
        self.kept[layer] = tuple(torch.cat(pair, 1) for pair in zip(old, (k, v), strict=True))
        return attend_package(q, *self.kept[layer])

    def advance(self, n_new):
        self.length += n_new


def look_up(ids, n, k):
    ### BEGIN SOLUTION
    for end in range(len(ids) - 1, n - 1, -1):
        if ids[end - n : end] == ids[-n:]:
            return ids[end : end + k]
    return []
    ### END SOLUTION


def uses_all(x):
    return [scaled(x, x) * SCALE["by"], CHIP.bandwidth, random.random(), [y for y in SCALE["of"]]]


def uses_what_lives(x):
    return x + LIVE


def test_a_program_holds_what_its_functions_use():
    text = standalone((uses_all,))
    scope: dict = {}
    exec(text, scope)
    assert torch.equal(scope["uses_all"](torch.ones(2, 2))[0], uses_all(torch.ones(2, 2))[0])
    assert scope["CHIP"] == CHIP and scope["SCALE"] == SCALE
    assert text.count("def scaled") == 1 and text.index("import math") < text.index("def scaled")
    with pytest.raises(NotStandalone, match="uses_what_lives uses LIVE, a Tensor of the notebook"):
        standalone((uses_what_lives,))


def test_a_class_and_its_imports_under_other_names(folder, capsys):
    keep(MyCache)
    assert capsys.readouterr().out == "Kept in mine/cache.py.\n"
    text = (folder / "cache.py").read_text()
    assert "from minillm.layers.attention import attention as attend_package" in text
    assert load("cache").MyCache is not MyCache and load("decoder") is None
    assert [path.name for path in folder.glob("*.py")] == ["cache.py"]


def test_only_what_passes_is_kept_and_the_older_one_is_set_aside(folder, capsys, monkeypatch):
    keep(answer_greedily)
    first = (folder / "greedy_loop.py").read_bytes()
    keep(answer_greedily)
    assert capsys.readouterr().out == "Kept in mine/greedy_loop.py.\n" * 2
    wrong = "def answer_greedily(model, ids, n, cache, stop_ids=()):\n    return [0]\n"
    monkeypatch.setattr(keeping, "standalone", lambda _: wrong)
    keep(answer_greedily)
    out = capsys.readouterr().out
    assert out.startswith("Not kept: After [5, 17, 3] come [") and out.count("\n") == 1
    assert (folder / "greedy_loop.py").read_bytes() == first
    monkeypatch.undo()
    monkeypatch.setenv("MINILLM_MINE", str(folder))
    (folder / "greedy_loop.py").write_text("# mine, by hand\n")
    keep(answer_greedily)
    assert "Your version before is in mine/greedy_loop_before.py." in capsys.readouterr().out
    assert (folder / "greedy_loop_before.py").read_text() == "# mine, by hand\n"
    assert (folder / "greedy_loop.py").read_bytes() == first


def test_keep_never_raises(folder, capsys):
    keep(scaled)
    assert "Not kept: scaled is no part. The parts are answer_greedily; my_decoder" in (
        capsys.readouterr().out
    )
    keep(3)
    assert "Not kept: 3 is no part" in capsys.readouterr().out
    folder.write_text("a file where the folder should be")
    keep(look_up)
    assert capsys.readouterr().out.startswith("Not kept: ")


def test_the_command_says_what_is_there_and_what_is_wrong(folder, capsys):
    from minillm.__main__ import main

    assert main(["mine"]) == 0
    out = capsys.readouterr().out
    assert out.count("not there yet") == len(PARTS) and str(folder) in out
    keep(look_up)
    assert main(["mine"]) == 0
    assert "12  drafter            right" in capsys.readouterr().out
    (folder / "drafter.py").write_text("def look_up(ids, n, k):\n    return []\n")
    (folder / "loss.py").write_text("def masked_loss(:\n")
    assert main(["mine"]) == 1
    out = capsys.readouterr().out
    assert "drafter            wrong: After [" in out and "loss               wrong: " in out


def test_without_a_name_the_folder_lies_beside_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.delenv("MINILLM_MINE")
    monkeypatch.chdir(tmp_path)
    assert keeping.folder() == tmp_path / "mine"
    (tmp_path / "notebooks").mkdir()
    assert keeping.folder() == tmp_path / "notebooks" / "mine"


def test_files_and_functions_of_parts_are_told_apart():
    assert len({part.file for part in PARTS}) == len({part.names for part in PARTS}) == len(PARTS)


def test_a_class_of_a_notebook_has_its_text():
    """Its module is __main__, which has no file; before Python 3.13 inspect gives up there."""
    text = "class Cell:\n    def f(self):\n        return 1\n"
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True), "<cell>")
    names = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), names)
    assert _source(names["Cell"]) == text


@pytest.mark.parametrize(
    ("slip", "combine", "cached"),
    [("none", max, True), ("added", lambda *both: sum(both), True), ("no caches", max, False)],
)
def test_a_predictor_is_asked_where_either_limit_counts(slip, combine, cached):
    def step_seconds(config, chip, batch, context, dtype):
        read = costs.decode_bytes(config, batch, context if cached else 0, dtype)
        flops = batch * costs.decode_flops(config, context)
        return combine(read / chip.bandwidth, flops / chip.peak(dtype))

    if slip == "none":
        return checks.predictor(SimpleNamespace(step_seconds=step_seconds))
    with pytest.raises(AssertionError, match="A step of llama-3-8b for 1 users takes"):
        checks.predictor(SimpleNamespace(step_seconds=step_seconds))


@pytest.mark.parametrize("file", OURS)
def test_the_package_s_own_parts_pass_the_same_checks(file):
    (own,) = (each for each in PARTS if each.file == file)
    own.check(OURS[file])
    assert part(file) == (OURS[file], "the package's")
    assert all(hasattr(OURS[file], name) for name in own.names)


def test_a_kept_part_goes_first(folder):
    keep(look_up)
    assert "SOLUTION" not in (folder / "drafter.py").read_text()  # nbgrader's marks
    assert part("drafter")[1] == "yours"
    with pytest.raises(KeyError):
        part("loss")
