"""steer: what a person on call would do to the window while it works, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from celery import Celery

from celery_claim.demo.look import Snapshot
from celery_claim.demo.plan import TABLE_PREFIX, WINDOW, Plan
from celery_claim.dispatch import Dispatcher
from celery_claim.exceptions import ClaimError
from celery_claim.windows.fire import Outcome

#: Shares of the rows that have ended when the window is opened by hand, when it gets more consumers, and when it is too
#: late for either: half way a worker is killed, and that is not to be missed.
TRIGGER_AT, WIDEN_AT, TOO_LATE = 0.1, 0.25, 0.4


class Steering:
    """Acts on the window of the demo as `celery claim trigger` and `celery claim concurrency` do."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        app = Celery("celery_claim_demo", broker=plan.broker, set_as_current=False)
        app.conf.update(
            claim_database_url=plan.database,
            claim_table_prefix=TABLE_PREFIX,
            broker_transport_options=plan.transport_options,
            task_default_queue=plan.queue,
        )
        self._dispatcher = Dispatcher.of(app)
        with suppress(ClaimError):  # the workers make the tables as well
            self._dispatcher.prepare()
        self._consumers = plan.consumers
        self._say = say
        self._fires = 0
        self._triggered = self._widened = False

    def act(self, snapshot: Snapshot) -> None:
        """Do what is due at this share of the rows."""
        share = snapshot.ended / max(1, snapshot.total)
        try:
            if share and not self._fires:
                self._tell_of_the_first_fire()
            if TRIGGER_AT <= share < TOO_LATE and not self._triggered:
                self._trigger()
            elif WIDEN_AT <= share < TOO_LATE and not self._widened:
                self._widen()
        except ClaimError:
            # SQLite has one writer, and the workers keep it busy: the next look is soon.
            return

    def fires(self) -> int:
        """How often the window was opened in all."""
        return self._dispatcher.look().windows[WINDOW].fire_seq

    def _tell_of_the_first_fire(self) -> None:
        self._fires = self.fires()
        self._say("the first window has opened, rows are being claimed")

    def _trigger(self) -> None:
        # Between two slots: while its consumers have their time, a trigger loses.
        if self._dispatcher.trigger(WINDOW, by="the demo")[0] is Outcome.FIRED:
            self._triggered = True
            self._say(f"celery claim trigger {WINDOW}: opened by hand, between two slots")

    def _widen(self) -> None:
        self._dispatcher.set_concurrency(WINDOW, self._consumers * 2)
        self._widened = True
        self._say(
            f"celery claim concurrency {WINDOW} {self._consumers * 2}: {self._consumers} consumers become "
            f"{self._consumers * 2}, live"
        )
