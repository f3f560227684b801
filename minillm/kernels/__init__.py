"""The Triton kernels, one file each; how to read them, and how a GPU runs them.

A kernel is the program of one tile: many copies of it run at once, each with another
`tl.program_id`. All names in capitals are compile-time constants, except for pointers. A pointer
plus a block of offsets is a block of addresses. Blocks are named by what they hold.

    availability.py     what the kernels can take, and where they run
    tuning.py           tile sizes to try, and the launch that chooses among them
    tiles.py            which tile a program owns; loading and storing it
    online_softmax.py   the running maximum and sums, for all three attention kernels
    flash_forward.py    softmax(Q Kᵀ) V, tile by tile
    flash_backward.py   dQ, dK and dV, with the weights computed again instead of stored
    flash_decode.py     few queries, many keys: the keys in parts, then the parts merged
    paged_attention.py  ragged queries, keys found through block tables
    fused.py            the small operations between matrix products, one kernel each
    few_rows.py         few rows times a matrix in 16, 8 or 4 bits, as decode needs it

One entry of a list in `tuning.py`, for example BLOCK_T 128, BLOCK_S 64, num_warps 4, num_stages 3:
- A program multiplies 128 queries by 64 keys at a time, on one multiprocessor (an H100 has 132).
- Warps are groups of 32 threads that execute each instruction together. Here 4 of them share the
  tile, so 128 × 64 scores in float32 take 64 of at most 255 registers a thread, and an output with
  D = 64 takes 64 more. What does not fit is spilled to memory, which costs time.
- Stages are the tiles in flight: while one is multiplied, the next two are on their way from memory
  to shared memory. With D = 64 in 16 bits a tile of keys and one of values take 16 KiB a stage.
- `wgmma` is Hopper's matrix instruction: four warps multiply 64 rows or more, right out of shared
  memory (before, `mma.sync`: one warp, 16 rows, out of registers). So 8 warps need 128 rows; on 64
  rows both groups of four would compute the same.
- Occupancy is the number of programs on one multiprocessor at a time, set by the registers and the
  shared memory that each takes. When one waits for memory, another one computes. Larger tiles read
  fewer bytes but leave room for fewer programs.

Triton compiles the kernels for NVIDIA GPUs. With TRITON_INTERPRET=1 in the environment before
Python starts, NumPy runs them on the CPU, one program after the other: thousands of times slower,
exact enough to test with, and open to a debugger. The kernels check nothing: `minillm.attention`,
`minillm.ragged`, `minillm.model` and `minillm.quantization.linear` ask `why_not_triton` or
`why_not_here` before they start one.
"""
