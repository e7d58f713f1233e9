"""`wrap`: a Trainer's own losses under a policy, with accumulation, evaluation and checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from support.search import search_little
from support.tiers import slow

transformers = pytest.importorskip("transformers", minversion="5.7")
pytest.importorskip("accelerate")

from support.compare import same  # noqa: E402
from tiny import as_it_is, tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402

RULES = [
    ps.Rule("model.layers.*.mlp.experts", "stash", min_bytes=0),
    ps.Rule("model.layers.*.*_layernorm", "recompute", min_bytes=0),
    ps.Rule("model.layers.*.self_attn", "offload", min_bytes=0, prefetch_bytes=0),
]


def data(count=16):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 96, (11,), generator=generator) for _ in range(count)]
    # Microbatches of one update with different numbers of labels: their losses are no means of their own.
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(11) < number % 9, -100, row)}
        for number, row in enumerate(rows)
    ]


def trainer_of(model, folder, kind=None, **settings):
    defaults = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(**{**defaults, **settings})
    kind = kind or transformers.Trainer
    return kind(model=model, args=args, train_dataset=data(), eval_dataset=data(4))


def figures(trainer):
    """Losses of training and evaluation, and norms of gradients, as they were logged."""
    return [
        {key: entry[key] for key in ("loss", "eval_loss", "grad_norm") if key in entry}
        for entry in trainer.state.log_history
    ]


def losses(trainer):
    return [entry["loss"] for entry in figures(trainer) if "loss" in entry]


def model_of(*, optimised=True):
    model = tiny("Qwen3-MoE", experts="pagestash")
    if optimised:
        pagestash.hf.optimize(model)
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"bf16": True}, {"max_grad_norm": 0.1}], ids=["plain", "bf16", "clipped"]
)
def test_losses_and_weights_are_those_of_the_trainer_alone(tmp_path, settings):
    plain = trainer_of(model_of(), tmp_path / "plain", **settings)
    plain.train()
    trainer = trainer_of(model_of(), tmp_path / "kept", **settings)
    keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    trainer.train()
    assert len(figures(plain)) > 4
    assert figures(trainer) == figures(plain)
    assert same(trainer.model.state_dict(), plain.model.state_dict())
    assert keeper.pool is not None
    assert all(keeper.stats().homes[home].peak for home in ("stash", "offload", "recompute"))


@pytest.mark.parametrize("settings", [*slow({}), {"bf16": True}], ids=["plain", "bf16"])
def test_a_keeper_with_a_budget_plans_for_the_trainer(tmp_path, monkeypatch, settings):
    search_little(monkeypatch)
    plain = trainer_of(model_of(), tmp_path / "plain", **settings)
    plain.train()
    trainer = trainer_of(model_of(), tmp_path / "kept", **settings)
    keeper = ps.Keeper(budget=0.95, repeats=1)
    assert pagestash.hf.wrap(trainer, keeper) is keeper
    trainer.train()
    assert keeper.plan is not None
    assert keeper.policy.rules
    assert figures(trainer) == figures(plain)
    assert same(trainer.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("accumulated", [*slow(1), 4])
def test_a_plan_counts_the_state_of_the_trainers_optimizer(tmp_path, monkeypatch, accumulated):
    """Also where gradients are accumulated, and the optimizer has none yet."""
    search_little(monkeypatch)
    before = []
    for optim in ("sgd", "adamw_torch"):
        settings = {"optim": optim, "gradient_accumulation_steps": accumulated, "max_steps": 2}
        trainer = trainer_of(model_of(), tmp_path, eval_strategy="no", **settings)
        keeper = pagestash.hf.wrap(trainer, ps.Keeper(budget=0.95, repeats=1))
        trainer.train()
        before.append(keeper.plan.predicted.at_peak()["base"])
    assert before[1] - before[0] == 2 * sum(parameter.nbytes for parameter in trainer.model.parameters())


def test_a_state_that_nobody_knows_before_it_is_there_is_not_counted(tmp_path, monkeypatch):
    class Odd(torch.optim.SGD):
        def __init__(self, parameters, needed):
            super().__init__(parameters, lr=needed)

    search_little(monkeypatch)
    model = model_of()
    trainer = trainer_of(model, tmp_path, eval_strategy="no", max_steps=1)
    trainer.optimizer = Odd(model.parameters(), 1e-3)
    keeper = pagestash.hf.wrap(trainer, ps.Keeper(budget=0.95, repeats=1))
    with pytest.warns(
        UserWarning, match="does not count the optimizer's state: .* of Odd is not known before"
    ):
        trainer.train()
    assert keeper.plan is not None


def test_a_plain_model_gives_its_losses_too(tmp_path):
    """Against transformers' own experts, norms, rotary embedding and head, to a tolerance."""
    plain = trainer_of(tiny("Qwen3-MoE", experts="grouped_mm"), tmp_path / "plain")
    plain.train()
    trainer = trainer_of(model_of(), tmp_path / "kept")
    pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    trainer.train()
    for got, wanted in zip(figures(trainer), figures(plain), strict=True):
        assert got == pytest.approx(wanted, rel=1e-3)


