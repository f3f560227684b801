"""More than one device: the model cut over the ranks of torch.distributed.

plan.py          which part of every matrix a rank holds; no tensors
collectives.py   what ranks tell each other, and a ledger of the bytes
tensor.py        every matrix cut; two sums a layer; the sequence cut as well
pipeline.py      some layers a rank, and micro-batches
"""
