"""Plans of `torch.distributed.pipelining` schedules: what a rank does in which order, and events as it runs."""
