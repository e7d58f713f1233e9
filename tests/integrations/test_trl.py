"""TRL's trainers under a policy, and its fused head beside ours; its losses bit for bit."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.7")
trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")

from support.compare import same  # noqa: E402
from tiny import tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402

RULES = [
    ps.Rule("model.layers.*.mlp.experts", "stash", min_bytes=0),
    ps.Rule("model.layers.*.*_layernorm", "recompute", min_bytes=0),
    ps.Rule("model.layers.*.self_attn", "offload", min_bytes=0, prefetch_bytes=0),
]
HEAD = "TRL has replaced its forward, and takes the loss by chunks itself"


@pytest.fixture(scope="module")
def tokenizer():
    """Words are numbers: "w17" is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def data(count=8):
    """Sequences of different lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 96, (6 + number % 4,), generator=generator) for number in range(count)]
    return datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in rows])


DEFAULTS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,  # TRL has it on
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def trainer_of(model, tokenizer, folder, peft_config=None, **settings):
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**{**DEFAULTS, "output_dir": str(folder), **settings}),
        train_dataset=data(),
        eval_dataset=data(4),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def model_of(*, optimised=True):
    model = tiny("Qwen3-MoE", experts="pagestash")
    if optimised:
        pagestash.hf.optimize(model)
    return model


def figures(trainer):
    """What was logged, without times."""
    names = ("loss", "eval_loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_mean_token_accuracy")
    return [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history]


def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.down_proj"],
        init_lora_weights=False,
    )


@pytest.mark.parametrize("setting", ["plain", "bf16", "lora"])
def test_losses_and_weights_are_those_of_the_trainer_alone(tmp_path, tokenizer, setting):
    runs = {}
    for name in ("plain", "kept"):
        torch.manual_seed(5)
        more = {"bf16": {"bf16": True}, "lora": {"peft_config": lora()}}.get(setting, {})
        trainer = trainer_of(model_of(), tokenizer, tmp_path / name, **more)
        if setting == "lora":  # the trainer has put the adapters there
            assert {each.part for each in pagestash.hf.optimize(trainer.model).replaced} == {"lora"}
        if name == "kept":
            method = trainer.training_step
            keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
            assert trainer.training_step == method  # TRL's context is what is bracketed
        trainer.train()
        runs[name] = figures(trainer), trainer.model.state_dict()
    assert len(runs["plain"][0]) > 4
    assert runs["kept"][0] == runs["plain"][0]
    assert same(runs["kept"][1], runs["plain"][1])
    assert all(keeper.stats().homes[home].peak for home in ("stash", "offload", "recompute"))


def test_preferences_beside_a_reference_model(tmp_path, tokenizer):
    """DPO's step runs the reference without gradients; what that computes is no part of the policy's."""

    def words(seed, count):
        generator = torch.Generator().manual_seed(seed)
        return "".join(
            f" w{number}" for number in torch.randint(3, 96, (count,), generator=generator).tolist()
        )

    rows = [
        {"prompt": words(row, 3), "chosen": words(100 + row, 4), "rejected": words(200 + row, 5)}
        for row in range(4)
    ]
    runs = {}
    for name in ("plain", "kept"):
        settings = trl.DPOConfig(**{**DEFAULTS, "output_dir": str(tmp_path / name), "eval_strategy": "no"})
        trainer = trl.DPOTrainer(
            model=model_of(),
            ref_model=model_of(),
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        if name == "kept":
            keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        runs[name] = figures(trainer), trainer.model.state_dict()
    assert same(runs["kept"][1], runs["plain"][1])
    assert runs["kept"][0] == runs["plain"][0]
    assert all(keeper.stats().homes[home].peak for home in ("stash", "offload", "recompute"))


def test_groups_are_generated_aside(tmp_path, tokenizer):
    """GRPO generates inside of `_prepare_inputs`, and computes old log-probabilities there, without gradients."""

    def length(completions, **_):
        return [float(len(each)) for each in completions]

    runs = {}
    prompts = datasets.Dataset.from_list([{"prompt": f"w{3 + row} w{4 + row}"} for row in range(8)])
    for name in ("plain", "kept"):
        skipped = ("eval_strategy", "eval_steps", "gradient_accumulation_steps")
        defaults = {key: value for key, value in DEFAULTS.items() if key not in skipped}
        settings = {"num_generations": 2, "max_completion_length": 5, "output_dir": str(tmp_path / name)}
        torch.manual_seed(5)
        trainer = trl.GRPOTrainer(
            model=model_of(),
            reward_funcs=length,
            args=trl.GRPOConfig(**{**defaults, **settings}),
            train_dataset=prompts,
            processing_class=tokenizer,
        )
        if name == "kept":
            keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        runs[name] = figures(trainer), trainer.model.state_dict()
    assert same(runs["kept"][1], runs["plain"][1])
    assert runs["kept"][0] == runs["plain"][0]
    assert all(keeper.stats().homes[home].peak for home in ("stash", "offload", "recompute"))


def test_a_checkpoint_of_a_wrapped_trainer_goes_on_without_it(tmp_path, tokenizer):
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    weights = []
    for name in ("plain", "kept"):
        trainer = trainer_of(model_of(), tokenizer, tmp_path / name, **settings)
        if name == "kept":
            pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        later = trainer_of(model_of(), tokenizer, tmp_path / "later", **settings)
        later.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        assert later.state.global_step == 2
        weights.append(later.model.state_dict())
    assert same(weights[0], weights[1])


def test_unwrap_leaves_the_trainer_as_it_was(tmp_path, tokenizer):
    trainer = trainer_of(model_of(), tokenizer, tmp_path)
    before = dict(trainer.__dict__)
    keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    pagestash.hf.unwrap(trainer, keeper)
    context = "maybe_activation_offload_context"
    assert type(trainer.__dict__[context]) is type(before[context])
    assert {**trainer.__dict__, context: None} == {**before, context: None}


# --- who fuses the head ---


def test_the_head_that_trl_fuses_is_left_alone_in_either_order(tmp_path, tokenizer):
    """Losses are the same whether `optimize` comes before the trainer is made or after."""
    logged = []
    for optimised in (True, False):
        trainer = trainer_of(model_of(optimised=optimised), tokenizer, tmp_path)
        theirs = trainer.model.forward
        report = pagestash.hf.optimize(trainer.model)
        assert trainer.model.forward == theirs
        left = {(each.part, each.why) for each in report.left}
        assert ("head", "optimised already" if optimised else HEAD) in left
        assert ("norm" in {each.part for each in report.replaced}) is not optimised
        trainer.train()
        logged.append(figures(trainer))
    assert logged[0] == logged[1]


def test_undo_leaves_the_head_that_trl_fused(tmp_path, tokenizer):
    plain = trainer_of(model_of(optimised=False), tokenizer, tmp_path)
    plain.train()
    model = model_of(optimised=False)
    report = pagestash.hf.optimize(model)
    trainer = trainer_of(model, tokenizer, tmp_path)
    report.undo()
    trainer.train()
    assert figures(trainer) == figures(plain)
    others = [name for name, module in model.named_modules() if name and "forward" in module.__dict__]
    assert others == []


def test_offloading_by_trl_is_refused(tmp_path, tokenizer):
    trainer = trainer_of(model_of(), tokenizer, tmp_path)
    trainer.args.activation_offloading = True
    with pytest.raises(ValueError, match="set activation_offloading=False"):
        pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))


@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_the_trainers_that_the_page_names_enter_the_context_that_wrap_replaces(kind):
    import inspect

    from pagestash.integrations.hf.trainer import CONTEXT

    text = inspect.getsource(getattr(trl, kind))
    assert f"self.{CONTEXT} = " in text
    assert f"with self.{CONTEXT}:" in text
