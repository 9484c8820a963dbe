"""Create the deployments of a file that the server does not have, and update the code of the others.

    python -P -m flows.deploy deployments/prefect.yaml

`prefect deploy` also replaces the parameters of a deployment, switches its schedules off as in the file, and
deletes those that people have added. This program changes none of what people edit in Prefect's pages. It
updates the entry point, the working folder and the form of the parameters, which follow from the code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flows.isolated import isolate_prefect

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.responses import DeploymentResponse


def deploy(file: Path) -> None:
    """Create the deployments of `file`, and update those that exist."""
    # Not at the top: `isolate_prefect` must run before the first import of Prefect. The same holds below.
    from prefect import get_client
    from prefect.flows import load_flow_from_entrypoint

    with get_client(sync_client=True) as client:
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"]:
            flow: Flow[..., Any] = load_flow_from_entrypoint(entry["entrypoint"])
            if update(client, flow, entry) is None:
                create(client, flow, entry)


def update(
    client: SyncPrefectClient, flow: Flow[..., Any], entry: Mapping[str, Any]
) -> DeploymentResponse | None:
    """Update the code of a deployment, and return the deployment; None if the server does not have it."""
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    name = f"{flow.name}/{entry['name']}"
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None
    # Apart from the form and before it: the code is that of this release also if the form is refused.
    code = DeploymentUpdate(entrypoint=entry["entrypoint"], pull_steps=_pull_steps(entry))
    client.update_deployment(deployment.id, code)
    try:
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=_form(flow)))
    except PrefectHTTPStatusError as error:
        # 409: the parameters of the deployment do not fit the form.
        if error.response.status_code != 409:
            raise
        # Without a server, nobody could correct them.
        sys.stderr.write(
            f"{name}: its parameters {deployment.parameters} do not fit this release"
            f" ({error.response.json()['detail']}); correct them on its page\n"
        )
    return deployment


def create(client: SyncPrefectClient, flow: Flow[..., Any], entry: Mapping[str, Any]) -> None:
    """Create a deployment.

    Args:
        client: Client of the server.
        flow: The flow of the deployment.
        entry: Its settings, as in the file.
    """
    from prefect.client.schemas.objects import ConcurrencyOptions

    pool, limit = entry["work_pool"], entry.get("concurrency_limit")
    options = limit and ConcurrencyOptions(collision_strategy=limit["collision_strategy"])
    client.create_deployment(
        client.create_flow(flow),
        entry["name"],
        description=entry.get("description"),
        entrypoint=entry["entrypoint"],
        pull_steps=_pull_steps(entry),
        parameter_openapi_schema=_form(flow),
        parameters=entry.get("parameters"),
        tags=entry.get("tags"),
        schedules=[_schedule(each) for each in entry.get("schedules", ())],
        work_pool_name=pool["name"],
        work_queue_name=pool.get("work_queue_name"),
        job_variables=pool.get("job_variables"),
        concurrency_limit=limit and limit["limit"],
        concurrency_options=options,
    )


def _pull_steps(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Relative paths in parameters start at the folder in which the deployment was made, and not at the
    # worker's.
    folder = {"prefect.deployments.steps.set_working_directory": {"directory": os.getcwd()}}
    return list(entry.get("pull", [folder]))


def _schedule(settings: Mapping[str, Any]) -> DeploymentScheduleCreate:
    """Return a schedule of a file, whose times (`cron`, `timezone`) stand beside its other settings."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    others = DeploymentScheduleCreate.model_fields.keys()
    times = {name: value for name, value in settings.items() if name not in others}
    rest = {name: value for name, value in settings.items() if name in others}
    return DeploymentScheduleCreate.model_validate({**rest, "schedule": times})


def _form(flow: Flow[..., Any]) -> dict[str, Any]:
    from prefect.utilities.callables import parameter_schema

    return parameter_schema(flow).model_dump(exclude_unset=True)


if __name__ == "__main__":
    isolate_prefect()
    deploy(Path(sys.argv[1]))
