"""Kernels of the MoE layer: choose, route, permute, grouped products and the gated activation."""
