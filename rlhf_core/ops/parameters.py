"""The parameters of the forms of the flows, as overrides of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

DEFAULT_CONFIG = "deployments/configs/demo.yaml"
EndOfRound = Literal["sample", "evaluate", "register"]
"""The stages that can be the last one of a round."""
END_OF_ROUND: EndOfRound = "register"
"""The default."""


def overrides_of(fields: Mapping[str, Any], overrides: Sequence[str] = ()) -> list[str]:
    """Return `section.field=value` for each of `fields` that is not None, followed by `overrides`,
    which win.
    """
    # JSON is valid YAML, and unlike YAML's plain scalars it keeps the name "1e3" a text.
    from_fields = [f"{field}={json.dumps(value)}" for field, value in fields.items() if value is not None]
    return [*from_fields, *overrides]
