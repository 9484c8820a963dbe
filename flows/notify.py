"""Notifications through Prefect's own blocks, and events for Prefect's automations.

`RLHF_NOTIFY` is the address of a notification block of the Prefect server, such as `slack-webhook/team`. It
gets a message when a pipeline finished or failed, its data drifted, a policy was promoted or refused, or
rounds need votes of people.

    event                    resource             payload
    rlhf.policy.promoted     rlhf.model.NAME      version, reason
    rlhf.policy.refused      rlhf.model.NAME      version, reason
    rlhf.policy.rolled-back  rlhf.model.NAME      version (`none` without a champion), reason
    rlhf.data.drifted        rlhf.run.NAME        reason
    rlhf.guard.raised        rlhf.run.NAME        guard, reason

Prefect adds the flow run, its deployment and its tags to each event. What cannot be sent is logged; it never
fails a run.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from prefect import Flow
from prefect.blocks.core import Block
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import emit_event
from prefect.utilities.asyncutils import run_coro_as_sync

from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import DataDrifted

log = logging.getLogger(__name__)

VARIABLE = "RLHF_NOTIFY"


@contextmanager
def view_only(failed: str, *, secret: bool = False) -> Iterator[None]:
    """Log an error of the body, of whatever library, after the text `failed`: what people see fails no run.

    With `secret` only its type is logged.
    """
    try:
        yield
    except Exception as error:
        log.warning("%s", f"{failed} ({type(error).__name__})" if secret else f"{failed}: {error}")


def notify(subject: str, body: str) -> None:
    """Send a message by the block in RLHF_NOTIFY, if there is one."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    # The text of an error can contain the secret address of a webhook.
    with view_only(f"{VARIABLE}={address}: the notification could not be sent", secret=True):
        block: Any = Block.load(address)
        sent = block.notify(printable(scrubbed(body)), subject=printable(scrubbed(subject)))
        # Without an event loop, most blocks send at once. Those whose `notify` is only a coroutine do not.
        if inspect.isawaitable(sent):
            run_coro_as_sync(cast(Coroutine[Any, Any, None], sent))


def emit(event: str, resource: str, **payload: str) -> None:
    """Emit the event `rlhf.{event}` about `rlhf.{resource}`."""
    with view_only(f"the event rlhf.{event} could not be sent", secret=True):
        emit_event(
            event=f"rlhf.{event}",
            # Prefect refuses an event without this label, and automations choose events by it.
            resource={"prefect.resource.id": f"rlhf.{resource}"},
            payload={name: printable(scrubbed(text)) for name, text in payload.items()},
        )


def notify_result(summary: Mapping[str, Any]) -> None:
    """Send what a finished pipeline has made of its policy."""
    registered = summary.get("registration")
    if not registered:
        notify(f"{summary['run']} finished", "It ended before the stage register.")
        return
    if summary["stages"]["register"]["reused"]:
        return  # it was announced before
    model, version, reason = registered["model"], str(registered["version"]), registered["reason"]
    end, how = ("promoted", " automatically") if registered["champion"] else ("refused", "")
    emit(f"policy.{end}", f"model.{model}", version=version, reason=reason)
    notify(f"{model} version {version} {end}{how}", f"{summary['run']} finished. {reason}")


def notify_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Send the end of a flow run that failed or was stopped by drift; a hook of Prefect."""
    error = getattr(state.data, "result", state.data)  # Prefect's record of a result contains the exception
    end = state.name.lower() if state.name else "failed"
    notify(f"{flow_run.name} {'drifted' if isinstance(error, DataDrifted) else end}", state.message or "")
