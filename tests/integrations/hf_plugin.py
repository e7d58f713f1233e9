"""A pytest plugin that runs transformers' own model tests with our experts in the place of `grouped_mm`.

    make hf-tests SRC=<a checkout of transformers of the installed version>

Their tests compare `grouped_mm` with eager, train with it and checkpoint it, by name; they run unmodified. At the
end it says how often our block ran, so that tests that never came to it are not taken for passed ones.
"""

from typing import Any

import torch
import transformers.integrations.moe as registry

from pagestash.integrations.hf import experts

calls = {"by our block": 0, "handed over without gradients": 0, "handed over with gradients": 0}
theirs = registry.grouped_mm_experts_forward


def experts_forward(self: Any, *arguments: Any) -> Any:
    return experts.experts_forward(self, *arguments)


def counted(self: Any, *arguments: Any) -> Any:
    calls[f"handed over {'with' if torch.is_grad_enabled() else 'without'} gradients"] += 1
    return theirs(self, *arguments)


def runs_counted(module: Any, inner: Any = experts._runs) -> Any:
    found = inner(module)
    calls["by our block"] += found is not None
    return found


# Before the tests import them by name.
registry.grouped_mm_experts_forward = experts_forward
registry.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", experts_forward)
experts.grouped_mm_experts_forward, experts._runs = counted, runs_counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        "calls of experts: " + ", ".join(f"{count} {how}" for how, count in calls.items())
    )
