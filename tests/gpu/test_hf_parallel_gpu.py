"""The dispatch of transformers' expert-parallel layers over NCCL: one rank, which is all that one GPU allows.

What transformers would do around it (from 5.19 on) is done by nobody here, so that any release will do.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support import error, same

pytest.importorskip("transformers", minversion="5.7")

from support.hf_gpu import CUDA, qwen, run, tokens, train

import pagestash as ps
import pagestash.hf
from pagestash.integrations.hf.expert_parallel import DispatchStyle

pytestmark = pytest.mark.gpu
TOKENS, CHOICES, EXPERTS = 512, 4, 16


def batch():
    return tokens(0, (1, TOKENS))


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mesh:
    def size(self):
        return 1

    def get_group(self):
        return dist.group.WORLD


class Style:
    """Of one rank: nothing is divided, and nobody shares a batch."""

    def install_forward(self, module, ep_mesh, tp_mesh):
        pass

    def transform_inputs_pre_forward(self, module, arguments, options, mesh, tp_mesh):
        return arguments, options

    def context_around_forward(self, module, mesh):
        return nullcontext()

    def transform_output_post_forward(self, module, output, mesh, tp_mesh, num_tokens):
        return output


def model(*, dispatched=True):
    made = qwen("pagestash", num_hidden_layers=1)
    if dispatched:
        for layer in made.model.layers:
            DispatchStyle(Style()).install_forward(layer.mlp.experts, Mesh())
    return made


@pytest.mark.parametrize(
    "room", [None, {"max_tokens": TOKENS}, {"max_tokens": TOKENS, "expected_rows": 1024}]
)
def test_one_rank_gives_what_the_layer_alone_gives(room):
    (wanted_loss, wanted), divided = run(model(dispatched=False), batch()), model()
    if room is not None:
        pagestash.hf.expert_parallel(divided, **room)
    loss, got = run(divided, batch())
    assert error(loss, wanted_loss) < 2e-2
    for name in wanted:
        assert error(got[name], wanted[name]) < 2e-2, name


def test_a_padded_layer_never_waits_for_the_device():
    divided = model()
    pagestash.hf.expert_parallel(divided, max_tokens=TOKENS)
    experts = divided.model.layers[0].mlp.experts
    x = torch.randn(TOKENS, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(TOKENS, EXPERTS, device=CUDA).argsort(1)[:, :CHOICES]
    weights = torch.rand(TOKENS, CHOICES, device=CUDA, requires_grad=True)
    experts(x, ids, weights).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x, ids, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps(*, graph, **room):
    divided = model()
    pagestash.hf.expert_parallel(divided, max_tokens=TOKENS, **room)
    pagestash.hf.optimize(divided)
    rule = ps.Rule("**.experts", "stash", min_bytes=0)
    losses, step = train(divided, rule, graph=graph, count=5, shape=(1, TOKENS))
    return losses, [p.detach().clone() for p in divided.parameters()], step.reruns


def test_a_captured_step_gives_the_bits_of_an_eager_one():
    captured, eager = steps(graph=True), steps(graph=False)
    assert captured[2] == eager[2] == 0
    assert same(captured[:2], eager[:2])


def test_a_step_that_had_no_room_is_run_again_as_if_it_had():
    losses, weights, reruns = steps(graph=True, pair_capacity=TOKENS)
    assert reruns > 0
    ample = steps(graph=True)
    assert same((losses, weights), ample[:2])


def test_exact_sizes_are_refused_in_a_capture():
    divided = model()
    run(divided, batch())
    torch.cuda.synchronize()
    given = batch()
    refused = pytest.raises(RuntimeError, match="a CUDA graph cannot hold an exchange of tokens")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        divided(input_ids=given, labels=given)
