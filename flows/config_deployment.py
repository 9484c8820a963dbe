"""A deployment of one configuration, with its schedule: `rlhf up --config my.yaml --schedule "0 2 * * 0"`.

The same command updates it. What people have changed on its page stays, except what the command names: a
schedule that was paused is paused afterwards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Flow, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ParameterTypeError, SignatureMismatchError
from pydantic import ValidationError

from flows.deploy import create, update
from flows.retrain import retrain
from flows.rlhf import rlhf
from rlhf_core.config.redact import shown
from rlhf_core.config.yaml import parse_value
from rlhf_core.errors import InputError
from rlhf_core.ops.servers.reconcile import TAG
from rlhf_core.ops.servers.supervisor import POOL

SLUG = "rlhf-up"
"""Slug of the schedule that the command creates. All others are those of people."""


@dataclass(frozen=True)
class ConfigDeployment:
    """What a deployment of a configuration must be. The name and all values are valid."""

    name: str
    parameters: Mapping[str, Any]
    schedule: CronSchedule | None
    """None leaves the schedules of an existing deployment as they are."""
    if_changed: bool
    """Whether the pipeline runs only if its inputs have changed (`flows/retrain.py`)."""

    @property
    def flow(self) -> Flow[..., Any]:
        """The flow that it runs."""
        return retrain if self.if_changed else rlhf

    @property
    def full_name(self) -> str:
        """Its name for Prefect's commands: that of the flow and its own."""
        return f"{self.flow.name}/{self.name}"

    def apply(self) -> str:
        """Create or update the deployment on the server of Prefect's settings, and return a line about it."""
        flow = self.flow
        entry = {
            "name": self.name,
            "description": (flow.description or "").partition("\n")[0],
            "entrypoint": f"{flow.fn.__module__}.{flow.fn.__name__}",
            # Without TAG, the reconciler would not bring back a run whose process was lost.
            "tags": ["rlhf", TAG],
            "parameters": self.parameters,
            "work_pool": {"name": POOL},
            # A check that is due while the last one retrains is left out.
            "concurrency_limit": {
                "limit": 1,
                "collision_strategy": "CANCEL_NEW" if self.if_changed else "ENQUEUE",
            },
        }
        with get_client(sync_client=True) as client:
            deployment = update(client, flow, entry)
            if deployment is None:
                create(client, flow, entry)
            else:
                parameters = {**deployment.parameters, **self.parameters}
                client.update_deployment(deployment.id, DeploymentUpdate(parameters=parameters))
            deployment = client.read_deployment_by_name(self.full_name)
            own = _own_schedule(deployment)
            if self.schedule is not None and own is None:
                new = DeploymentScheduleCreate(schedule=self.schedule, active=True, slug=SLUG)
                client.create_deployment_schedules(deployment.id, [new])
            elif self.schedule is not None and own is not None:
                client.update_deployment_schedule(deployment.id, own.id, schedule=self.schedule)
            return _describe(self.full_name, client.read_deployment(deployment.id))


def config_deployment(
    config: str,
    overrides: tuple[str, ...] = (),
    *,
    name: str | None = None,
    parameters: tuple[str, ...] = (),
    cron: str | None = None,
    timezone: str | None = None,
    if_changed: bool = False,
) -> ConfigDeployment:
    """Return the deployment that the command line describes. Nothing is sent.

    Args:
        config: YAML file.
        overrides: Fields to override; none leaves those of an existing deployment.
        name: Name of the deployment; default: that of the file, without its suffix.
        parameters: Other parameters of the flow, each as `name=value` with a value in YAML.
        cron: When it runs: minute, hour, day, month, day of the week.
        timezone: Name of the time zone of `cron`; default: that of this machine.
        if_changed: Whether the pipeline runs only if its inputs have changed.

    Raises InputError if a value is invalid.
    """
    # Absolute: each later `rlhf up` sets the working folder of the deployment to its own
    # (`flows.deploy.update`).
    file = Path(config).resolve()
    given: dict[str, Any] = {"config": str(file)}
    if overrides:
        given["overrides"] = list(overrides)
    for text in parameters:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--param: must be name=value; got {shown(text)}")
        given[key] = parse_value(value, f"--param {key}")
    own_name = name or file.stem
    if re.fullmatch(r"[\w.-]{1,100}", own_name) is None:
        raise InputError(f"--name: must have letters, digits, `.`, `_` or `-`; got {shown(own_name)}")
    flow = retrain if if_changed else rlhf
    try:
        # Now, and not when the first scheduled run begins.
        flow.validate_parameters(given)
    except (ParameterTypeError, SignatureMismatchError) as error:
        names = ", ".join(flow.parameters.properties)
        raise InputError(f"--param: {error}; the parameters of {flow.name} are {names}") from None
    schedule = None if cron is None else _schedule(cron, timezone or local_timezone())
    return ConfigDeployment(own_name, given, schedule, if_changed)


def local_timezone() -> str:
    """Return the name of this machine's time zone: TZ, else that of /etc/localtime, else UTC."""
    # POSIX allows a colon before a name or a path.
    name = os.environ.get("TZ", "").removeprefix(":") or "/etc/localtime"
    if name.startswith("/"):
        name = os.path.realpath(name).partition("zoneinfo/")[2]
    return name or "UTC"


def _schedule(cron: str, timezone: str) -> CronSchedule:
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        option = {"cron": "--schedule", "timezone": "--timezone"}[str(error.errors()[0]["loc"][0])]
        rule = 'must be minute, hour, day, month and day of the week, such as "0 2 * * 0"'
        if option == "--timezone":
            rule = "must be a time zone such as Europe/Berlin or UTC"
        value = cron if option == "--schedule" else timezone
        raise InputError(f"{option}: {rule}; got {shown(value)}") from None


def _own_schedule(deployment: DeploymentResponse) -> DeploymentSchedule | None:
    return next((each for each in deployment.schedules if each.slug == SLUG), None)


def _describe(name: str, deployment: DeploymentResponse) -> str:
    """Return what Prefect's server has now, after the changes of the command and of people."""
    times = "no schedule"
    own = _own_schedule(deployment)
    if own is not None and isinstance(own.schedule, CronSchedule):
        is_active = own.active and not deployment.paused
        state = "active" if is_active else "paused: turn it on on its page"
        times = f'"{own.schedule.cron}" in {own.schedule.timezone}, {state}'
    return f"deployment {name}: {deployment.parameters['config']}, {times}"
