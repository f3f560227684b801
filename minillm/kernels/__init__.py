"""The Triton kernels, one file each, and how to read them.

A kernel is the program of one tile: many copies of it run at once, each with another `tl.program_id`. All names in capitals
are compile-time constants; a pointer plus a block of offsets is a block of addresses. Blocks are named by what they hold.

    tiles.py           loading and storing one tile of rows
    flash_forward.py   softmax(Q Kᵀ) V, tile by tile
    flash_backward.py  dQ, dK and dV, with the weights computed again instead of stored
    flash_decode.py    few queries, many keys: the keys in parts, then the parts merged

Triton compiles them for NVIDIA GPUs. With TRITON_INTERPRET=1 in the environment before Python starts, NumPy runs them on
the CPU, one program after the other: thousands of times slower, exact enough to test with, and open to a debugger.
Nothing here checks its arguments; `minillm.flash` does, and is the only caller.
"""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run in the interpreter; decided when they are imported."""
