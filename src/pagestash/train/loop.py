"""`train`: run a plan step by step."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pagestash.keeper import Keeper
from pagestash.models.decoder import Decoder
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.dispatch import Dispatch
from pagestash.step.graphed import GraphedStep
from pagestash.train import checkpoint
from pagestash.train.config import TrainConfig
from pagestash.train.folder import RunError, Settings, claim, reason, write_settings
from pagestash.train.metrics import METRICS, JsonLines, StepListener, TensorBoard
from pagestash.train.parallel import RunRanks, clip_gradients, make_dispatch
from pagestash.train.passes import PipelinedModel, WholeModel
from pagestash.train.prepare import RunPlan, check_unchanged
from pagestash.train.state import TrainState, make_optimizer


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The last step of a run, and whether it was stopped before the end of its plan."""

    step: int
    stopped: bool


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of `step` (the first is 1): linear warm-up over `warmup` steps, then cosine decay."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, config.decay_steps - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def train(plan: RunPlan, listeners: Sequence[StepListener] = (), *, backend: str = "auto") -> TrainResult:
    """Run a plan to its last step, or until Ctrl-C; both end with a checkpoint.

    A problem with files (another run writes there, a damaged checkpoint, a full disk) raises `RunError`.
    """
    with ExitStack() as stack:
        stack.enter_context(_deterministic(plan.config.deterministic and plan.device.type == "cuda"))
        ranks = RunRanks(plan.world, plan.device, shard=plan.config.shard)
        stack.callback(ranks.close)
        result = _train_on(ranks, plan, listeners, backend)
    # Not after an error: a thread may then wait for a rank that is gone.
    ranks.end_threads()
    return result


def _train_on(ranks: RunRanks, plan: RunPlan, listeners: Sequence[StepListener], backend: str) -> TrainResult:
    """The whole run, in a frame of its own: then only cycles and caches still refer to its process groups."""
    with ExitStack() as stack:
        ranks.any(False)  # every rank has read the folder before the first one writes to it
        ranks.lead(lambda: _begin(plan, stack))
        run = _Run(plan, ranks, backend)
        stack.callback(run.keeper.detach)
        stop = stack.enter_context(_stop_when_asked())
        heard: list[StepListener] = []
        ranks.lead(lambda: heard.extend([*run.open(stack), *listeners]))
        return run.to_the_end(heard, stop)


def _begin(plan: RunPlan, stack: ExitStack) -> None:
    """Lock the folder for this run, and verify the checkpoint that it starts from."""
    stack.enter_context(claim(plan.out))
    check_unchanged(plan)
    if plan.start is not None:
        checkpoint.verify(plan.start)


