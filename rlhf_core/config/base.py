"""What all configuration sections share: the base class, common types, and how a field is declared.

The docstring below a field is its description in docs/configuration.md. A field declares what it affects, so
that stage keys (`keys.py`) need no list of field names:

result      the numbers that come out; the value is part of the stage key
rounding    the order of floating-point sums; not in the key, but a checkpoint records the value
execution   when, where and how fast something runs, and when a run stops; not in the key
content     which file, dataset or model is read; the digest of its content is in the key, and not its address
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""Decay of a moving average. With 1 the average would never change."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _expand_home(path: str) -> str:
    scheme = "file://" if path.startswith("file://") else ""
    expanded = os.path.expanduser(path.removeprefix(scheme))
    # `expanduser` leaves the name of an unknown user as it is.
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is no user of this machine; correct the name, or write ./{expanded}")
    return scheme + expanded


UserPath = Annotated[str, AfterValidator(_expand_home)]
"""A path in which `~` is the user's home folder, as in a shell."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, strict types."""

    # Strict: YAML has types of its own, so a text in place of a number is a mistake.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    constants: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that earlier versions had. They are part of the keys, so that existing keys stay."""

    @classmethod
    def of_any_release(cls, stored: Mapping[str, Any]) -> Self:
        """Return stored values without the fields that this release does not have any more."""
        # As JSON, because strict validation of Python objects would refuse a list in place of a tuple.
        return cls.model_validate_json(json.dumps(stored), extra="ignore")

    def complete(self) -> None:
        """Fill fields that follow from others. All fields are valid by then."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each rule between fields that is not kept."""
        yield from ()

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values of fields, by paths such as `engine.count`. Nothing is checked."""
        changed: dict[str, Any] = {}
        for path, value in values.items():
            name, _, rest = path.partition(".")
            if rest:
                # Several paths can be in one section: the second continues from what the first has changed.
                section: Section = changed.get(name, getattr(self, name))
                value = section.with_values({rest: value})
            changed[name] = value
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self.complete()
        # Only the first one: a later rule may rely on those before it.
        for problem in self.problems():
            raise ValueError(problem)
        return self


class Range(NamedTuple):
    """The smallest and largest allowed value of a number, and the reason.

    The types limit every number to 10^9. A `Range` is narrower, where such a number would exhaust the memory,
    cause an endless loop or an error late in the run. Numbers outside are typing errors or attacks.
    """

    low: float
    high: float
    reason: str


BATCH = Range(1, 1_000_000, "the sequences of a batch are held in memory")
COEFFICIENT = Range(0, 1000, "the scores have standard deviation 1")
PASSES = Range(1, 10_000, "no model needs a row so often")
PAUSE = Range(0.001, 1e6, "seconds between two attempts")
RANKS = Range(1, 4096, "each is a separate process")
TEMPERATURE = Range(0.01, 100, "vLLM raises lower values to 0.01, so engine and trainer would differ")
TOKENS = Range(1, 2**24, "tokens of a sequence or of one forward pass")
TRIES = Range(0, 1000, "a longer failure requires manual action")

Effect = Literal["result", "rounding", "execution", "content"]


def result(default: Any, **constraints: Any) -> Any:
    """Declare a field that affects the result of its stage.

    Args:
        default: The default value; `...` for a field that must be given.
        constraints: `within`: a `Range`; `form`: the meaning of `pattern` in words; `later`: the field was
            added after stage keys were in use, so with its default it is not part of a key and existing keys
            stay the same; `inherits`: what the section leaves out is that of the section around it, and a
            value that equals it is in no key; others as for pydantic's `Field`.
    """
    return _declare("result", default, **constraints)


def rounding(default: Any, **constraints: Any) -> Any:
    """Declare a field that affects the result by rounding only. Arguments as for `result`."""
    return _declare("rounding", default, **constraints)


def execution(default: Any, **constraints: Any) -> Any:
    """Declare a field that affects how the work is done, and not its result. Arguments as for `result`."""
    return _declare("execution", default, **constraints)


def content(default: Any, **constraints: Any) -> Any:
    """Declare an address whose content affects the result. Arguments as for `result`."""
    return _declare("content", default, **constraints)


def _declare(
    effect: Effect,
    default: Any,
    within: Range | None = None,
    form: str | None = None,
    later: bool = False,
    inherits: bool = False,
    **constraints: Any,
) -> Any:
    # The schema carries these for the messages (`messages.py`) and for docs/configuration.md.
    given = {"within": within and list(within), "form": form, "later": later, "inherits": inherits}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value}
    return Field(default, json_schema_extra={"affects": effect, **extra}, **constraints)


def declared(field: FieldInfo, name: str) -> Any:
    """Return what `_declare` was given for a field, such as `later`; None if nothing was."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def effect_of(field: FieldInfo) -> Effect:
    """Return what a field affects. Without a declaration (`type` of a reward) it is the result."""
    effect: Effect | None = declared(field, "affects")
    return effect or "result"


