"""Mixture-of-Experts: router, experts, layer; dropless, without a host sync."""

from pagestash.moe.config import MoEConfig
from pagestash.moe.dispatch import Dispatch, Received
from pagestash.moe.layer import Experts, MoE, SharedExperts
from pagestash.moe.router import Router

__all__ = ["Dispatch", "Experts", "MoE", "MoEConfig", "Received", "Router", "SharedExperts"]
