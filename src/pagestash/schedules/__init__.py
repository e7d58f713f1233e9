"""What a schedule of `torch.distributed.pipelining` does on this rank, in which order, and hearing of it."""
