"""Every kernel goes to the device of its tensors, whichever is current.

There is no second GPU here: its tensors are fake, the current device is a number, and a kernel writes down what
that was when it was started. That such launches are then right and in order on two real GPUs is not tested.
"""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pagestash.kernels
from pagestash.kernels import backend
from pagestash.kernels.backend import launch
from pagestash.kernels.layer.rms_norm import rms_norm
from pagestash.kernels.layer.rope import rotate
from pagestash.kernels.loss.cross_entropy import LossOptions, softmax_loss_
from pagestash.kernels.loss.scale import scaled
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.choose_experts import topk
from pagestash.kernels.moe.combine import combine, weight_gradient
from pagestash.kernels.moe.ends import cut_bounds
from pagestash.kernels.moe.low_rank import add_product_
from pagestash.kernels.moe.permute import permute
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.pages import eight_bits

triton = pytest.importorskip("triton")
SECOND = torch.device("cuda", 1)


@pytest.fixture
def started(monkeypatch):
    """(kernel, device that was current), of each launch; the first device is current at the start."""
    seen, current = [], [0]

    @contextmanager
    def switch(device):
        before, current[0] = current[0], torch.device(device).index
        yield
        current[0] = before

    def note(kernel, grid):
        return lambda *operands, **constants: seen.append((kernel.__name__, current[0]))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(backend, "_multiprocessors", lambda device: 4)
    monkeypatch.setattr(eight_bits, "converts", lambda device: True)
    for kind in {triton.JITFunction, type(gated.forward_kernel)}:
        monkeypatch.setattr(kind, "__getitem__", note)
    return seen


def on_second(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=SECOND)


def call_gated():
    h, rows = on_second(8, 32), on_second(1, dtype=torch.int32)
    gated.forward(h, RowInfo(rows))
    gated.backward(h, on_second(8, 16), RowInfo(rows))


def call_codes():
    shape = eight_bits.CodeShape.of(8 * 32, 8)
    codes, rows = on_second(8, shape.row_bytes, dtype=torch.uint8), on_second(1, dtype=torch.int32)
    eight_bits.encode(on_second(8 * 32), shape, codes, "triton", rows, tail=False)
    eight_bits.decode(codes, shape, on_second(8 * 32), "triton", rows, tail=False)


def call_routing():
    ids = on_second(4, 2, dtype=torch.int32)
    routing = route(ids, 3)
    topk(on_second(4, 3, dtype=torch.float32), 2)
    cut_bounds(routing.bounds, 3)


def call_rows():
    inverse = on_second(4, 2, dtype=torch.int32)
    rows = permute(on_second(4, 32), inverse, 256)
    combine(rows, inverse)
    weight_gradient(rows, inverse, on_second(4, 32))


def call_low_rank():
    ends = on_second(3, dtype=torch.int32)
    half = {"dtype": torch.float16}
    add_product_(on_second(8, 32, **half), on_second(8, 16, **half), on_second(3, 16, 32, **half), ends)


def call_loss():
    logits, labels = on_second(4, 32), on_second(4, dtype=torch.int64)
    scale = on_second(dtype=torch.float32)
    softmax_loss_(logits, labels, on_second(4, dtype=torch.float32), scale, LossOptions())
    scaled(logits, scale, torch.float32)


def call_layer():
    cos = on_second(1, 4, 16)
    rotate(on_second(2, 3, 4, 16), on_second(2, 3, 4, 16), cos, cos)
    rms_norm(on_second(4, 32), on_second(32), 1e-6)


CALLS = (call_gated, call_codes, call_routing, call_rows, call_low_rank, call_loss, call_layer)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_kernels_start_on_the_device_of_their_tensors(started, call):
    with FakeTensorMode():
        call()
    assert started
    assert {device for _, device in started} == {1}
    assert torch.cuda.current_device() == 0


def test_a_kernel_of_the_current_device_switches_nothing(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", None)
    launch(gated.forward_kernel, (1,), torch.device("cuda", 0))
    assert [device for _, device in started] == [0]


def test_an_error_names_the_kernel():
    class Broken:
        __module__, __name__ = "pagestash.kernels.moe.gated", "broken_kernel"

        def __getitem__(self, grid):
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room") as caught:
        launch(Broken(), (3,), torch.device("cpu"))
    assert caught.value.__notes__ == ["in pagestash.kernels.moe.gated.broken_kernel on cpu, grid (3,)"]


def launches_elsewhere(path: Path) -> list[int]:
    """Lines that start something as Triton would: `name[grid](...)`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Subscript)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id.endswith("kernel")
    ]


def test_kernels_are_started_in_one_place():
    package = Path(pagestash.kernels.__file__).parent
    found = {path.name: launches_elsewhere(path) for path in package.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} == {"backend.py"}
