"""How a task is called: with a row it is the user's function, without arguments it is one drain."""

from __future__ import annotations

import threading
import warnings
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, shared_task
from celery.contrib.testing.worker import start_worker
from sqlalchemy import BigInteger, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable, ClaimTask, Counts, Retry, setup, window
from celery_claim.app import claim_tasks, state_of
from celery_claim.exceptions import ConfigurationError
from celery_claim.rows.consume import Place


class Base(DeclarativeBase):
    pass


class Mail(Claimable, Base):
    __tablename__ = "mail"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


@pytest.fixture
def url(tmp_path):
    """A file with three rows to send."""
    url = f"sqlite:///{tmp_path}/mail.db"
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(Mail.__table__.insert(), [{"id": key} for key in (1, 2, 3)])
    engine.dispose()
    return url


@pytest.fixture
def app(url):
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.claim_database_url = url
    return app


@pytest.fixture
def sent():
    return []


@pytest.fixture
def send_mail(app, sent):
    @app.task(base=ClaimTask, model=Mail, shared=False)
    def send_mail(row):
        """Sends a mail."""
        sent.append(row)
        return f"sent {row}"

    return send_mail


def keys(sent):
    return [row.id for row in sent]


# ---- with a row


def test_with_a_row_it_is_the_users_own_function(send_mail, sent):
    assert send_mail.run("row") == send_mail("row") == send_mail(row="row") == "sent row"
    assert sent == ["row"] * 3
    assert send_mail.__doc__ == "Sends a mail."


def test_the_function_can_be_tried_without_a_database(send_mail, app):
    app.conf.claim_database_url = "mysql+mysqldb://nobody@nowhere.invalid/none"

    assert send_mail("row") == "sent row"


# ---- without


def test_without_arguments_it_is_one_drain(send_mail, sent):
    counts = send_mail()

    assert isinstance(counts, Counts)
    assert (counts.claimed, counts.succeeded) == (3, 3)
    assert keys(sent) == [1, 2, 3]


def test_apply_is_one_drain(send_mail, sent):
    result = send_mail.apply()

    assert result.successful()
    assert result.get().succeeded == 3
    assert keys(sent) == [1, 2, 3]


def test_always_eager_is_one_drain(send_mail, app, sent):
    app.conf.task_always_eager = True

    send_mail.delay()

    assert keys(sent) == [1, 2, 3]


def test_a_message_is_one_drain_in_a_worker(send_mail, app, sent):
    send_mail.ignore_result = False
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
        result = send_mail.delay().get(timeout=30)

    assert keys(sent) == [1, 2, 3]
    assert (result["claimed"], result["succeeded"], result["error"]) == (3, 3, None)


def test_a_message_needs_no_arguments_though_the_function_does(send_mail):
    send_mail.apply_async()
    send_mail.delay()


# ---- forms of a task


def test_a_bound_function_gets_its_task(app):
    seen: list[object] = []

    @app.task(base=ClaimTask, model=Mail, bind=True, shared=False)
    def send_mail(self, row):
        seen.append((self.name, row.id, self.window is not None))

    send_mail()

    assert seen == [(send_mail.name, key, True) for key in (1, 2, 3)]


def test_a_class_processes_rows(app, sent):
    class SendMail(ClaimTask):
        name = "send_mail"
        model = Mail

        def process(self, row):
            sent.append(row)
            return "sent"

    task = app.register_task(SendMail())

    assert task("row") == task.run("row") == "sent"
    sent.clear()
    assert task.drain().succeeded == 3
    assert keys(sent) == [1, 2, 3]


def test_a_class_processes_batches(app, sent):
    class SendMail(ClaimTask):
        name = "send_mail"
        model = Mail
        batch_size = 2

        def process_batch(self, rows):
            sent.append([row.id for row in rows])

    task = app.register_task(SendMail())

    assert task.drain().succeeded == 3
    assert sent == [[1, 2], [3]]


def test_a_base_of_ones_own_may_hold_options(app, sent):
    class Ours(ClaimTask):
        abstract = True
        model = Mail
        batch_size = 2

    @app.task(base=Ours, shared=False, lease_seconds=30)
    def send_mail(row):
        sent.append(row)

    assert (send_mail.batch_size, send_mail.lease_seconds) == (2, 30)
    assert send_mail().succeeded == 3


def test_a_shared_task_works_on_the_database_of_its_app(app, sent, monkeypatch):
    # Every app that any later test finalizes would get a copy.
    monkeypatch.setattr("celery._state._on_app_finalizers", set())

    @shared_task(base=ClaimTask, model=Mail, name="shared_send_mail")
    def send_mail(row):
        sent.append(row)

    app.finalize()

    assert app.tasks["shared_send_mail"].drain().succeeded == 3


