"""More than one device: the model cut over the ranks of torch.distributed.

plan.py          which part of every matrix a rank holds; no tensors
collectives.py   what ranks tell each other, and a ledger of the bytes
tensor.py        every matrix cut; two sums a layer; the sequence cut as well
pipeline.py      some layers a rank, and micro-batches
loading.py       each rank reads its own part of a checkpoint
serving.py       an engine on rank 0, whose steps the others compute as well
with_pytorch.py  the same two cuts by what PyTorch ships
step_time.py     how long a step takes on 1 to 64 GPUs, from the bytes; no tensors
"""
