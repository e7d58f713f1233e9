"""Products of expert-sorted rows with each expert's matrix, behind one seam.

`products_for(like, ...)` says who multiplies: torch's `F.grouped_mm`, everywhere, or quack's CuTe kernels, where
they are installed, the GPU is one that `tiles.py` has a table for, and tensors are bf16. Two runs of one backend
give the same bits; two backends need not.
"""
