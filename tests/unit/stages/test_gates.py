"""A gate holds for what was made earlier, too."""

from __future__ import annotations

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed
from rlhf_core.stages.gates import check_gate


def test_an_accuracy_below_the_limit_is_named_with_both() -> None:
    config = config_from_tree({"reward": {"min_accuracy": 0.9}}, "test")
    check_gate(config, "reward", {"accuracy": 0.9})
    check_gate(config, "sft", {})
    with pytest.raises(GateFailed, match=r"accuracy 0.899 is below reward.min_accuracy=0.9; train longer"):
        check_gate(config, "reward", {"accuracy": 0.899})
