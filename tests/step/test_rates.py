"""Learning rates of a captured step."""

import pytest
import torch

from pagestash.step.inputs import LearningRates


def test_the_graph_reads_tensors_and_the_user_keeps_numbers():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "lr": 0.25}])
    rates = LearningRates([optimizer])
    rates.write(rates.read())
    with rates.on_device():
        inside = [group["lr"] for group in optimizer.param_groups]
        assert [float(rate) for rate in inside] == [0.5, 0.25]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    optimizer.param_groups[0]["lr"] = 0.125
    rates.write(rates.read())
    assert [float(rate) for rate in inside] == [0.125, 0.25]


def test_a_rate_that_is_a_tensor_is_read_by_value():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.5), fused=True)
    rates = LearningRates([optimizer])
    earlier = rates.read()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert [float(rate) for rate in earlier] == [0.5]
    assert [float(rate) for rate in rates.read()] == [0.25]


def test_other_settings_are_constants_of_the_graph():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    rates = LearningRates([optimizer])
    rates.captured()
    optimizer.param_groups[0]["lr"] = 1.0
    assert rates.changed() == []
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert rates.changed() == ["weight_decay"]
    rates.captured()
    assert rates.changed() == []


def test_rates_of_another_number_are_refused():
    rates = LearningRates([torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])])
    with pytest.raises(ValueError, match="zip"):
        rates.write([1.0, 2.0])
