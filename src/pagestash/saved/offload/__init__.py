"""The `offload` home: saved tensors wait in host memory.

Read in this order: `plan` (the order of a step, and which groups stay), `window` (every decision, over byte counts
alone), `split` (how many bytes of a tensor travel), `headroom` (how far memory is from its peak), `measured`
(what the first step shows), `transfers` (streams, events and copies), `moving` (`Offload` itself).
"""
