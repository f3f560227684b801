"""Values to try a live element with; the browser's tests and the package's both use them."""

import random

from live import page
from live.controls import Choice, Slider


def some_values(name: str, seed: int) -> dict[str, object]:
    """Random values of an element's choices and sliders."""
    g = random.Random(seed)
    return {
        c.name: g.choice(list(c.options)) if isinstance(c, Choice) else g.choice(c.values)
        for c in page.ELEMENTS[name].controls
        if isinstance(c, (Choice, Slider))
    }
