"""The main job of celery_claim in one command: ``python -m celery_claim.demo``.

::

    serve -> load -> run -> watch (kill half way) -> prove

serve a private broker; load one table row per file of Python's standard library; run real workers and a
real beat; watch the rows being claimed and kill a worker that holds some; prove from the tables that
every file was handled, how often, why, and with the right result.
"""
