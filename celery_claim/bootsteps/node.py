"""A worker's entry in the register of nodes, and the queues it consumes whatever -Q says."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
from contextlib import suppress
from typing import Any

from celery import bootsteps
from celery.signals import worker_shutting_down

from celery_claim.app import claim_tasks, own_tables, state_of
from celery_claim.bootsteps.check import CheckStep
from celery_claim.exceptions import ClaimError
from celery_claim.nodes.identity import Identity, Vitals
from celery_claim.outages import Outage
from celery_claim.schedules import FIRE_QUEUE
from celery_claim.standing import Standing, standing_of
from celery_claim.version import __version__

logger = logging.getLogger(__name__)

#: A name for --claim-role where no command line is, as in worker_main().
ROLE_VARIABLE = "CLAIM_NODE_ROLE"
#: The role whose holders share the lease of the main node.
MAIN = "main"


class NodeStep(bootsteps.StartStopStep):
    """Enters the register, tells that it lives, and leaves; runs once, whatever becomes of the broker connection."""

    name = "claim-node"
    # After the check, which refuses what cannot work; after the pool, whose processes are forked before there is a
    # thread.
    requires = (CheckStep, "celery.worker.components:Pool")

    def __init__(self, parent: Any, claim_role: str | None = None, **options: Any) -> None:
        super().__init__(parent, **options)
        state = state_of(parent.app)
        role = claim_role or state.settings.node_role or os.environ.get(ROLE_VARIABLE) or None
        name = state.settings.node_name or parent.hostname
        # Before the pool is forked: its processes say in each run which start of which node they belong to.
        self._standing = state.once("standing", lambda: Standing(Identity(name, role)))
        self._heart: Heart | None = None
        for task in parent.app.tasks.values():
            if task.Request == "celery.worker.request:Request":  # a user's own is the user's
                type(task).Request = "celery_claim.bootsteps.request:CountedRequest"

    def start(self, parent: Any) -> None:
        if state_of(parent.app).settings.database_url is None or not any(claim_tasks(parent.app)):
            return
        # Here, and not in the thread: a pool process forked in the middle of an import would inherit its lock.
        for module in ("celery_claim.dispatch", "celery_claim.nodes.leases", "celery_claim.windows.runs"):
            importlib.import_module(module)
        self._heart = Heart(parent, self._standing)
        self._heart.start()
        standing = self._standing

        def stop_accepting(**_: Any) -> None:
            standing.accept(False)

        self._stop_accepting = stop_accepting
        worker_shutting_down.connect(stop_accepting, weak=False)

    def stop(self, parent: Any) -> None:
        if self._heart is not None:
            worker_shutting_down.disconnect(self._stop_accepting)
            self._heart.stop()

    terminate = stop


class NodeQueueStep(bootsteps.StartStopStep):
    """Consumes the queue of `celery_claim.fire` and the queue that only this node has, whatever -Q says."""

    name = "claim-node-queue"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        app = parent.app
        if not any(claim_tasks(app)):
            return
        standing = standing_of(app)
        parent.add_task_queue(FIRE_QUEUE)
        if state_of(app).settings.database_url is None or standing.superseded:
            return
        if self._consumes_own_queue(parent, standing):
            standing.queues = tuple(app.amqp.queues.consume_from)
            standing.broker_id = _broker_id(app)
            standing.leave_queue = lambda: parent.call_soon(parent.cancel_task_queue, standing.identity.queue)
            standing.accept(True)

    def stop(self, parent: Any) -> None:
        standing_of(parent.app).accept(False)

    def _consumes_own_queue(self, parent: Any, standing: Standing) -> bool:
        from celery_claim.dispatch import node_queue

        queue = node_queue(parent.app, standing.identity.name)
        parent.app.amqp.queues.select_add(queue)
        try:
            parent.add_task_queue(queue.name)
        except parent.connection.channel_errors as error:
            # Such as a broker that makes no queues by itself, or not under such a name.
            parent.app.amqp.queues.deselect(queue.name)
            logger.error(
                "this broker does not give node %s a queue of its own (%s): it takes runs of run_type='any' only",
                standing.identity.name,
                error,
            )
            return False
        return True


class Heart(threading.Thread):
    """Tells the register every few seconds that the worker lives, and holds the lease of the main node if it may."""

    def __init__(self, worker: Any, standing: Standing) -> None:
        super().__init__(name="celery_claim-node", daemon=True)
        self._worker = worker
        self._app = worker.app
        self._standing = standing
        self._settings = state_of(worker.app).settings
        self._tables = own_tables(worker.app).nodes
        self._over = threading.Event()
        self._entered = False
        self._outage = Outage(f"the register of nodes for {standing.identity.name}", logger)
        from celery_claim.dispatch import Dispatcher

        self._dispatcher = Dispatcher.of(worker.app)

    def run(self) -> None:
        while not self._over.is_set() and not self._standing.superseded:
            self._beat()
            self._standing.changed.wait(self._settings.node_heartbeat)
            self._standing.changed.clear()
        self._leave()

    def stop(self) -> None:
        """Leave the register now: whoever sends runs sees it at once."""
        self._over.set()
        self._standing.changed.set()
        self.join(timeout=5)

    def _beat(self) -> None:
        try:
            self._dispatcher.prepare()
            with self._dispatcher.database.linked(lock_wait_seconds=1) as link:
                self._tell(link)
        except ClaimError as error:
            self._outage.failed(error)
        except Exception as error:  # without this thread no run comes here
            logger.exception("the heartbeat failed")
            self._outage.failed(error)
        else:
            self._outage.worked()

    def _tell(self, link: Any) -> None:
        from celery_claim.nodes import registry
        from celery_claim.windows.runs import lose_earlier_starts

        identity, vitals = self._standing.identity, self._vitals()
        if not self._entered:
            registry.enter(link, self._tables, identity, vitals)
            lost = lose_earlier_starts(link, self._dispatcher.statements, identity.name, identity.boot_id)
            if lost:
                logger.warning("%d runs of an earlier start of %s were lost", lost, identity.name)
            self._entered = True
        elif not registry.beat(link, self._tables, identity, vitals):
            self._step_back()
            return
        self._seek_main(link)
        self._standing.nodes = registry.nodes(link, self._tables, timeout_ms=round(self._settings.node_timeout * 1000))
        look = self._dispatcher.look()
        self._standing.windows = [window.facts(look.now) for window in look.windows.values()]

    def _seek_main(self, link: Any) -> None:
        from celery_claim.nodes import leases

        identity = self._standing.identity
        if self._settings.main_node is None and identity.role == MAIN and self._standing.accepting:
            leases.acquire(
                link, self._tables, leases.MAIN_LEASE, identity.name, ttl_ms=round(self._settings.node_timeout * 1000)
            )

    def _step_back(self) -> None:
        """Another worker was started under our name: it gets the runs."""
        logger.error(
            "another worker calls itself %s and was started later: this one takes no more runs; give each worker a "
            "name of its own (celery worker -n NAME)",
            self._standing.identity.name,
        )
        self._standing.superseded = True
        self._standing.accept(False)
        self._standing.leave_queue()

    def _leave(self) -> None:
        from celery_claim.nodes import leases, registry

        if not self._entered or self._standing.superseded:
            return
        with suppress(ClaimError), self._dispatcher.database.linked(lock_wait_seconds=1) as link:
            leases.release(link, self._tables, leases.MAIN_LEASE, self._standing.identity.name)
            registry.leave(link, self._tables, self._standing.identity)

    def _vitals(self) -> Vitals:
        from celery.worker import state as worker_state

        pool = getattr(self._worker, "pool", None)
        standing, running = self._standing, len(worker_state.active_requests)
        return Vitals(
            accepting=standing.accepting,
            pool_size=getattr(pool, "num_processes", None) or self._worker.concurrency or 1,
            max_running=self._worker.concurrency or 1,
            running=running,
            success=max(0, standing.accepted - running - standing.fail - standing.undecided),
            fail=standing.fail,
            version=__version__,
            broker_id=standing.broker_id,
            queues=standing.queues,
        )


def _broker_id(app: Any) -> str:
    """Which broker this really is: the run id of a Redis server, or else what its address comes to."""
    # A connection of its own: one more channel on the consumer's would disturb how it polls for messages.
    # A transport without a Redis client, or a server that does not tell, has no run id.
    with suppress(Exception), app.connection_for_read() as connection:
        return str(connection.default_channel.client.info("server")["run_id"])
    address = app.connection_for_read().as_uri()
    return hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()
