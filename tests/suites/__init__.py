"""Celery's and kombu's own tests, run on redis-streams:// and on kombu's redis:// in one go: `./dev conformance`."""
