"""Make the tables of models that do not exist."""

from __future__ import annotations

from sqlalchemy import inspect as inspector_of

from celery_claim.claims.table import Claims


def create_missing(claims: Claims) -> list[str]:
    """Make the table of a model, with its indexes, unless it exists; returns what was made."""
    with claims.linked() as link, link.translating():
        table = claims.table.table
        if inspector_of(link.connection).has_table(table.name, schema=table.schema):
            return []
        table.create(link.connection)
        return [claims.table.name]
