"""Fork and copy-on-write by hand, on the real `minillm.blocks.BlockManager`."""

import re
from html import escape

from live.controls import Slider, Text
from live.scheduler import COLOURS
from live.svg import box, picture, text
from minillm.blocks import BlockManager, BlockTable, OutOfBlocks

BLOCKS, MOST = 16, 60
START = "start A 6; fork A B; append B 1"
DO = {
    "start C with 5": "; start C 5",
    "append 1 to A": "; append A 1",
    "append 1 to B": "; append B 1",
    "fork A into D": "; fork A D",
    "take 1 from B": "; rewind B 1",
    "free A": "; free A",
}

CONTROLS = (
    Slider("block_size", "tokens in a block", [1, 2, 4, 8], 4),
    Text("actions", "what you do", START, DO, append=True),
)


def draw(actions: str, block_size: int, width: int) -> str:
    """Replay the actions; show the pool, each table, and what every action did."""
    manager, tables, told = BlockManager(BLOCKS, block_size, prefix_caching=False), {}, []
    steps = [part.strip() for part in actions.split(";") if part.strip()]
    if len(steps) > MOST:
        raise ValueError(f"{len(steps)} actions; at most {MOST} are replayed.")
    for step in steps:
        try:
            told.append((step, _do(step, manager, tables)))
        except (ValueError, OutOfBlocks) as error:
            told.append((step, f"refused: {error}"))
    log = "".join(f"<li><code>{escape(a)}</code> {escape(b)}</li>" for a, b in told)
    return f'{_pool(manager, tables, width)}{_tables(manager, tables)}<ol class="log">{log}</ol>'


def _do(step: str, manager: BlockManager, tables: dict[str, BlockTable]) -> str:
    """Carry out one action; what it did, in words."""
    found = re.fullmatch(r"(start|append|fork|rewind|free) ([A-Z])(?: (\d{1,3}|[A-Z]))?", step)
    if not found:
        raise ValueError("say start A 6, append A 1, fork A B, rewind A 1 or free A.")
    verb, name, rest = found.groups()
    if (name in tables) == (verb == "start"):
        raise ValueError(f"{name} is there already." if verb == "start" else f"there is no {name}.")
    if verb == "free":
        n = len(tables[name].blocks)
        manager.release(tables.pop(name))
        return f"gives up {n} references."
    if verb == "fork":
        if rest is None or not rest.isalpha() or rest in tables:
            raise ValueError(f"fork {name} into a letter that is free.")
        tables[rest] = manager.fork(tables[name])
        return f"{rest} has {name}'s blocks: no block is taken, {len(tables[rest].blocks)} shared."
    if rest is None or not rest.isdigit():
        raise ValueError(f"{verb} by how many tokens?")
    n, free = int(rest), manager.n_available
    if verb == "rewind":
        manager.rewind(tables[name], n)
        return f"forgets {n}; {manager.n_available - free} blocks are free again."
    table = tables.get(name) or manager.start([0] * n)
    copies = manager.reserve(table, n)
    table.n_tokens += n
    tables[name] = table
    copied = "".join(f" Block {a} is shared, so it is copied to {b} first." for a, b in copies)
    return f"takes {free - manager.n_available} blocks.{copied}"


def _pool(manager: BlockManager, tables: dict[str, BlockTable], width: int) -> str:
    across = BLOCKS if width > 500 else BLOCKS // 2
    wide, parts = min(46.0, width / across), []
    for block in range(BLOCKS):
        x, y = block % across * wide, block // across * 50
        holders = [n for n, table in sorted(tables.items()) if block in table.blocks]
        parts.append(box(x, y, wide - 3, 30, "empty"))
        for i, holder in enumerate(holders):
            high = 30 / len(holders)
            kind = COLOURS[(ord(holder) - ord("A")) % len(COLOURS)]
            parts.append(box(x, y + i * high, wide - 3, high, kind))
            middle = x + (wide - 3) / 2
            if high >= 10:
                parts.append(text(middle, y + (i + 0.5) * high + 4, holder, "letter", "middle"))
        n = manager.allocator.ref_count(block)
        told = f"{block}" if n < 2 else f"{block}: ×{n}"
        parts.append(text(x + (wide - 3) / 2, y + 43, told, "small", "middle"))
    free = manager.n_available
    return picture(width, 50 * -(-BLOCKS // across), parts, f"{free} of {BLOCKS} blocks are free")


def _tables(manager: BlockManager, tables: dict[str, BlockTable]) -> str:
    rows = "".join(
        f"<tr><td>{name}</td><td>{table.n_tokens}</td><td>{list(table.blocks)}</td>"
        f"<td>{'yes' if manager.writes_shared(table) else 'no'}</td></tr>"
        for name, table in sorted(tables.items())
    )
    return (
        "<table><tr><th>sequence</th><th>tokens</th><th>block table</th>"
        f"<th>next token copies a block</th></tr>{rows}</table>"
    )
