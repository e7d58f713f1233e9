"""Fine-tune a Mixture-of-Experts model of transformers with its own Trainer, under a policy.

    python examples/hf_finetune.py                                      # a tiny random model, on a CPU or a GPU
    python examples/hf_finetune.py --model Qwen/Qwen3-30B-A3B --lora 16 --text book.txt --sequence 4096

Trains twice from the same weights, the trainer alone and under the policy, and compares losses and bytes. A model
that was named trains once, under the policy. `--lora` trains adapters of that rank on attention and experts: the
weights, gradients and moments of all of Qwen3-30B-A3B do not fit into one GPU. PEFT must be installed for it.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers

import pagestash as ps
import pagestash.hf

POLICY = Path(__file__).with_name("huggingface.toml")


def load(name: str | None, rank: int | None) -> torch.nn.Module:
    """The model, whose experts run by our block and the rest by our kernels as far as it can."""
    if name is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.bfloat16, experts_implementation="pagestash", use_cache=False
        )
    else:
        config = transformers.Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pagestash")
    if rank is not None:
        import peft

        adapters = peft.LoraConfig(
            r=rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = peft.get_peft_model(model, adapters)
    print(pagestash.hf.optimize(model))
    return model


def tokens(model: str | None, text: str | None, sequence: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of a text file, in bytes for the tiny model; without a file, random ones."""
    if text is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 256, (64 * sequence,), generator=generator)
    elif model is None:
        ids = torch.tensor(list(Path(text).read_bytes()))
    else:
        ids = transformers.AutoTokenizer.from_pretrained(model)(Path(text).read_text(), return_tensors="pt")
        ids = ids["input_ids"][0]
    rows = ids[: len(ids) // sequence * sequence].view(-1, sequence)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(policy: ps.Policy, arguments: argparse.Namespace) -> tuple[list[float], ps.Keeper]:
    model = load(arguments.model, arguments.lora)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=arguments.out or folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-5 if arguments.model else 1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=False,  # a bar of steps, and each step's loss
            bf16=arguments.model is not None,
        )
        data = tokens(arguments.model, arguments.text, arguments.sequence)
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
        keeper = pagestash.hf.wrap(trainer, policy)
        trainer.train()
        if arguments.out:
            trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], keeper


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of the hub or a folder; without it, a tiny random one")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank, not the weights"
    )
    parser.add_argument("--text", help="a text file to train on; without it, random tokens")
    parser.add_argument("--policy", default=str(POLICY))
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="a folder for the trained model")
    chosen = parser.parse_args(arguments)
    policy = ps.Policy.load(chosen.policy)
    if chosen.model is None:  # whose tensors are too small for a link
        small = [
            replace(rule, min_bytes=0, prefetch_bytes=0 if rule.offloads else None) for rule in policy.rules
        ]
        policy = ps.Policy(small, policy.pool)
    losses, keeper = train(policy, chosen)
    print("losses:", *losses)
    if chosen.model is None:
        plain, _ = train(ps.Policy(), chosen)
        print(f"losses equal to those of the trainer alone: {losses == plain}")
    for home, held in keeper.stats().homes.items():
        print(f"{home}: {held.peak:,} bytes at the peak")


if __name__ == "__main__":
    main()
