"""A small drawing for each lesson, made for the landing page."""

from html import escape

W, H = 200, 84


def _boxes(*rows: tuple[float, float, float, float, str]) -> str:
    return "".join(
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="2" class="{kind}"/>'
        for x, y, w, h, kind in rows
    )


def _grid(pattern: list[str], x: float, y: float, size: float) -> str:
    """Squares by the first letters of their colours; a point is an empty one, a space none."""
    kinds = {"b": "blue", "o": "orange", "g": "green", "r": "red", "p": "purple", "s": "sky",
             ".": "empty", "-": "idle"}  # fmt: skip
    return _boxes(*(
        (x + j * size, y + i * size, size - 2, size - 2, kinds[letter])
        for i, row in enumerate(pattern) for j, letter in enumerate(row) if letter != " "
    ))  # fmt: skip


def _path(d: str, kind: str) -> str:
    return f'<path d="{d}" class="line {kind}"/>'


def _word(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="middle">{escape(text)}</text>'


DRAWINGS = {
    "00": _boxes((12, 20, 110, 44, "blue"), (140, 34, 16, 16, "orange"),
                 (164, 34, 16, 16, "pale orange"))
    + _word(67, 47, "weights", "letter") + _path("M124 42H138", "grey"),
    "01": _boxes((20, 12, 62, 60, "blue"), (90, 12, 36, 28, "green"), (90, 44, 36, 28, "orange"),
                 (134, 12, 46, 60, "sky")),
    "02": _boxes((16, 26, 74, 32, "blue"),
                 *((100 + i * 16, 26, 12, 32, "orange") for i in range(5))),
    "03": _grid(["g     ", "gg    ", "ggg   ", "gggg  ", "ggggb "], 52, 4, 15.5),
    "04": _boxes(*((20 + i * 21, 14, 16, 22, "blue") for i in range(8)),
                 *((30.5 + i * 42, 52, 16, 22, "green") for i in range(4)))
    + "".join(_path(f"M{28 + i * 21} 36L{38.5 + i // 2 * 42} 52", "grey") for i in range(8)),
    "05": _grid(["o.....", "oo....", ".oo...", "......"], 52, 6, 18),
    "06": _grid(["bb.ogg", "ob.gpo", "b.ppo."], 42, 12, 20),
    "07": _grid(["bbooooooo-", "gggssppprr", "ooooobbb--"], 18, 16, 17),
    "08": _path("M20 70L70 44L110 24L135 20L160 48L184 64", "green")
    + _path("M20 70L70 44L110 24L150 14L184 11", "grey dashed"),
    "09": _grid(["bbbbbbbbbbbbbbbb"], 20, 16, 10) + _grid(["oooo"], 20, 44, 10)
    + _word(130, 55, "16 → 4 bits"),
    "10": _grid(["b..bb.b.", ".bb..b.b", "b.b.bb..", "..bbb..b"], 34, 8, 17),
    "11": _boxes((24, 8, 60, 68, "blue"), (124, 30, 34, 38, "orange"))
    + _path("M88 44H118", "grey"),
    "12": _grid(["gggr"], 30, 18, 22) + _grid(["bbbb"], 30, 46, 22) + _word(158, 52, "+ 1"),
    "13": "".join(_grid([row], 30 + i * 15, 8 + i * 18, 15)
                  for i, row in enumerate(("bsbsbs", "bsbsbs", "bsbsbs", "bsbsbs"))),
    "14": _boxes(*((40 + i * 12, 62 - i * 13, 120 - i * 24, 11, kind)
                   for i, kind in enumerate(("blue", "green", "orange", "purple", "red")))),
    "15": _boxes(*((30, 12 + i * 22, n, 14, kind)
                   for i, (n, kind) in enumerate(((140, "green"), (96, "sky"), (60, "idle"))))),
}  # fmt: skip
OTHER = _grid(["bbggoo", "ssppbb"], 42, 22, 20)


def thumbnail(lesson: str) -> str:
    """The drawing of the lesson with this number; a plain one for a lesson without."""
    return (
        f'<svg class="drawn" viewBox="0 0 {W} {H}" aria-hidden="true">'
        f"{DRAWINGS.get(lesson, OTHER)}</svg>"
    )