class _Run:
    """One training run: its model, optimizer and position."""

    def __init__(self, plan: RunPlan, ranks: RunRanks, backend: str) -> None:
        config, world = plan.config, plan.world
        self.plan, self.config, self.ranks = plan, config, ranks
        self.lines: JsonLines | None = None
        self.done = 0
        torch.manual_seed(config.seed)
        self.models = self._make_models()
        here = plan.decoder.experts // world.expert_parallel
        for model in self.models:
            model.initialise(config.seed, world.expert_rank * here)
            ranks.shard(model)
        self.copies = {p: count for model in self.models for p, count in ranks.copies(model).items()}
        self.optimizer = make_optimizer(self.models, config)
        self.state = TrainState(self.models, self.optimizer, ranks)
        if plan.start is not None:
            self.state.load(plan.start)
            self.done = int(checkpoint.read_state(plan.start)["step"])
        self.keeper = Keeper(plan.policy, backend=backend)
        # A rule may match only layers of another rank; `prepare` checked that it matches some.
        others = [name for name, _ in Decoder(plan.decoder, device="meta").named_modules()]
        for model in self.models:
            self.keeper.attach(model, others=others)
        whole = WholeModel if plan.placed is None else PipelinedModel
        self.passes = whole(plan, ranks, self.models, self.keeper, self._autocast)
        # Counts every run of a step, reruns included; the host reads it with the results.
        self.runs = torch.zeros((), dtype=torch.int64, device=plan.device)
        self.step = GraphedStep(
            self._train_step,
            self.keeper,
            optimizer=self.optimizer,
            graph=plan.graphed,
        )

    def open(self, stack: ExitStack) -> list[StepListener]:
        """Open the files that this run writes, closed with the stack; writes the settings before the first step."""
        self._write_settings(self.done or None)
        self.lines = JsonLines(self.plan.out, self.done)
        stack.callback(self.lines.close)
        files: list[StepListener] = [self.lines]
        if self.config.tensorboard:
            board = TensorBoard(self.plan.out)
            stack.callback(board.close)
            files.append(board)
        return files

    def _make_models(self) -> list[Decoder]:
        """The model, or this rank's stages of it."""
        plan = self.plan
        made: Any = {"make_dispatch": self._make_dispatch, "device": plan.device}
        if plan.placed is None:
            return [Decoder(plan.decoder, **made)]
        stages = plan.placed.of_rank(plan.world.pipeline_rank)
        return [Decoder(plan.decoder, part=stage.layers, **made) for stage in stages]

    def _make_dispatch(self, config: MoEConfig) -> Dispatch | None:
        world = self.plan.world
        if self.ranks.experts is None or (world.expert_parallel == 1 and world.size > 1):
            return None
        return make_dispatch(config, self.config.dispatch, self.ranks.experts, self.config.tokens)

    def _train_step(self, tokens: torch.Tensor) -> dict[str, Any]:
        self.runs.add_(1)
        loss, held = self.passes(tokens)
        for model in self.models:
            self.ranks.average(model)
        norm = clip_gradients(self.copies, self.config.clip, self.ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for model in self.models:
            model.update_router_bias(self.config.bias_rate, self.ranks.peers)
        return {
            "loss": self.ranks.mean(loss),
            "grad_norm": norm,
            "held": held,
            "runs": self.runs.clone(),
        }

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.plan.device.type != "cuda":
            return nullcontext()
        # Without the cache: in a captured step a cached cast of a weight would outlive the weight's update.
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)

    def to_the_end(self, listeners: Sequence[StepListener], stop: "_Stop") -> TrainResult:
        config = self.config
        every = config.log_every or (1 if self.plan.device.type == "cpu" else 10)
        waiting: list[tuple[int, float, dict[str, Any]]] = []
        since, runs = time.perf_counter(), 0
        while self.done < config.steps:
            number = self.done + 1
            rate = learning_rate(number, config)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            waiting.append((number, rate, self.step(self._batch(number))))
            self.done = number
            due = config.checkpoint_every and number % config.checkpoint_every == 0
            alone = self.plan.world.size == 1
            if due or number == config.steps or number % every == 0 or (alone and stop.asked):
                self.step.wait()
                seconds = (time.perf_counter() - since) / len(waiting)
                failed: RunError | None = None
                try:
                    for finished in waiting:
                        line, runs = self._line(*finished, seconds, runs)
                        for listener in listeners:
                            listener.step(line)
                except OSError as error:
                    failed = self._cannot_write(error)
                waiting.clear()
                since = time.perf_counter()
                # All ranks check at the same step, so that they stop together.
                if self.ranks.any(stop.asked or failed is not None):
                    self.ranks.agree(failed)
                    self._save()
                    return TrainResult(number, number < config.steps)
            if due or number == config.steps:
                self._save()
                since = time.perf_counter()
        return TrainResult(self.done, False)

    def _batch(self, step: int) -> torch.Tensor:
        config, world = self.config, self.plan.world
        first = world.peer * config.batch
        tokens = self.plan.corpus.windows(
            step, config.seed, config.batch * world.peers, config.sequence + 1, first, first + config.batch
        )
        return tokens.to(self.plan.device)

    def _line(
        self, step: int, rate: float, result: dict[str, Any], seconds: float, runs: int
    ) -> tuple[dict[str, Any], int]:
        """The step's line of metrics, and the number of runs up to this step, reruns included."""
        total = int(result["runs"])
        again = total - runs - 1
        line = {
            "step": step,
            "loss": float(result["loss"]),
            "grad_norm": float(result["grad_norm"]),
            "lr": rate,
            "tokens": self.config.batch * self.config.sequence * self.plan.world.peers,
            "seconds": seconds,
            "saved_bytes": {home: int(size) for home, size in result["held"].items()},
            "overflow": again > 0,
            "rerun": again,
        }
        return line, total

    def _save(self) -> None:
        tensors = self.state.gather()
        self.ranks.lead(lambda: self._write_checkpoint(tensors))

    def _write_checkpoint(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        assert self.lines is not None
        self.lines.sync()
        counters = {
            "step": self.done,
            "tokens": self.done * self.config.batch * self.config.sequence * self.plan.world.peers,
            "corpus": self.plan.corpus.digest,
            "config": self.config.to_json(),
        }
        checkpoint.save(self.plan.out, self.done, tensors, counters, self.config.keep_checkpoints)
        self._write_settings(self.done)

    def _write_settings(self, step: int | None) -> None:
        plan = self.plan
        write_settings(plan.out, Settings(self.config.to_json(), plan.corpus.digest, step))

    def _cannot_write(self, error: OSError) -> RunError:
        last = checkpoint.latest(self.plan.out)
        left = "there is no checkpoint yet" if last is None else f"the last checkpoint is {last.name}"
        return RunError(f"{self.plan.out / METRICS} cannot be written ({reason(error)}); {left}")


@dataclass(slots=True)
class _Stop:
    asked: bool = False


@contextmanager
def _stop_when_asked() -> Iterator[_Stop]:
    """The first Ctrl-C (or SIGTERM) stops the run after its step; the second ends it at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        stop.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Use kernels that sum in a fixed order; an operation without one raises."""
    if not wanted:
        yield
        return
    # cuBLAS reads this once, at the first product on a GPU; without it torch refuses deterministic products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # Otherwise torch would fill every new tensor with NaN.
    memory: Any = torch.utils.deterministic
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    # Not warn_only: with it, attention keeps its nondeterministic kernels.
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