def test_task_annotations_change_options(app):
    app.conf.task_annotations = {"send_mail": {"batch_size": 7, "lease_seconds": 33}}

    @app.task(base=ClaimTask, model=Mail, name="send_mail", shared=False)
    def send_mail(row):
        """Sends a mail."""

    assert (send_mail.batch_size, send_mail.lease_seconds) == (7, 33)


def test_self_retry_is_a_retry_of_the_row(app):
    @app.task(base=ClaimTask, model=Mail, bind=True, shared=False)
    def send_mail(self, row):
        raise self.retry(countdown=9)

    with pytest.raises(Retry) as raised:
        send_mail("row")

    assert raised.value.countdown == 9
    assert send_mail().retried == 3


def test_self_retry_may_name_the_moment(app):
    @app.task(base=ClaimTask, model=Mail, bind=True, shared=False)
    def send_mail(self, row):
        raise self.retry(eta=datetime.now(timezone.utc) + timedelta(hours=1))

    with pytest.raises(Retry) as raised:
        send_mail("row")

    assert 3590 < raised.value.countdown <= 3600


# ---- the database of a task


def test_a_task_may_have_an_engine_of_its_own(url, sent):
    app = Celery("proj", broker="memory://", set_as_current=False)

    @app.task(base=ClaimTask, model=Mail, engine=create_engine(url), shared=False)
    def send_mail(row):
        sent.append(row)

    assert send_mail().succeeded == 3


def test_a_task_without_a_database_says_what_to_set(sent):
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.update({"CLAIM_DATABASE_URL": "sqlite:///x.db"})

    @app.task(base=ClaimTask, model=Mail, shared=False)
    def send_mail(row):
        """Sends a mail."""

    with pytest.raises(
        ConfigurationError, match=r"no database: set claim_database_url.*CLAIM_DATABASE_URL is not read"
    ):
        send_mail()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "not a url with s3cret", "oracle://x/y"])
def test_a_database_that_cannot_work_is_refused_without_its_password(url):
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = url

    @app.task(base=ClaimTask, model=Mail, shared=False)
    def send_mail(row):
        """Sends a mail."""

    with pytest.raises(ConfigurationError) as raised:
        send_mail()
    assert "s3cret" not in str(raised.value)


# ---- arming


def test_a_task_of_ours_arms_its_app_and_nothing_else_does(send_mail, app):
    plain = Celery("plain", set_as_current=False)
    plain.finalize()

    app.finalize()

    assert "celery_claim.fire" in app.tasks
    assert "celery_claim.fire" not in plain.tasks
    assert not state_of(plain).armed


def test_arming_twice_is_harmless(app, send_mail):
    setup(app)
    setup(app)
    app.finalize()

    steps = [step for step in app.steps["worker"] if step.__module__.startswith("celery_claim")]
    assert len(steps) == len(set(steps)) == 3


def test_the_tasks_of_an_app_are_found(app, send_mail):
    @app.task(shared=False)
    def other():
        """No claim task."""

    assert [task.name for task in claim_tasks(app)] == [send_mail.name]


def test_a_window_message_for_an_unknown_task_says_so(app, send_mail):
    app.finalize()
    window = {"enabled": True, "task": "nowhere", "name": None, "concurrency": 1}

    with pytest.raises(LookupError, match="no task 'nowhere' is registered"):
        app.tasks["celery_claim.fire"].run(window)


def test_a_disabled_window_sends_nothing(app, send_mail):
    app.finalize()
    entry = window(send_mail, frequency=5, enabled=False, name="w")

    assert app.tasks["celery_claim.fire"].run(**entry["kwargs"]) == "paused"


def test_two_runs_in_one_process_do_not_share_their_window(app):
    windows: list[object] = []
    both = threading.Barrier(2, timeout=20)

    @app.task(base=ClaimTask, model=Mail, bind=True, batch_size=1, shared=False)
    def send_mail(self, row):
        both.wait()
        windows.append(self.window.consumer_id)

    def drain_as(number):
        send_mail._consume(send_mail._consumer(in_worker=True, limit=1, place=Place(consumer_id=number)))

    runs = [threading.Thread(target=drain_as, args=(number,)) for number in (5, 6)]
    _ = send_mail.claims
    for run in runs:
        run.start()
    for run in runs:
        run.join()

    assert sorted(windows) == [5, 6]


def test_importing_and_calling_warns_of_nothing(send_mail):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        send_mail()


def test_the_file_of_the_database_is_the_one_that_was_named(send_mail, url):
    send_mail()
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM mail WHERE status = 2")).scalar_one() == 3
    engine.dispose()
