"""The Triton kernels, one file each, what they can take, and how to read them.

A kernel is the program of one tile: many copies of it run at once, each with another
`tl.program_id`. All names in capitals are compile-time constants, except for pointers. A pointer
plus a block of offsets is a block of addresses. Blocks are named by what they hold.

    tiles.py            loading and storing one tile of rows
    flash_forward.py    softmax(Q Kᵀ) V, tile by tile
    flash_backward.py   dQ, dK and dV, with the weights computed again instead of stored
    flash_decode.py     few queries, many keys: the keys in parts, then the parts merged
    paged_attention.py  ragged queries, keys found through block tables
    fused.py            the small operations between matrix products, one kernel each
    few_rows.py         few rows times a matrix in 16, 8 or 4 bits, as decode needs it

Triton compiles them for NVIDIA GPUs. With TRITON_INTERPRET=1 in the environment before Python
starts, NumPy runs them on the CPU, one program after the other: thousands of times slower, exact
enough to test with, and open to a debugger. The kernels check nothing: `minillm.attention`,
`minillm.ragged`, `minillm.model` and `minillm.quantization.linear` ask `why_not_triton` or
`why_not_here` before one of them is started.
"""
