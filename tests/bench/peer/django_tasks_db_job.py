"""The task, in a module of its own: the worker imports it by name."""

from django_tasks import task

import sink


@task()
def noop(number, payload):
    sink.done(number)
