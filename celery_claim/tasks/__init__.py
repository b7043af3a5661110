"""Task base classes: Celery tasks whose work is the rows of a table."""

from celery_claim.tasks.claim_task import ClaimTask
from celery_claim.tasks.table_task import TableTask

__all__ = ["ClaimTask", "TableTask"]
