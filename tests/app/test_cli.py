"""The command line as a user types it."""

import subprocess
import sys

from typer.testing import CliRunner

import pagestash
from pagestash.cli import app
from pagestash.demo import DemoConfig, policies, train

SMALL = DemoConfig(steps=3, layers=2, width=64, capacity=512)


def test_demo_shows_equal_losses_and_fewer_bytes():
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--layers", "2", "--capacity", "512"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "equal to the last bit: yes" in text
    assert "together" in text


def test_both_runs_of_the_demo_agree_and_the_stash_keeps_less():
    plain, stash = (train(SMALL, policy, "cpu") for policy in policies().values())
    assert plain.losses == stash.losses
    assert len(set(plain.losses)) == SMALL.steps
    assert 0 < stash.kept + stash.stashed < 0.6 * plain.kept
    assert plain.stashed == 0


def test_demo_fails_when_a_loss_differs(monkeypatch):
    import pagestash.demo as demo

    real = demo.train

    def skewed(config, policy, device, tick):
        result = real(SMALL, policy, device, tick)
        if policy.rules[0].home == "stash":
            result.losses[-1] += 1e-7
        return result

    monkeypatch.setattr(demo, "train", skewed)
    result = CliRunner().invoke(app, ["demo", "--steps", "3"])
    assert result.exit_code == 1
    assert "NO" in result.output


def test_bad_options_end_with_code_2():
    assert CliRunner().invoke(app, ["demo", "--steps", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["nothing"]).exit_code == 2


def test_version_is_printed_without_loading_torch():
    code = "import sys; from pagestash.cli import app; app(['--version'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == pagestash.__version__


def test_importing_the_package_loads_neither_torch_nor_jax():
    code = "import sys, pagestash; dir(pagestash); assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in pagestash.__all__:
        assert getattr(pagestash, name) is not None
