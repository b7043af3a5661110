"""Rows of a table are consumed by many workers: claim -> process -> write back (recover)."""
