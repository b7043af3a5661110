"""Signals about rows and about messages, with Celery's own Signal class.

Those about rows are sent where the rows are processed: in a pool process under prefork; the sender is the task. Those
about messages of a redis-streams:// broker are sent in the worker's main process; the sender is the queue's name. A
receiver that raises is logged by Celery and changes nothing.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: A claim won rows, before the first is processed. `keys`: list, `rows`: list.
row_claimed = Signal(name="row_claimed", providing_args=["keys", "rows"])

#: A row's success is in the table. `key`.
row_succeeded = Signal(name="row_succeeded", providing_args=["key"])

#: A row failed for good, and the table says so. `key`, `reason`: str or None, `exception`: what was raised, or None.
row_failed = Signal(name="row_failed", providing_args=["key", "reason", "exception"])

#: A row waits for another try. `key`, `countdown`: seconds, `reason`, `exception`.
row_retried = Signal(name="row_retried", providing_args=["key", "countdown", "reason", "exception"])

#: Rows are not ours any more; what their handlers did is done, their results were not written. `keys`: list.
claim_lost = Signal(name="claim_lost", providing_args=["keys"])

#: Rows of dead owners were given back, or failed after too many. `keys`: list.
rows_recovered = Signal(name="rows_recovered", providing_args=["keys"])

#: A run or a drain ended. `counts`: Counts.
run_finished = Signal(name="run_finished", providing_args=["counts"])

#: A message went to the dead letters of its queue. `death`: Death, with `queue`, `message_id`, `task`,
#: `task_id`, `reason`, `deliveries` and the message's `fields`.
message_dead = Signal(name="message_dead", providing_args=["death"])

#: A message is not ours any more while its task may still run here; another worker may run it too. `queue`, `tag`.
lease_lost = Signal(name="lease_lost", providing_args=["queue", "tag"])
