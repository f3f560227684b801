"""Exercises are the learner's own work; figures that move or can be moved."""

import pytest
import torch
from PIL import Image

from minillm import measure
from minillm.tools import plots
from minillm.tools.exercises import own_work


def honest(x):
    return x + 1


def hidden_call(x):
    def inner():
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    return inner()


def imports(x):
    from minillm import attention

    return attention(x, x, x)


class Cache:
    def attend(self, x):
        return [torch.softmax(y, -1) for y in x]


def test_own_work_reads_names_wherever_they_stand():
    own_work(honest, "attention")
    own_work(Cache, "attention")
    for solution, name in (
        (hidden_call, "scaled_dot_product_attention"),
        (imports, "attention"),
        (Cache, "softmax"),
    ):
        with pytest.raises(AssertionError, match=f"{solution.__name__} uses {name}"):
            own_work(solution, "nothing", name)


def test_an_animation_has_its_frames_and_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_FIGURES", str(tmp_path))
    path = plots.animate(lambda ax, i: ax.text(0.5, 0.5, str(i)), 4, "counting")
    with Image.open(path) as image:
        assert image.n_frames == 4 and image.format == "GIF"
    path = plots.animate(lambda ax, i: ax.text(0.5, 0.5, str(i)), 3, "slower", seconds_each=[1, 2])
    with Image.open(path) as image:
        shown = [(image.seek(i), image.load(), image.info["duration"])[-1] for i in range(3)]
    assert shown == [1000, 2000, 3000]
    with pytest.raises(ValueError, match="limit is 1\\."):
        plots._not_too_large(path, 1)


def test_a_figure_is_shown_sharp_and_described(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_FIGURES", str(tmp_path))
    monkeypatch.setattr("IPython.get_ipython", lambda: object())
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    fig, (ax,) = plots.figure(width=4, height=2)
    ax.set_title("Blocks waste less")
    path = plots.save(fig, "blocks")
    (picture,) = shown
    assert picture.alt == "Blocks waste less" and picture.width == 400
    with Image.open(path) as image:
        assert image.size == (800, 400)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_at_the_ends_of_curves_do_not_touch(scale):
    fig, (ax,) = plots.figure()
    ax.set(yscale=scale, ylim=(1, 100), xlim=(0, 1))
    plots.label_ends(ax, 0.5, [(50, "far", "C0"), (2, "low", "C1"), (2, "also low", "C2")])
    y = {text.get_text(): ax.transData.transform(text.get_position())[1] for text in ax.texts}
    assert abs(y["low"] - y["also low"]) > 11 / 72 * fig.dpi
    assert min(y.values()) > ax.transData.transform((0.5, 1))[1] + 4  # pixels
    exactly = ax.transData.transform((0.5, 50))[1]
    assert abs(y["far"] - exactly) < 1e-6  # nothing is near it


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.8, 384, ["1", "2", "5", "10", "20", "50", "100", "200"]),
        (100, 135, ["100", "110", "120", "130"]),
        (1, 1e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(low, high, ticks):
    _, (ax,) = plots.figure()
    ax.set(xscale="log", xlim=(low, high))
    plots.plain_ticks(ax.xaxis, low, high)
    assert set(ticks) <= {text.get_text() for text in ax.get_xticklabels()}
    assert ax.get_xlim() == (low, high)


def test_a_slider_is_a_plain_figure_without_a_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_FIGURES", str(tmp_path))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    drawn = []

    def draw(n=3):
        drawn.append(n)
        fig, (ax,) = plots.figure()
        ax.bar(range(n), range(n))
        return fig

    plots.slider(draw, "bars", n=(1, 9))
    assert drawn == [3] and (tmp_path / "bars.png").exists()
    monkeypatch.setenv("JPY_SESSION_NAME", "lesson.ipynb")
    asked = {}
    monkeypatch.setattr("ipywidgets.interact", lambda redraw, **ranges: asked.update(ranges))
    plots.slider(draw, "bars", n=(1, 9))
    assert asked == {"n": (1, 9)}


def test_a_busy_machine_is_named(monkeypatch, capsys):
    assert 0 < measure.cores_received(0.01) < 1.5
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measure, "cores_received", lambda: 0.5)
    assert not measure.quiet()
    assert "Only 50% of this machine's cores are free" in capsys.readouterr().out
    monkeypatch.setattr(measure, "cores_received", lambda: 1.0)
    assert measure.quiet() and capsys.readouterr().out == ""
    shares = iter((0.4, 0.9))  # busy for a moment
    monkeypatch.setattr(measure, "cores_received", lambda: next(shares))
    assert measure.quiet() and capsys.readouterr().out == "" and not list(shares)
