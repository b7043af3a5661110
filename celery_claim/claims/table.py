"""A claim-shaped table on its database: what every flow of claims works on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from celery_claim.claims.sql.catalogue import reflected
from celery_claim.claims.sql.columns import ClaimTable
from celery_claim.claims.sql.render import render, render_sample
from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Database, Link
from celery_claim.dialects import LOCK_WAIT_SECONDS


@dataclass(frozen=True)
class Claims:
    """A table and the statements to claim from it."""

    database: Database
    statements: Statements

    @property
    def table(self) -> ClaimTable:
        return self.statements.of

    @classmethod
    def of(
        cls,
        database: Database,
        *,
        model: Any,
        table: str | None,
        schema: str | None,
        columns: Mapping[str, Any],
        values: Mapping[Any, Any] | None,
    ) -> Claims:
        """By model, or by the name of an existing table; see ClaimTask. Raises MappingError when it does not fit."""
        if table is not None:
            with database.linked() as link:
                model = reflected(link, table, schema)
        return cls(database, Statements(ClaimTable.of_model(model, columns, values), database.dialect))

    def linked(self, *, lock_wait_seconds: int = LOCK_WAIT_SECONDS) -> AbstractContextManager[Link]:
        """A connection for the length of a block."""
        return self.database.linked(lock_wait_seconds=lock_wait_seconds)

    def probe(self, link: Link) -> None:
        """Run the statements of a claim on no row, so that the server says now what it would refuse later.

        Raises StatementRefused for a missing column or privilege, DatabaseUnavailable.
        """
        link.execute(self.statements.candidates, {"limit": 0, "offset": 0})
        link.execute(self.statements.release, {"keys": [], "token": ""})

    def rendered(self) -> dict[str, str]:
        """The text of each statement as this database gets it, with names for its parameters."""
        return {name: render(each, self.database.engine.dialect) for name, each in self.statements.named().items()}

    def explainable(self) -> dict[str, str]:
        """Statements with sample values, for EXPLAIN."""
        return {
            name: render_sample(each, self.database.engine.dialect, self.table.key.type)
            for name, each in self.statements.named().items()
        }
