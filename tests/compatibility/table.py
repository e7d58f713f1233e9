"""What goes with what: the rows of `docs/compatibility.md`, and the test behind each cell.

    python tests/compatibility/table.py         writes the page

A cell is *equal* (losses and weights are equal to the last bit with and without the home, and bytes moved), or
*refused*, by words that a test matches, or *not tested*, with the reason. `test_compatibility.py` runs the features
of this folder; of the others it checks that the test that a row names is there.
"""

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
HOMES = ("stash", "offload", "recompute")
EQUAL = "equal"


@dataclass(frozen=True)
class Row:
    """One feature."""

    title: str
    test: str
    """A function of `one_rank.py` or `two_ranks.py`; of other rows a file of tests and the name of one in it."""
    refused: dict[str, str] = field(default_factory=dict)
    """The words of homes that do not go with it."""
    untested: dict[str, str] = field(default_factory=dict)
    """Why a home was not tried."""
    note: str = ""

    def cell(self, home: str) -> str:
        if home in self.refused:
            return "refused"
        return f"not tested: {self.untested[home]}" if home in self.untested else EQUAL


COMPILED_AROUND = "which is inside the model, and torch.compile makes one graph of that"
ONE_RANK = [
    Row("a loop of your own", "float32"),
    Row("`torch.autocast`", "autocast"),
    Row("`GradScaler`", "grad_scaler"),
    Row("gradient accumulation", "accumulation"),
    Row("LoRA (PEFT)", "lora"),
    Row("`torch.utils.checkpoint` inside of a region", "checkpointing"),
    Row("`torch.utils.checkpoint` around a region", "checkpointed_regions"),
    Row("`torch.compile(module)` of a region", "compiled_layers"),
    Row(
        "`module.compile()` of a region",
        "compiled_in_place",
        refused={"recompute": r"put torch.compile\(module\) in its place"},
        note="put `torch.compile(module)` in its place",
    ),
    Row(
        "`torch.compile` around a region",
        "compiled_around",
        refused=dict.fromkeys(HOMES, COMPILED_AROUND),
        note="compile the region itself, or smaller parts",
    ),
]
TWO_RANKS = [
    Row("DDP", "ddp"),
    Row("FSDP1, `use_orig_params=True`", "fsdp1"),
    Row("FSDP2", "fsdp2"),
    Row("tensor parallelism (`parallelize_module`)", "tensor_parallel"),
    Row("pipeline: 1F1B", "pipeline"),
    Row("pipeline: interleaved 1F1B", "interleaved"),
    Row("pipeline: interleaved zero bubble", "zero_bubble"),
    Row("expert parallelism, padded all-to-all", "experts"),
    Row("expert parallelism, exact all-to-all", "exact_experts"),
]
DEEPSPEED = "integrations/test_deepspeed.py test_losses_and_weights_are_those_without_a_policy"
ZERO3 = "ZeRO-3 frees them after each forward"
TITAN = "integrations/test_torchtitan.py "
MEGATRON = "integrations/test_megatron.py "
FRAMEWORKS = [
    Row(
        "Trainer of transformers",
        "integrations/test_trainer.py test_losses_and_weights_are_those_of_the_trainer_alone",
    ),
    Row("TRL: SFT", "integrations/test_trl.py test_losses_and_weights_are_those_of_the_trainer_alone"),
    Row("TRL: DPO", "integrations/test_trl.py test_preferences_beside_a_reference_model"),
    Row("TRL: GRPO", "integrations/test_trl.py test_groups_are_generated_aside"),
    Row("accelerate", "integrations/test_accelerate.py test_losses_and_weights_are_those_without_a_policy"),
    Row("DeepSpeed, ZeRO-1 and ZeRO-2", DEEPSPEED),
    Row("DeepSpeed, ZeRO-3", DEEPSPEED, refused={"recompute": ZERO3}, note="use ZeRO-2 to recompute"),
    Row("Lightning: Trainer", "integrations/test_lightning.py test_each_home_alone"),
    Row(
        "Lightning: DDP, FSDP2",
        "integrations/test_lightning.py test_two_ranks_with_ddp_and_with_fsdp2",
    ),
    Row("Fabric", "integrations/test_lightning.py test_fabric_needs_no_adapter"),
    Row("torchtitan: Qwen3-MoE, DeepSeek-V3, gpt-oss", TITAN + "test_losses_norms_and_weights"),
    Row(
        "torchtitan: `--compile.enable`, whole blocks",
        TITAN + "test_whole_blocks_are_compiled",
        refused={"recompute": "was compiled by"},
        note="compile, or recompute",
    ),
    Row("torchtitan: FSDP2, EP, 1F1B, interleaved 1F1B", TITAN + "test_two_ranks"),
    Row("Megatron-Core: one rank", MEGATRON + "test_losses_norms_and_weights_are_those_without_a_policy"),
    Row("Megatron-Core: beside its own recomputation", MEGATRON + "test_beside_megatrons_own_recomputation"),
    Row("Megatron-Core: EP, 1F1B, interleaved 1F1B", MEGATRON + "test_two_ranks"),
    Row("ms-swift: `swift sft`", "integrations/test_swift.py test_weights_are_those_without_a_policy"),
    Row("verl: FSDP engine, by a stand-in", "integrations/test_verl.py test_losses_and_weights"),
]
UNTESTED = [
    ("context parallelism", "needs attention over several GPUs"),
    ("CUDA graphs", "need a GPU: `tests/gpu` has their tests, for all homes"),
    (
        "QLoRA by bitsandbytes",
        "needs a GPU; other quantised weights of adapted experts: `tests/integrations/test_lora.py`",
    ),
    ("Megatron-Core with Transformer Engine", "does not install without CUDA"),
    ("DeepEP, HybridEP", "need several GPUs; what they hand over: `tests/moe/test_sorted_rows.py`"),
    ("axolotl", "its pins (torch up to 2.13, 40 exact versions) did not install: run by hand, with others"),
    ("NeMo Automodel's recipes", "are for GPUs alone; its model classes were run by hand"),
    ("verl itself", "has engines for GPUs and NPUs alone"),
    ("ZeRO-3, parameters offloaded to the host or NVMe", "compiles operators for the machine"),
]


def page() -> str:
    return f"""# Compatibility

What goes with what, feature by home. `tests/compatibility/table.py` writes this page, and a test stands behind each
cell.

- **equal**: losses and weights are equal to the last bit with and without the home, and bytes moved;
- **refused**: an error says so by name before or in the first step, and what to do instead;
- **not tested**, with the reason.

All on CPUs. The tables of one and two ranks are run by `make test-all`, those of frameworks by `make frameworks`,
where the framework is not a part of the test environment.

## One rank

{_table(ONE_RANK)}

## Two ranks

{_table(TWO_RANKS)}

## Frameworks

Versions, and what of a GPU was replaced, are on their pages: [transformers, TRL, ms-swift](huggingface.md),
[accelerate, DeepSpeed, verl](frameworks.md), [Lightning](lightning.md), [torchtitan](torchtitan.md),
[Megatron-Core](megatron.md).

{_table(FRAMEWORKS)}

## Not tested

| | why |
| --- | --- |
""" + "".join(f"| {title} | {why} |\n" for title, why in UNTESTED)


def _table(rows: list[Row]) -> str:
    lines = [f"| | {' | '.join(HOMES)} | instead |", "| --- |" + " --- |" * (len(HOMES) + 1)]
    lines += [f"| {row.title} | {' | '.join(map(row.cell, HOMES))} | {row.note} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
