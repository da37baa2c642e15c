"""A device with wrong numbers: the probe child answers as ever, and what is wrong is told by name."""

from __future__ import annotations

import torch

from workbench.cluster import measure_features
from workbench.day0.faults.device import WrongNumbers
from workbench.day0.sabotage import WRONG_OPERATOR, wrong_probe


def test_products_are_wrong_on_that_device_and_right_for_their_judge() -> None:
    x = torch.arange(6.0).view(2, 3)
    with WrongNumbers(WRONG_OPERATOR, "cpu"):
        wrong, judged, other = x @ x.t(), x.double() @ x.double().t(), x + x
    torch.testing.assert_close(wrong, 1.125 * (x @ x.t()))
    torch.testing.assert_close(judged, x.double() @ x.double().t())
    torch.testing.assert_close(other, x + x)
    with WrongNumbers(WRONG_OPERATOR, "meta"):
        torch.testing.assert_close(x @ x.t(), wrong / 1.125)


def test_the_probe_finds_wrong_products_and_nothing_else() -> None:
    names = ("fp32 matmul", "bf16 matmul", "nibble unpack", "depthwise conv")
    features = measure_features("cpu", names, command=wrong_probe("cpu", "workbench.cluster.child"))
    assert {x.name: x.is_supported for x in features} == dict(zip(names, (False, False, True, True), strict=True))
    assert all("wrong numbers" in x.detail for x in features if not x.is_supported)
