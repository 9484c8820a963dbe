"""Prefect's scheduler inserts its flow runs under the locked SQLAlchemy.

This looks at the function that SQLAlchemy calls, and no further. That a schedule starts runs is proved by
`tests/integration/test_scheduled.py`.
"""

from __future__ import annotations

from flows import application


def test_a_scheduled_run_with_its_state_can_be_inserted() -> None:
    from prefect.server.database.orm_models import FlowRun
    from sqlalchemy import inspect
    from sqlalchemy.ext.hybrid import HybridExtensionType

    application._let_schedules_insert()
    hybrid = inspect(FlowRun).all_orm_descriptors["state"]
    assert hybrid.extension_type is HybridExtensionType.HYBRID_PROPERTY
    row = {"state": {"type": "SCHEDULED"}}
    FlowRun.state._bulk_dml_setter("state")(row)  # refused without a function for it
    assert row == {"state": {"type": "SCHEDULED"}}, "it is inserted in another table afterwards"