def divisors_near(total: int, wanted: int) -> list[int]:
    """Return up to three divisors of `total` that are nearest to `wanted`, or 1 if none is within 10,000."""
    start = min(wanted, total)
    divisors: list[int] = []
    # `total` can be 10^9, so not all its divisors are tried.
    for distance in range(10_000):
        # A set, because both are the same number at distance 0.
        for candidate in sorted({start - distance, start + distance}):
            if 1 <= candidate <= total and total % candidate == 0:
                divisors.append(candidate)
        if len(divisors) >= 3:
            break
    return sorted(divisors[:3]) or [1]


# -- constants that are not settings; `rlhf plan` computes memory and time with the sizes --

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"]
"""How token losses are added up (`rlhf_core.algo.losses.aggregate`)."""
GroupKind = Literal["grpo", "dr_grpo", "reinforce_baseline", "rloo"]
"""How the scores of the samples of a prompt become advantages (`rlhf_core.algo.advantages.group_advantages`).
"""
HEAD_CHUNK = 1 << 27
"""Logits of a micro-batch that are in memory at a time, in elements: 256 MiB of bfloat16. More are computed
in parts, and again in the backward pass, so that memory does not grow with vocabulary x tokens.
"""
LOSS_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits that are converted to float32 at a time, in elements. On a CPU they are 2 MB, about one core's L2
cache; on a GPU 256 MB, enough to fill it.
"""
# DeepSpeed's own default. `engines.sharding` passes it, so that the plan counts what is allocated.
REDUCE_BUCKET = 500_000_000
"""Gradients that ZeRO 1-3 reduce at a time, at most. The buffer is allocated as a whole."""
SHORT_ATTENTION = 512
"""Tokens of a sequence up to which `models.attention` computes attention in bfloat16 on a CPU. Torch's
kernel is faster for longer ones.
"""


# -- addresses of servers that are asked over HTTP: reward services, judges, MLflow and S3 --


_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)


def url_problem(url: str, token: str = "the variable in api_key_env") -> str | None:
    """Return the reason for which `url` is no plain HTTP address, or None.

    Args:
        url: The address.
        token: Where the token of the service is given, for the message.
    """
    if problem := server_problem(url):
        return problem
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return f"it must have no user, password, query or fragment; give a token by {token}"
    return None


def server_problem(url: str) -> str | None:
    """Return the reason for which no server can be at `url`, or None."""
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for a text and for numbers above 65535.
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "it must be http(s)://host[:port]/path"
    # `urlsplit` removes line feeds and tabs without a word, and a client may not: the host that is checked
    # would be another one.
    if not whole or any(char.isspace() or not char.isprintable() for char in url):
        return "it must be http(s)://host[:port]/path"
    return _host_problem(host_of(url))


def _host_problem(host: str) -> str | None:
    """Return the reason for which `host` is neither an address nor an unambiguous host name, or None.

    The name must be interpreted in the same way by every resolver and HTTP client.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return None
    except ValueError:
        pass
    # A dot at the end is the root of DNS. The lengths, here and in `_LABEL`, are those of RFC 1035.
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        return (
            "its host must be an address or a name of letters, digits, hyphens and dots (others as xn--...)"
        )
    # Resolvers take `127.1`, `0x7f.1` and `2130706433` for addresses, which `ip_address` above does not.
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        return "its host must be written as four decimal numbers without leading zeros, such as 127.0.0.1"
    for label in labels:
        # httpx decodes such a label when the host is read, and would raise an error in the middle of a run.
        if label.startswith("xn--"):
            try:
                label.encode("ascii").decode("idna")
            except UnicodeError:
                return f"its host has the label {label}, which is not a valid name"
    return None


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()
