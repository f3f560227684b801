"""More than one device: the model cut over the ranks of torch.distributed.

plan.py          which part of every matrix a rank holds; no tensors
step_time.py     predicted time of a step on 1 to 64 GPUs; no tensors
ranks.py         a command, or a notebook's functions, on ranks of this machine
collectives.py   what ranks send each other, and a ledger of the bytes
tensor.py        every matrix cut; two sums a layer; optionally the sequence cut as well
pipeline.py      a few layers on each rank, and micro-batches
loading.py       each rank reads only its own part of a checkpoint
serving.py       an engine on rank 0 that tells the other ranks what each step computes
with_pytorch.py  the same two cuts with PyTorch's own tools
"""
