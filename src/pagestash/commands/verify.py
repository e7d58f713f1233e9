"""`pagestash verify`."""

import torch

from pagestash.commands.checks import check_numbers, exit_code
from pagestash.commands.options import VerifyOptions
from pagestash.commands.show import show
from pagestash.commands.step import make_step
from pagestash.policy import Policy
from pagestash.verifying.result import Verification
from pagestash.verifying.verify import verify

OPTIMIZERS = ("none", "sgd", "momentum", "adamw")
DIFFERENT = 1


def run(options: VerifyOptions) -> int:
    """Verify and print; returns the exit code."""
    found: list[Verification] = []
    code = exit_code(lambda: found.append(_verify(options)))
    for report in found:
        show(report)
        code = 0 if report.equal else DIFFERENT
    return code


def _verify(options: VerifyOptions) -> Verification:
    check_numbers(steps=options.steps)
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    policy = Policy.load(options.policy)
    model, batch, autocast = make_step(options)
    return verify(
        model,
        batch,
        policy,
        optimizer=_optimizer(options.optimizer, model, fused=options.graphed or None),
        steps=options.steps,
        autocast=autocast,
        graphed=options.graphed,
    )


def _optimizer(name: str, model: torch.nn.Module, *, fused: bool | None) -> torch.optim.Optimizer | None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "none" or not parameters:
        return None
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9 if name == "momentum" else 0.0, fused=fused)
