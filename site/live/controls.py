"""The controls of a live element, as HTML. A control's name is the argument that it gives."""

import json
from dataclasses import dataclass, field
from html import escape
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One of a few names. options: value -> what the reader sees."""

    name: str
    label: str
    options: dict[str, str]
    value: str

    def html(self) -> str:
        options = "".join(
            f'<option value="{escape(value)}"{" selected" * (value == self.value)}>'
            f"{escape(text)}</option>"
            for value, text in self.options.items()
        )
        return f'<label>{self.label}<select name="{self.name}">{options}</select></label>'


@dataclass(frozen=True)
class Slider:
    """One of a row of numbers. unit: what stands behind the number."""

    name: str
    label: str
    values: list[float]
    value: float
    unit: str = ""

    def html(self) -> str:
        at, last = self.values.index(self.value), len(self.values) - 1
        return (
            f'<label><span class="head"><span>{self.label}</span><span class="value"><output>'
            f"{self.value:,}</output> {self.unit}</span></span>"
            f'<input type="range" name="{self.name}" min="0" max="{last}" value="{at}" '
            f'data-values="{escape(json.dumps(self.values))}"></label>'
        )


@dataclass(frozen=True)
class Text:
    """A line of text. buttons: what they say -> what they write, or append with `append`."""

    name: str
    label: str
    value: str
    buttons: dict[str, str] = field(default_factory=dict)
    append: bool = False

    def html(self) -> str:
        kind = "append" if self.append else "write"
        buttons = "".join(
            f'<button type="button" data-{kind}="{escape(text)}" data-to="{self.name}">'
            f"{escape(label)}</button>"
            for label, text in self.buttons.items()
        )
        return (
            f'<label class="text">{self.label}<input type="text" name="{self.name}" '
            f'value="{escape(self.value)}" autocomplete="off" spellcheck="false"></label>'
            f'<span class="buttons">{buttons}</span>'
        )


Control = Choice | Slider | Text


def names(values: Any) -> dict[str, str]:
    """Options that are shown as they are."""
    return {value: value for value in values}
