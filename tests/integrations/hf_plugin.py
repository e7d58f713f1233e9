"""A pytest plugin that runs transformers' own model tests with our experts in the place of `grouped_mm`.

    make hf-tests SRC=<a checkout of transformers>

Their tests compare `grouped_mm` with eager, train with it and checkpoint it, by name; they run unmodified. At the
end the plugin says for each model how often our block ran and how often our function handed over. If our block
never ran, the run fails: tests that never came to it are not taken for passed ones.

Without gradients our function hands over to theirs. With EVERY_CALL=1 in the environment our block runs there, too.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.moe as registry

from pagestash.integrations.hf import experts

OURS = "by our block"
HANDED_OVER = {False: "handed over without gradients", True: "handed over with gradients"}
EVERY_CALL = os.environ.get("EVERY_CALL") == "1"
calls: dict[str, Counter[str]] = defaultdict(Counter)
"""How experts were run, by the folder of the test file."""
theirs = registry.grouped_mm_experts_forward
at: dict[str, Any] = {"model": "", "how": OURS}


def experts_forward(self: Any, *arguments: Any) -> Any:
    if torch.compiler.is_compiling():  # a graph that counts is compiled anew for each count
        return experts.experts_forward(self, *arguments)
    at["how"] = OURS
    grad = torch.is_grad_enabled()
    with torch.set_grad_enabled(grad or (EVERY_CALL and not torch.is_inference_mode_enabled())):
        result = experts.experts_forward(self, *arguments)
    calls[at["model"]][at["how"]] += 1
    return result if grad else result.detach()


def counted(self: Any, *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return theirs(self, *arguments)
    at["how"] = HANDED_OVER[torch.is_grad_enabled()]
    return theirs(self, *arguments)


# Before the tests import them by name.
registry.grouped_mm_experts_forward = experts_forward
registry.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", experts_forward)
experts.grouped_mm_experts_forward = counted


def pytest_runtest_setup(item: pytest.Item) -> None:
    at["model"] = Path(item.path).parent.name


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    asked = session.testscollected and not session.config.option.collectonly
    if asked and exitstatus == pytest.ExitCode.OK and not any(found[OURS] for found in calls.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for model, found in sorted(calls.items()):
        terminalreporter.write_line(f"calls of experts, {model}: {_said(found)}")
    total = sum(calls.values(), Counter())
    terminalreporter.write_line(f"calls of experts: {_said(total)}")
    if not total[OURS]:
        terminalreporter.write_line("our block never ran: this run shows nothing")


def _said(found: Counter[str]) -> str:
    return ", ".join(f"{found[how]:,} {how}" for how in (OURS, *HANDED_OVER.values()))
