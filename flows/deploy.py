"""Create the deployments of a file that the server does not have, and update the code of the others.

    python -P -m flows.deploy deployments/prefect.yaml

`prefect deploy` also replaces the parameters of a deployment, switches its schedules off as in the file, and
deletes those that people have added. This program changes none of what people edit in Prefect's pages. It
updates the entry point, the project's folder and the form of the parameters, which follow from the code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flows.isolated import isolate_prefect
from rlhf_core.system.launch import python_module

if TYPE_CHECKING:
    from prefect import Flow


def deploy(file: Path) -> list[str]:
    """Update the deployments of `file` that exist, and return the names of those that do not."""
    from prefect import get_client
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    folder = {"prefect.deployments.steps.set_working_directory": {"directory": os.getcwd()}}
    missing = []
    with get_client(sync_client=True) as client:
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"]:
            flow: Flow[..., Any] = load_flow_from_entrypoint(entry["entrypoint"])
            name = f"{flow.name}/{entry['name']}"
            try:
                deployment = client.read_deployment_by_name(name)
            except ObjectNotFound:
                missing.append(entry["name"])
                continue
            code = DeploymentUpdate(entrypoint=entry["entrypoint"], pull_steps=entry.get("pull", [folder]))
            client.update_deployment(deployment.id, code)
            form = DeploymentUpdate(
                parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True)
            )
            try:
                client.update_deployment(deployment.id, form)
            except PrefectHTTPStatusError as error:
                if error.response.status_code != 409:
                    raise
                # Without a server, nobody could correct them.
                sys.stderr.write(
                    f"{name}: its parameters {deployment.parameters} do not fit this release"
                    f" ({error.response.json()['detail']}); correct them on its page\n"
                )
    return missing


if __name__ == "__main__":
    isolate_prefect()
    names = deploy(Path(sys.argv[1]))
    if names:
        command = [*python_module("flows.isolated"), "--no-prompt", "deploy", "--prefect-file", sys.argv[1]]
        os.execv(command[0], [*command, *(word for name in names for word in ("--name", name))])
