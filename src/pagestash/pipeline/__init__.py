"""Pipeline parallelism by `torch.distributed.pipelining`: schedules read ahead, layers placed by memory."""
