"""Tables that a lesson shows."""

from collections.abc import Sequence


def show_table(head: Sequence[object], *rows: Sequence[object]) -> None:
    """Show rows under a head as a table, in a notebook. Each cell is what `str` makes of it."""
    from IPython.display import Markdown, display

    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    display(Markdown("\n".join(f"| {line} |" for line in lines)))
