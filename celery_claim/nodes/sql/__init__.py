"""celery_claim's own tables: what nodes keep in them, and how any of them is made."""
