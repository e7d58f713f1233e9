"""Torch's private API is used in `torch_internals.py` alone, and what is missing there is named."""

import ast
import logging
import runpy
import subprocess
import sys

import pytest
import torch
from support.imports import SOURCE

from pagestash import torch_internals
from pagestash.torch_internals import TorchInternalMissing, internal, internal_if_called

OWN = "torch_internals.py"
ON_OBJECTS = {
    "_cdata", "_use_count", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_forward_hooks", "_forward_pre_hooks", "_local_tensor", "_sequence_nr", "_indices", "_values", "_scale",
    "_growth_tracker", "_per_optimizer_states", "_stage", "_stages", "_num_stages", "_n_microbatches",
    "_has_backward", "_orig_mod", "_compiled_call_impl", "_is_replica", "_step_supports_amp_scaling",
}  # fmt: skip
"""Private attributes of torch's objects; our own have some of these names on `self`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_uses(text: str) -> list[str]:
    """What a file uses of torch that has no public name."""
    tree = ast.parse(text)
    roots = {"torch"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            roots |= {alias.asname for alias in node.names if alias.name in names and alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            roots |= {alias.asname or alias.name for alias in node.names}
        else:
            continue
        found += [name for name in names if any(map(is_private, name.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            of_torch = name in roots and node.attr != "_version"
            of_object = node.attr in ON_OBJECTS and not (isinstance(node.value, ast.Name) and name == "self")
            if of_torch or of_object:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in ON_OBJECTS:
                found.append(ast.unparse(node))
    return found


def test_no_other_module_uses_a_private_name_of_torch():
    found = {
        path.relative_to(SOURCE).as_posix(): uses
        for path in sorted(SOURCE.rglob("*.py"))
        if (uses := private_uses(path.read_text()))
    }
    assert OWN in found
    assert [name for name in found if name != OWN] == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.autograd.grad_mode import _unsafe_preserve_version_counter",
        "torch._C._storage_Use_Count(key)",
        "from torch import nn\nnn.modules.module._global_forward_hooks",
        "torch.cuda._sleep(1)",
        "key = tensor.untyped_storage()._cdata",
        "self.model._buffers",
        "getattr(tensor, '_local_tensor', tensor)",
    ],
)
def test_a_private_use_is_found(line):
    assert private_uses(line)


@pytest.mark.parametrize(
    "line", ["self._buffers = []", "tensor._version", "from torch import nn", "torch.__version__"]
)
def test_what_is_public_is_none(line):
    assert private_uses(line) == []


def test_a_missing_attribute_is_named_with_the_versions():
    with pytest.raises(TorchInternalMissing) as raised:
        internal(torch._C, "_autograd._gone")
    assert str(raised.value) == (
        f"pagestash uses torch's torch._C._autograd._gone, which torch {torch.__version__} does not have; "
        "versions checked: 2.11, 2.13"
    )


def test_what_few_features_need_is_refused_when_it_is_called():
    gone = internal_if_called(torch.cuda, "_gone")
    with pytest.raises(TorchInternalMissing, match=r"torch\.cuda\._gone"):
        gone(1)


@pytest.mark.parametrize(("version", "lines"), [("2.13.0+cpu", 0), ("9.1.0", 1)])
def test_an_unknown_version_works_and_is_logged(monkeypatch, caplog, version, lines):
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.DEBUG, "pagestash"):
        names = runpy.run_path(torch_internals.__file__)
    assert len(caplog.records) == lines
    assert names["storage_key"](torch.empty(1)) > 0


def test_import_names_what_a_step_cannot_do_without(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    with pytest.raises(ImportError, match=r"torch\._C\._current_autograd_node, which torch"):
        runpy.run_path(torch_internals.__file__)


def test_both_keys_of_a_storage_are_one():
    tensor = torch.empty(3)
    assert torch_internals.storage_key(tensor[1:]) == torch_internals.key_of_storage(tensor.untyped_storage())


def test_a_keeper_loads_neither_dynamo_nor_pipelining():
    """Each takes a second or two, and only those who compile or have a pipeline need it."""
    code = "import sys, pagestash.step.graphed, pagestash.profiling; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "pagestash.saved.keeper" in loaded
    assert not {"torch._dynamo", "torch.distributed.pipelining"} & set(loaded)