def test_a_checkpoint_of_a_wrapped_trainer_goes_on_without_it(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    weights = []
    for name in ("plain", "kept"):
        trainer = trainer_of(model_of(), tmp_path / name, **settings)
        if name == "kept":
            pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        checkpoint = tmp_path / name / "checkpoint-2"
        # (To resume alone does not load the experts of transformers 5.22: docs/huggingface.md.)
        loaded = type(trainer.model).from_pretrained(checkpoint, experts_implementation="pagestash")
        pagestash.hf.optimize(loaded)
        later = trainer_of(loaded, tmp_path / "later", **settings)
        later.train(resume_from_checkpoint=str(checkpoint))
        assert later.state.global_step == 4
        # As training that was not interrupted, to a rounding, which is the Trainer's own.
        assert losses(later) == pytest.approx(losses(trainer), rel=1e-5)
        weights.append(later.model.state_dict())
    assert same(weights[0], weights[1])


def test_evaluation_before_the_first_step_opens_nothing(tmp_path):
    trainer = trainer_of(model_of(), tmp_path, eval_on_start=True)
    keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    before = trainer.evaluate()["eval_loss"]
    assert not any(home.peak for home in keeper.stats().homes.values())
    trainer.train()
    assert figures(trainer)[0]["eval_loss"] == before


def test_what_is_generated_for_a_batch_is_no_part_of_its_step(tmp_path):
    class Generating(transformers.Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            with torch.no_grad():
                made = self.model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
            self.model.train()
            return {"input_ids": made, "labels": made}

    runs = {}
    for name in ("plain", "kept"):
        trainer = trainer_of(model_of(), tmp_path / name, Generating, eval_strategy="no")
        if name == "kept":
            pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        runs[name] = figures(trainer)
    assert runs["kept"] == runs["plain"]


def test_unwrap_leaves_trainer_and_model_as_they_were(tmp_path):
    trainer = trainer_of(model_of(), tmp_path)
    before = set(trainer.__dict__), hooks(trainer.model)
    keeper = pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    assert hooks(trainer.model) != before[1]
    pagestash.hf.unwrap(trainer, keeper)
    assert (set(trainer.__dict__), hooks(trainer.model)) == before
    trainer.train()
    assert not any(home.peak for home in keeper.stats().homes.values())


def test_a_policy_file_will_do(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('[[rule]]\nmatch = "model.layers.*.mlp.experts"\nhome = "stash"\nmin_bytes = 0\n')
    keeper = pagestash.hf.wrap(trainer_of(model_of(), tmp_path), path)
    assert [rule.match for rule in keeper.policy.rules] == ["model.layers.*.mlp.experts"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_checkpointing": True}, "set gradient_checkpointing=False"),
        ({"activation_offloading": True}, "set activation_offloading=False"),
        ({"_n_gpu": 4}, "copies of the model in threads on 4 GPUs"),
    ],
    ids=["checkpointing", "offloading", "threads"],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, settings, said):
    trainer = trainer_of(model_of(), tmp_path)
    for name, value in settings.items():  # activation_offloading is a setting of TRL's
        setattr(trainer.args, name, value)
    refused(trainer, RULES, said)


def test_checkpointing_by_fsdp_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of(model_of(), tmp_path)
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(state=SimpleNamespace(fsdp_plugin=PLUGIN)))
    refused(trainer, RULES, "activation_checkpointing in fsdp_config recomputes .* set it to False")


PLUGIN = SimpleNamespace(activation_checkpointing=True)


def hooks(model):
    return [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in model.modules()]


def refused(trainer, rules, said):
    before, (modules, bits) = set(trainer.__dict__), as_it_is(trainer.model)
    with pytest.raises(ValueError, match=said):
        pagestash.hf.wrap(trainer, ps.Policy(rules=rules))
    assert set(trainer.__dict__) == before
    after = as_it_is(trainer.model)
    assert after[0] == modules
    assert same(after[1], bits)


@pytest.mark.parametrize("others", [[], RULES], ids=["alone", "beside others"])
def test_a_policy_that_matches_nothing_is_refused(tmp_path, others):
    rules = [*others, ps.Rule("layers.*.moe", "stash")]
    refused(trainer_of(model_of(), tmp_path), rules, "'layers.*.moe' matches no region")


def test_a_rule_that_a_module_refuses_leaves_the_others_off(tmp_path):
    """Rows of other ranks cannot be recomputed; the rule before it must not have taken effect."""
    model = model_of()
    experts = model.model.layers[1].mlp.experts
    inner = experts.forward

    def forward(*arguments):
        return inner(*arguments)

    forward.wired = True  # as the forward of experts that are divided among ranks
    experts.forward = forward
    rules = [
        ps.Rule("**.moe_act", "recompute", min_bytes=0),
        ps.Rule("**.self_attn", "offload", min_bytes=0),
        ps.Rule("model.layers.*.mlp.experts.expert_fc1", "recompute", min_bytes=0),
    ]
    before = as_it_is(model)
    with pytest.raises(ValueError, match="its input came from other ranks"):
        ps.Keeper(ps.Policy(rules)).attach(model)
    after = as_it_is(model)
    assert after[0] == before[0]
    assert same(after[1], before[1])


def test_a_trainer_that_makes_another_model_is_refused(tmp_path):
    trainer = trainer_of(model_of(), tmp_path)
    trainer.model_init = model_of
    refused(trainer, RULES, "model_init= makes another model")


def test_experts_that_another_library_has_taken_are_refused(tmp_path):
    trainer = trainer_of(model_of(), tmp_path)
    experts = trainer.model.model.layers[1].mlp.experts

    def forward(self, *arguments):
        return type(self).forward(self, *arguments)

    forward.__module__ = "liger_kernel.transformers.monkey_patch"
    experts.forward = forward.__get__(experts)
    said = r"model.layers.1.mlp.experts: Liger has replaced its forward.*'swiglu': False"
    refused(trainer, RULES, said)


def test_wrapping_twice_is_refused(tmp_path):
    trainer = trainer_of(model_of(), tmp_path)
    pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
    with pytest.raises(ValueError, match="wrapped already"):
        pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))


