"""Fewer bits for each number, and fewer numbers: from rounding to 2:4 sparsity."""