def test_what_is_no_policy_is_refused_by_name(tmp_path):
    trainer = trainer_of(model_of(), tmp_path)
    with pytest.raises(
        TypeError,
        match=r"expected a policy, its rules or its file, a budget like '40GiB', or a Keeper; got \{",
    ):
        pagestash.hf.wrap(trainer, {"rule": []})
    with pytest.raises(ValueError, match=r"none\.toml: No such file"):
        pagestash.hf.wrap(trainer, tmp_path / "none.toml")
    for budget in ("60", "lots"):
        with pytest.raises(ValueError, match=f"budget='{budget}'.* expected .*bytes like '40GiB'"):
            pagestash.hf.wrap(trainer, budget)
    assert "training_step" not in trainer.__dict__


@pytest.mark.parametrize("budget", ["40GiB", 0.5, "50%"])
def test_a_budget_does_for_a_policy(tmp_path, budget):
    trainer = trainer_of(model_of(), tmp_path)
    assert repr(pagestash.hf.wrap(trainer, budget)) == f"Keeper(budget={budget!r}, not planned yet)"


@pytest.mark.parametrize("reads", [True, False])
def test_a_budget_is_planned_for_a_loop_that_reads_each_loss_or_does_not(tmp_path, reads):
    trainer = trainer_of(model_of(), tmp_path, logging_nan_inf_filter=reads)
    assert pagestash.hf.wrap(trainer, "40GiB")._target.waits is reads


def test_two_models_in_one_process_have_policies_of_their_own():
    def step(model):
        model.zero_grad()
        rows = torch.stack([row["input_ids"] for row in data(2)])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: each.grad.clone() for name, each in model.named_parameters()}

    homes = ("recompute", "offload", None)
    models = [tiny("Qwen3-MoE", experts="pagestash") for _ in homes]
    for model in models[:2]:
        pagestash.hf.optimize(model)
    wanted = [step(model) for model in models]
    keepers = [
        ps.Keeper(ps.Policy([ps.Rule("model.layers.*", home, min_bytes=0, **more)])).attach(model)
        for model, home, more in zip(models, homes, ({}, {"prefetch_bytes": 0}))
    ]
    for _ in range(3):
        for model, keeper, before in zip(models, keepers, wanted):
            with keeper.step():
                assert same(step(model), before)
        assert same(step(models[2]), wanted[2])
    for keeper, home in zip(keepers, homes):
        peaks = {name: stats.peak for name, stats in keeper.stats().homes.items()}
        assert peaks.pop(home) > 0
        assert not any(peaks[each] for each in ("recompute", "offload", "stash") if each in peaks)


def test_only_trainers_of_transformers_are_wrapped():
    with pytest.raises(ValueError, match=r"got object; in a loop of your own use ps.Keeper\(policy\).attach"):
        pagestash.hf.wrap(object(), ps.Policy(rules=RULES))


@pytest.mark.parametrize("match", ["model.layers.*", "model.layers.*.mlp.experts"])
def test_rules_on_checkpointed_layers_are_refused(match):
    model = model_of()
    model.gradient_checkpointing_enable()
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule(match, "stash")]))
    with pytest.raises(ValueError, match=r"'model.layers.0' has gradient checkpointing on.*_disable\(\)"):
        keeper.attach(model)
    model.gradient_checkpointing_disable()
    keeper.attach(model)


def test_adapters_train_under_a_policy_of_the_models_names(tmp_path):
    peft = pytest.importorskip("peft")
    runs = {}
    for name in ("plain", "kept"):
        torch.manual_seed(5)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(tiny("Qwen3-MoE", experts="pagestash"), config)
        pagestash.hf.optimize(model)
        trainer = trainer_of(model, tmp_path / name)
        if name == "kept":
            pagestash.hf.wrap(trainer, ps.Policy(rules=RULES))
        trainer.train()
        runs[name] = figures(trainer)
    assert runs["kept"] == runs["plain"]
